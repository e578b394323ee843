"""From conversations to a drafter that an engine can load.

    python examples/train.py chats.jsonl TARGET OUT optim.epochs=3 drafter.layers=2

chats.jsonl holds one conversation per line ({"messages": [{"role": ..., "content": ...}, ...]}), answered by the target
itself (`forebay regenerate`). Whatever follows OUT overrides the configuration; `forebay config` lists the keys.
"""

import sys
from pathlib import Path

from forebay import api, config


def main(chats: str, target: str, out: str, *overrides: str) -> None:
    folder = Path(out)
    api.prepare([chats], folder / "store", target=target, heldout_share=0.1)
    settings = {
        "run_dir": str(folder / "run"),
        "target": {"model": target},
        "data": {"store": str(folder / "store")},
        "drafter": {"layers": 2, "block_size": 8},
    }
    run = config.from_dict(config.apply_overrides(settings, list(overrides)))
    print(api.plan_text(api.plan(run)))
    summary = api.train(run)
    print(f"accept length {summary['accept_length_after']} after {summary['steps']} steps")
    print(api.export(folder / "run", folder / "drafter"))


if __name__ == "__main__":
    main(*sys.argv[1:])
