"""Write a drafter for every engine and print how each is started.

    python examples/engines.py DRAFTER TARGET OUT

DRAFTER is a run, a checkpoint, or an exported folder of either layout.
"""

import sys
from pathlib import Path

from forebay.io.drafters import export_drafter
from forebay.io.formats import read_drafter
from forebay.io.formats.card import engine_commands


def main(drafter: str, target: str, out: str) -> None:
    for format in ("zlab", "speculators"):
        folder = export_drafter(drafter, Path(out) / format, format=format, target=target)
        spec = read_drafter(folder).spec
        print(f"{folder}: block size {spec.block_size}, target layers {list(spec.target_layer_ids)}")
        for engine, command in engine_commands(spec, format=format, drafter=str(folder), target=target).items():
            print(f"  {engine}:\n    " + command.replace("\n", "\n    "))


if __name__ == "__main__":
    main(*sys.argv[1:])
