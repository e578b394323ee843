"""One module per exported format. `read_drafter` tells them apart."""

from __future__ import annotations

from pathlib import Path

from forebay.io.formats.folder import StoredDrafter, read_config
from forebay.io.formats.zlab import read_zlab


def read_drafter(folder: str | Path) -> StoredDrafter:
    """Read a drafter's folder in whichever layout it is, strictly."""
    return read_zlab(folder)


__all__ = ["StoredDrafter", "read_config", "read_drafter"]
