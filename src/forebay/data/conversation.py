"""One row of any known shape -> one conversation in the form that chat templates take, or why it cannot be used.

Guarantees: nothing is guessed and nothing raises: a row of another shape is a `Drop` with a reason that the report
counts. `data.layouts` says where a row's turns are, `data.turns` what is in them; here it is decided what of them is
used: everything up to the last answer. Turns after it are cut, and so are the first turn that cannot be used and all
behind it, where an answer stands before. Called by `data.encode` and `stages.regenerate`; pure Python.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

from forebay.data.layouts import TURNS, Found, find_layout, resembles, turn_list, unwrapped
from forebay.data.turns import Drop, decoded, is_turn, messages_of, text_of

#: Rows that hold one of these are no ready text, also where a separator is given.
BEFORE_TEXT = (*TURNS, "prompt", "chosen", "replies")


@dataclass(slots=True)
class Conversation:
    """Messages ending with an assistant turn; or, for ready text, `text` and where its supervised part begins."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    layout: str = ""  # of `data.layouts`
    finish_reason: str | None = None
    made_with: dict[str, Any] | None = None  # template arguments that `regenerate` recorded
    raw: bool = False  # the last answer is what the target wrote, letter by letter: no template made it
    text: str | None = None
    text_start: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Content hash: 32 hex digits, the same for the same conversation in any file."""
        return _hash([self.messages, self.tools, self.text])

    @property
    def split_key(self) -> float:
        """A number in [0, 1) from what comes before the first answer: rows of one prompt fall on one side."""
        if self.text is not None:
            before: Any = self.text[: self.text_start]
        else:
            first = next(i for i, m in enumerate(self.messages) if m["role"] == "assistant")
            before = self.messages[:first] or self.messages[:1]
        return int(_hash(before)[:13], 16) / 16**13

    @property
    def user_text(self) -> str:
        """What users wrote, for the overlap of training and held-out prompts: not what a template adds."""
        if self.text is not None:
            return self.text[: self.text_start]
        return "\n".join(m["content"] for m in self.messages if m["role"] == "user" and m["content"])


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def conversation_of(row: dict[str, Any], *, text_separator: str | None = None) -> Conversation | Drop:
    """See the module. `text_separator`: in rows of ready `text`, what follows its first occurrence is supervised."""
    row = unwrapped(row)
    if text_separator and isinstance(row.get("text"), str) and not any(row.get(key) is not None for key in BEFORE_TEXT):
        return _ready_text(row, text_separator)
    found = find_layout(row)
    if found is None and isinstance(row.get("text"), str) and not is_turn(row):
        return _ready_text(row, text_separator)
    if not isinstance(found, Found):
        return found or _unknown(row)
    turns = turn_list(found.turns)
    if not turns:
        return _unknown(row)
    messages, fault = messages_of(turns)
    last = len(messages)
    while last and not (messages[last - 1]["role"] == "assistant" and _says_something(messages[last - 1])):
        last -= 1
    if not last:
        if fault is not None:
            return fault
        if any(m["role"] == "assistant" for m in messages):
            return Drop("empty_assistant", "the assistant's turns are empty")
        return Drop("no_assistant", f"{len(messages)} turns, none by the assistant")
    tools = _tools(found)
    if isinstance(tools, Drop):
        return tools
    whole = last == len(messages) and fault is None
    notes = ["turns_that_cannot_be_used_cut" if fault is not None else "turns_after_the_last_answer_cut"]
    conversation = Conversation(messages[:last], tools, layout=found.layout, notes=[] if whole else notes)
    conversation.finish_reason = _finish_reason(found.finish_reason) if whole else None
    made = row.get("regenerated")
    made = made.get("by") if isinstance(made, dict) else None
    if isinstance(made, dict) and isinstance(made.get("template_kwargs"), dict):
        conversation.made_with = made["template_kwargs"]
        conversation.raw = made.get("raw") is True and whole
    return conversation


def prompt_of(row: dict[str, Any]) -> Conversation | Drop:
    """What `regenerate` answers: the messages without trailing assistant turns, ending with a user's or a tool's."""
    row = unwrapped(row)
    found = find_layout(row)
    if not isinstance(found, Found):
        return found or _unknown(row)
    turns = turn_list(found.turns)
    if not turns:
        return _unknown(row)
    (messages, fault), tools = messages_of(turns), _tools(found)
    if fault is not None:
        return fault
    if isinstance(tools, Drop):
        return tools
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        return Drop("no_user_turn_at_end", "nothing to answer")
    return Conversation(messages, tools, layout=found.layout)


def _tools(found: Found) -> list[Any] | Drop | None:
    """The tools of a row, decoded."""
    tools = decoded(found.tools)
    if found.tools not in (None, "") and not isinstance(tools, list):
        return Drop("bad_tools", f"tools is a {type(found.tools).__name__}, not a list")
    return tools or None


def _unknown(row: dict[str, Any]) -> Drop:
    names = ", ".join(str(name)[:20] for name in list(row)[:6]) or "nothing"
    hint = resembles(row)
    return Drop("no_messages", f"no layout that is known: the row has {names}" + (f"; {hint}" if hint else ""))


def _says_something(message: dict[str, Any]) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls"))


def _ready_text(row: dict[str, Any], separator: str | None) -> Conversation | Drop:
    text = text_of(row["text"])
    if text is None:
        return Drop("bad_content", "text is not text")
    if not separator:
        return Drop("text_without_separator", "a row of ready text: say with --text-separator where the answer begins")
    at = text.find(separator)
    if at < 0:
        return Drop("no_assistant", f"the separator {separator!r} is not in the text")
    start = at + len(separator)
    if not text[start:].strip():
        return Drop("empty_assistant", "nothing follows the separator")
    return Conversation(
        [], layout="text", finish_reason=_finish_reason(row.get("finish_reason")), text=text, text_start=start
    )


def _finish_reason(reason: Any) -> str | None:
    if reason is None or (isinstance(reason, str) and re.fullmatch(r"\w{1,24}", reason, re.ASCII)):
        return reason
    return "other"
