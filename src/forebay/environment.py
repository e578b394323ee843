"""What the numerical libraries read from the environment, set where the user has not, before torch is imported.

Called by `cli.main` and the demo; whoever imports `forebay` as a library decides for themselves.
"""

from __future__ import annotations

import os

DEFAULTS = {
    # Idle OpenMP threads spin for some milliseconds (libgomp's own count where nothing is set) and then sleep: without
    # end they would keep cores from other work, and sleeping at once loses a third of a drafter step to waking them.
    # ACTIVE leaves a spin of 1,000 where the process has more such threads than cores, PASSIVE none.
    "OMP_WAIT_POLICY": "ACTIVE",
    "GOMP_SPINCOUNT": "300000",
    # oneDNN compiles a kernel for every new shape, and the target's rows come in more lengths than its usual 1,024.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "4096",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


def set_defaults() -> None:
    """Set every variable of `DEFAULTS` that is not set yet."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
