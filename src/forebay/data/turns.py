"""Turns of any dialect -> messages in the form that chat templates take.

Guarantees: nothing is guessed and nothing raises; a turn that no template could take is a `Drop` that names it, and the
messages before it are given with it. Roles of other dialects are renamed; thinking stays a field of its own; arguments
of tool calls are decoded, whether a call stands in `tool_calls`, in a turn of its own or among the parts of a content.
Called by `data.conversation`; which field of a row holds its turns is the matter of `data.layouts`. Pure Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
CALL_ROLES = ("function_call", "tool_call")  # the turn's content is the call
ROLE_KEYS = ("role", "from", "speaker")
CONTENT_KEYS = ("content", "value", "text")
CALL_KEYS = ("tool_calls", "function_call")
#: Fields of text that go on to the template, and the name that it knows them by.
KEPT_FIELDS = {
    "name": "name",
    "tool_call_id": "tool_call_id",
    "reasoning_content": "reasoning_content",
    "reasoning": "reasoning_content",
    "thinking": "thinking",
}


@dataclass(slots=True)
class Drop:
    """Why a row is not used. `reason` is a key of the report's `dropped`."""

    reason: str
    detail: str = ""


class _Unusable(Exception):
    """A turn that no template could take: (reason, what is wrong with it)."""


def messages_of(turns: list[Any]) -> tuple[list[dict[str, Any]], Drop | None]:
    """The messages of the turns up to the first that cannot be used, and why that one cannot."""
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns, 1):
        try:
            messages += _messages(turn)
        except _Unusable as error:
            reason, problem = error.args
            return messages, Drop(reason, f"turn {number} {problem}")
    return messages, None


def is_turn(value: Any) -> bool:
    """Whether a value looks like a turn: an object that tells who speaks."""
    return isinstance(value, dict) and (any(key in value for key in ROLE_KEYS) or _names_speakers(value))


def decoded(value: Any) -> Any:
    """A value that may be written as JSON text; None where it is text that is no JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def text_of(value: Any) -> str | None:
    """Text, or a list of text parts, as text. None (no content) is the empty text; anything else has none."""
    if value is None:
        return ""
    if isinstance(value, list):
        parts = [p if isinstance(p, str) else p.get("text") if isinstance(p, dict) else None for p in value]
        value = "".join(parts) if all(isinstance(p, str) for p in parts) else None
    if not isinstance(value, str):
        return None
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair: no tokenizer takes it
        return None
    return value


def _text(value: Any, name: str) -> str:
    text = text_of(value)
    if text is None:
        raise _Unusable("bad_content", f"has {name} that is not text")
    return text


def _first(values: dict[str, Any], keys: Iterable[str]) -> Any:
    return next((values[key] for key in keys if values.get(key) is not None), None)


def _names_speakers(turn: dict[str, Any]) -> bool:
    """{"human": "hi", "assistant": "hello"}: the key says who speaks."""
    return bool(turn) and all(isinstance(key, str) and key.lower() in ROLES for key in turn)


def _messages(turn: Any) -> list[dict[str, Any]]:
    """Mostly one; several where a turn holds both sides, or results of tools beside text."""
    if not isinstance(turn, dict):
        raise _Unusable("bad_message", f"is a {type(turn).__name__}, not an object")
    if _names_speakers(turn):
        return [m for who, said in turn.items() for m in _messages({"role": who, "content": said})]
    role = _first(turn, ROLE_KEYS)
    dialect = role.strip().lower().replace("-", "_") if isinstance(role, str) else ""
    if dialect not in ROLES:
        raise _Unusable("bad_role", f"has role {role!r}")
    role, content, calls = ROLES[dialect], _first(turn, CONTENT_KEYS), _first(turn, CALL_KEYS)
    if dialect in CALL_ROLES:
        content, calls = None, content
    if role == "tool" and (isinstance(content, int | float | dict) or _is_data(content)):
        content = json.dumps(content, ensure_ascii=False)
    parts = _Parts(content if isinstance(content, list) else [])
    message = {"role": role, "content": _text(parts.said if isinstance(content, list) else content, "content")}
    for key, known_as in KEPT_FIELDS.items():
        value = turn.get(key) if key != "reasoning" or isinstance(turn.get(key), str) else None
        if value is not None and known_as not in message and (text := _text(value, key)):
            message[known_as] = text
    if parts.thought:
        message.setdefault("reasoning_content", _text(parts.thought, "thinking"))
    if called := _calls(calls) + parts.calls:
        message["tool_calls"] = called
    says_nothing = not message["content"] and parts.results  # a user's turn of another dialect that only carries them
    return parts.results if says_nothing else [*parts.results, message]


def _is_data(content: Any) -> bool:
    """A list that a tool returned, rather than the parts of a text."""
    return isinstance(content, list) and not all(
        isinstance(p, str) or (isinstance(p, dict) and "type" in p) for p in content
    )


class _Parts:
    """A content in parts: what is said (text parts), thought, called, and what tools returned."""

    def __init__(self, parts: list[Any]) -> None:
        self.said, self.thought, self.calls, self.results = [], [], [], []
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in ("thinking", "reasoning"):
                self.thought.append(_first(part, ("thinking", "reasoning", "text")))
            elif kind == "tool_use":
                self.calls += _calls([{"id": part.get("id"), "name": part.get("name"), "arguments": part.get("input")}])
            elif kind == "tool_result":
                result = {"role": "tool", "content": part.get("content"), "tool_call_id": part.get("tool_use_id")}
                self.results += _messages(result)
            else:
                self.said.append(part)


def _calls(value: Any) -> list[Any]:
    """Calls in one form, `{"type": "function", "function": {"name", "arguments"}}`, with decoded arguments."""
    if value is None:
        return []
    value = decoded(value)
    calls = []
    for call in value if isinstance(value, list) else [value]:
        body = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(body, dict) or not isinstance(body.get("name"), str):
            raise _Unusable("bad_tools", "has tool calls that are not a list of calls")
        around = {"type": "function", **call} if body is not call else {"type": "function"}
        if body is call and isinstance(call.get("id"), str):
            around["id"] = call["id"]
            body = {key: value for key, value in call.items() if key not in ("id", "type")}
        arguments = decoded(body.get("arguments"))
        if isinstance(arguments, dict):
            # Tables fill the arguments of other calls with null.
            body = {**body, "arguments": {k: v for k, v in arguments.items() if v is not None}}
        calls.append({**around, "function": body})
    return calls
