"""What the numerical libraries read from the environment, set where the user has not, before torch is imported.

Called by `cli.main` and the demo; whoever imports `forebay` as a library decides for themselves.
"""

from __future__ import annotations

import os

DEFAULTS = {
    # Idle OpenMP threads spin for 0.2 ms (libgomp counts some 100,000 spins a millisecond) and then sleep. Without end
    # two roles' threads would spin against each other; with none, waking them costs a third of a drafter step. ACTIVE
    # leaves a spin of 0.01 ms where more threads exist than cores, PASSIVE none.
    "OMP_WAIT_POLICY": "ACTIVE",
    "GOMP_SPINCOUNT": "20000",
    # oneDNN compiles a kernel for every new shape, and the target's rows come in more lengths than its usual 1,024.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "4096",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


def set_defaults() -> None:
    """Set every variable of `DEFAULTS` that is not set yet."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
