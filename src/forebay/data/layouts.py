"""Which fields of a row hold its conversation: one function per layout, and the order in which they are tried.

Guarantees: a layout takes a row only where nothing else could be meant; the first that does is used, and the report
counts rows by layout. A row that none takes is described by `resembles`, which names the option or layout to use. What
stands in a turn is the matter of `data.turns`. Called by `data.conversation`, `data.rows` and `data.values`.

A new layout is a function `row -> Found | Drop | None` in `LAYOUTS`, its fields in `FIELDS`, a row in docs/data.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from forebay.data.turns import CONTENT_KEYS, ROLE_KEYS, Drop, decoded, is_turn

TURNS = ("messages", "conversations", "conversation")
QUESTIONS = ("prompt", "query", "question", "input")
ANSWERS = ("response", "completion", "output", "answer")
SYSTEMS = ("system", "system_prompt")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
#: Every field that a layout reads. `regenerate` leaves them out: they describe the old answer.
FIELDS = frozenset(
    (*TURNS, *QUESTIONS, *ANSWERS, *SYSTEMS, *THOUGHTS, "instruction", "context", "history", "chosen", "rejected")
) | {"tools", "functions", "finish_reason", "body", "request", "replies"}
#: Fields of a file or a row under which rows are kept, whatever those are.
WRAPPERS = ("data", "rows", "row", "instances", "examples", "items", "records", "samples")


@dataclass(slots=True)
class Found:
    """Where a row's turns are, as they are, and what it says beside them."""

    turns: Any
    tools: Any = None
    finish_reason: Any = None
    layout: str = ""


def find_layout(row: dict[str, Any]) -> Found | Drop | None:
    """What the first layout that knows the row finds in it."""
    for name, layout in LAYOUTS.items():
        found = layout(row)
        if isinstance(found, Found):
            found.layout = name
            found.tools = found.tools if found.tools is not None else _first(row, ("tools", "functions"))
            found.finish_reason = found.finish_reason or row.get("finish_reason")
        if found is not None:
            return found
    return None


def unwrapped(row: dict[str, Any]) -> dict[str, Any]:
    """The row in {"row": {...}}, beside its number or alone, or in another field that is the only one."""
    while True:
        key = next(iter(row), "") if len(row) == 1 else "row" if "row_idx" in row else ""
        inner = row.get(key)
        if not isinstance(inner, dict) or (key in FIELDS and not isinstance(find_layout(inner), Found)):
            return row
        row = inner


def is_row(value: Any, key: str) -> bool:
    """Whether a member of the list under `key` is a row of its own, and not a part of the object that has the list."""
    if isinstance(value, list):
        return key in WRAPPERS and bool(value) and is_turn(value[0])
    if not isinstance(value, dict) or is_turn(value) or (key in FIELDS and key not in TURNS):
        return False
    return key in WRAPPERS or isinstance(find_layout(unwrapped(value)), Found)


def messages(row: dict[str, Any]) -> Found | None:
    """{"messages" or "conversations": [turn, ...], "system": ...}, also as JSON text, or as lists by field."""
    given = _first(row, TURNS)
    turns = turn_list(given)
    if given is None:
        return None
    if not turns:
        return Found(given)
    return Found([*_system(row, turns), *turns])


