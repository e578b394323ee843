"""One module per exported format. `read_drafter` tells them apart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.errors import UsageError
from forebay.io.formats.card import model_card
from forebay.io.formats.folder import StoredDrafter, read_config
from forebay.io.formats.speculators import read_speculators, verifier_of, write_speculators
from forebay.io.formats.zlab import read_zlab, write_zlab

FORMATS = ("zlab", "speculators")


def format_of(folder: str | Path) -> str:
    """The layout of a drafter's folder, told by its config.json."""
    return "speculators" if "speculators_model_type" in read_config(Path(folder)) else "zlab"


def read_drafter(folder: str | Path, num_target_layers: int | None = None) -> StoredDrafter:
    """Read a drafter's folder in whichever layout it is, strictly. `num_target_layers`: see `read_speculators`."""
    if format_of(folder) == "speculators":
        return read_speculators(folder, num_target_layers)
    return read_zlab(folder)


def write_drafter(
    folder: str | Path,
    drafter: StoredDrafter,
    format: str = "zlab",
    *,
    target: str | None = None,
    target_architecture: str | None = None,
    extras: Mapping[str, Any] | None = None,
    about: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write `drafter` for an engine, with its model card, and read it back strictly. Returns the folder.

    `target`: name or folder of the target, as engines are to find it. `extras`: `folder.EXTRAS`. `about`: see
    `card.model_card`. Raises UsageError (unknown format, folder in use) or ContractError (the layout cannot say it).
    """
    if format not in FORMATS:
        raise UsageError(f"unknown format '{format}': choose one of {', '.join(FORMATS)}")
    named = target or drafter.dflash.get("target_name") or verifier_of(drafter.config)[0]
    card = model_card(drafter.spec, format=format, target=named, about=about)
    if format == "zlab":
        return write_zlab(folder, drafter, extras=extras, card=card, overwrite=overwrite)
    return write_speculators(
        folder,
        drafter,
        verifier=named,
        verifier_architecture=target_architecture,
        extras=extras,
        card=card,
        overwrite=overwrite,
    )


__all__ = ["FORMATS", "StoredDrafter", "format_of", "read_drafter", "write_drafter"]
