"""What a process and its devices use now. Called by `runtime.steplog`; imports no torch where none is loaded."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from typing import Any


def memory() -> dict[str, Any]:
    """`process_bytes`; with a GPU also `device_bytes`, `device_peak_bytes` and `device_busy_share` by device."""
    out: dict[str, Any] = {"process_bytes": process_bytes()}
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return out
    devices = range(torch.cuda.device_count())
    out["device_bytes"] = {f"cuda:{i}": torch.cuda.memory_allocated(i) for i in devices}
    out["device_peak_bytes"] = {f"cuda:{i}": torch.cuda.max_memory_allocated(i) for i in devices}
    with contextlib.suppress(ImportError, RuntimeError):  # the driver's own library (pynvml) tells it, if it is there
        out["device_busy_share"] = {f"cuda:{i}": torch.cuda.utilization(i) / 100 for i in devices}
    return out


def process_bytes() -> int:
    """Resident memory of this process."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux: the most that it ever was
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