def batch_output(row: dict[str, Any]) -> Found | Drop | None:
    """{"custom_id", "response": {"status_code", "body": {"choices": [...]}}, "error"}, with its `request` joined."""
    response = row.get("response")
    if "custom_id" not in row or not (isinstance(response, dict) or ("response" in row and "error" in row)):
        return None
    body = response.get("body") if isinstance(response, dict) else None
    choices = body.get("choices") if isinstance(body, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    if row.get("error") or not isinstance(choice.get("message"), dict):
        status = response.get("status_code") if isinstance(response, dict) else None
        return Drop("request_failed", f"custom_id {row['custom_id']!r}: status {status}, error {row.get('error')!r}")
    if "request" not in row:
        return Drop("no_request", f"custom_id {row['custom_id']!r}: give the file of the requests by --requests")
    asked = batch_request({"custom_id": "", "body": row["request"]})
    turns = turn_list(asked.turns) if asked else None
    if asked is None or not turns:
        return Drop("no_request", f"custom_id {row['custom_id']!r}: the request holds no messages")
    return Found([*turns, choice["message"]], asked.tools, choice.get("finish_reason"))


def batch_request(row: dict[str, Any]) -> Found | None:
    """{"custom_id", "body": {"messages": [...], "tools": [...]}}: a prompt."""
    body = row.get("body")
    if "custom_id" not in row or not isinstance(body, dict) or "messages" not in body:
        return None
    return Found(body["messages"], _first(body, ("tools", "functions")))


def preference(row: dict[str, Any]) -> Found | Drop | None:
    """{"chosen": conversation or answer, "rejected": ..., "prompt": ...}: what was chosen."""
    chosen = row.get("chosen")
    if not isinstance(chosen, str | list | dict) or not ("rejected" in row or _first(row, TURNS) is None):
        return None
    turns = _dialog(chosen) or turn_list(chosen) or ([chosen] if is_turn(chosen) else None)
    if turns is None and isinstance(chosen, str):
        turns = [{"role": "assistant", "content": chosen}]
    if not turns:
        return Found(chosen)
    if not isinstance(turns[0], dict) or not _is_answer(turns[0]):
        return Found([*_system(row, turns), *turns])
    before = next((found for layout in (messages, alpaca, question) if (found := layout(row))), None)
    asked = _dialog(row.get("prompt")) or (turn_list(before.turns) if before else None) or []
    while asked and isinstance(asked[-1], dict) and _is_answer(asked[-1]):
        asked.pop()
    if not asked:
        return Drop("no_messages", "`chosen` is an answer alone, and the row holds no prompt")
    return Found([*asked, *turns])


def tree(row: dict[str, Any]) -> Found | None:
    """{"prompt": {"text", "role", "replies": [...]}}: the path of the best-ranked replies from the root."""
    prompt = row.get("prompt")
    node: Any = prompt if isinstance(prompt, dict) else row
    if not isinstance(node.get("replies"), list):
        return None
    turns = []
    while node is not None:
        turns.append({"role": node.get("role"), "content": node.get("text")})
        replies = node.get("replies") if isinstance(node.get("replies"), list) else []
        known = [reply for reply in replies if isinstance(reply, dict) and not reply.get("deleted")]
        node = min(known, key=_rank, default=None)  # of equals the first
    return Found(turns)


def alpaca(row: dict[str, Any]) -> Found | None:
    """{"instruction", "input" or "context", "output" or "response", "system", "history"}."""
    instruction, more = row.get("instruction"), _first(row, ("input", "context"))
    if not isinstance(instruction, str):
        return None
    return _exchange(row, f"{instruction}\n\n{more}" if isinstance(more, str) and more.strip() else instruction)


def question(row: dict[str, Any]) -> Found | None:
    """{"prompt", "query", "question" or "input"; "response", "completion", "output" or "answer"; "history"}."""
    asked = _first(row, QUESTIONS)
    return None if asked is None else _exchange(row, asked)


LAYOUTS: dict[str, Callable[[dict[str, Any]], Found | Drop | None]] = {
    "batch output": batch_output,
    "batch request": batch_request,
    "preference": preference,
    "messages": messages,
    "tree": tree,
    "instruction": alpaca,
    "question and answer": question,
}


def turn_list(value: Any) -> list[Any] | None:
    """Turns as a list, from JSON text or from a table's lists by field: {"from": [...], "value": [...]}."""
    value = decoded(value)
    if isinstance(value, dict) and is_turn(value) and value and all(isinstance(v, list) for v in value.values()):
        length = max(len(column) for column in value.values())
        if all(len(column) == length for column in value.values()):
            return [dict(zip(value, turn, strict=True)) for turn in zip(*value.values(), strict=True)]
    return list(value) if isinstance(value, list) else None


def _exchange(row: dict[str, Any], asked: Any) -> Found:
    """A question and its answer behind the exchanges of `history`: turns, or pairs of texts."""
    listed = turn_list(asked) if isinstance(asked, list) else None
    turns = listed if listed is not None else [{"role": "user", "content": asked}]
    history = turn_list(row.get("history")) or []
    pairs = [pair if isinstance(pair, list | tuple) else [pair] for pair in history]
    if all(len(pair) == 2 for pair in pairs):
        names = ("user", "assistant")
        history = [{"role": names[i], "content": pair[i]} for pair in pairs for i in (0, 1)]
    turns = [*history, *turns]
    turns = [*_system(row, turns), *turns]
    named = [key for key in ANSWERS if key in row]
    answer = row[named[0]] if named else None
    if isinstance(answer, list):
        return Found([*turns, *answer])
    if named:
        thought = next(
            (row[key] for key in THOUGHTS if isinstance(row.get(key), str) and " " in row[key].strip()), None
        )
        turns.append({"role": "assistant", "content": answer, "reasoning_content": thought})
    return Found(turns)


def _system(row: dict[str, Any], turns: list[Any]) -> list[Any]:
    """The system turn of a field of its own, where the turns have none."""
    told = _first(row, SYSTEMS)
    has_one = any(isinstance(turn, dict) and _first(turn, ROLE_KEYS) == "system" for turn in turns)
    return [{"role": "system", "content": told}] if isinstance(told, str) and told.strip() and not has_one else []


def _dialog(text: Any) -> list[Any] | None:
    """The turns of "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    if not isinstance(text, str) or not text.lstrip().startswith("Human:"):
        return None
    _, *pieces = re.split(r"(?:\A|\n\n)\s*(Human|Assistant):", text)
    names = {"Human": "user", "Assistant": "assistant"}
    return [{"role": names[who], "content": said.strip()} for who, said in zip(pieces[::2], pieces[1::2], strict=True)]


def _is_answer(turn: dict[str, Any]) -> bool:
    return str(_first(turn, ROLE_KEYS)).lower() in ("assistant", "gpt", "model", "bot")


def _rank(reply: dict[str, Any]) -> float:
    rank = reply.get("rank")
    return rank if isinstance(rank, int | float) else float("inf")


def _first(values: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((values[key] for key in keys if values.get(key) is not None), None)


def resembles(row: dict[str, Any]) -> str:
    """What a row that no layout takes seems to be, and what to do about it; empty where it is like nothing known."""
    lists = {
        key: value for key, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)
    }
    for key, value in lists.items():
        if is_turn(value[0]):
            return f"its `{key}` holds turns: --field messages={key}"
        if is_row(value[0], key) or key in WRAPPERS:
            return f"its `{key}` holds rows: a file that is one such object must be named .json, not .jsonl"
        if len(texts := [name for name, text in value[0].items() if isinstance(text, str)]) == 2:
            return (
                f"its `{key}` looks like turns with {texts[0]} and {texts[1]} for {ROLE_KEYS[0]} and {CONTENT_KEYS[0]}"
            )
    if {"message_id", "parent_id", "role"} <= set(row):
        return "it is one message of a tree: give the file of whole trees"
    texts = [key for key, value in row.items() if isinstance(value, str)]
    asked = _like((*QUESTIONS, "instruction", "user", "human", "problem"), texts)
    answered = _like((*ANSWERS, "assistant", "reply", "solution", "target"), texts)
    if asked and answered and asked != answered:
        return f"it looks like a question and its answer: --field prompt={asked} --field response={answered}"
    if answered:
        return ""
    return f"it looks like a prompt: --field prompt={asked}" if asked else ""


def _like(names: tuple[str, ...], given: list[str]) -> str | None:
    """The field whose name has one of `names` in it, or is nearest to one."""
    for name in names:
        for key in given:
            if name in key.lower():
                return key
    return next((found[0] for name in names if (found := get_close_matches(name, given, 1, 0.75))), None)
