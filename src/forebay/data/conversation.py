"""One row of any known shape -> one conversation in the form that chat templates take, or why it cannot be used.

Guarantees: nothing is guessed and nothing raises: a row of another shape is a `Drop` with a reason that the report
counts. Documented choices (docs/data.md): roles of other dialects are renamed, turns after the last answer are cut,
`reasoning_content` stays a field of its own, arguments of tool calls are decoded. Called by `data.encode`; pure Python.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
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
}
TURNS = ("messages", "conversations", "conversation")
REPLIES = ("response", "completion", "output", "answer")
KEPT_FIELDS = ("name", "tool_call_id", "tool_calls", "reasoning_content", "thinking")


@dataclass(slots=True)
class Drop:
    """Why a row is not used. `reason` is a key of the report's `dropped`."""

    reason: str
    detail: str = ""


@dataclass(slots=True)
class Conversation:
    """Messages ending with an assistant turn; or, for ready text, `text` and where its supervised part begins."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
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
    if isinstance(row.get("text"), str) and not any(row.get(key) is not None for key in (*TURNS, "prompt")):
        return _ready_text(row, text_separator)
    messages = messages_of(row)
    if isinstance(messages, Drop):
        return messages
    if not any(m["role"] == "assistant" for m in messages):
        return Drop("no_assistant", f"{len(messages)} turns, none by the assistant")
    last = len(messages)
    while last and not (messages[last - 1]["role"] == "assistant" and _says_something(messages[last - 1])):
        last -= 1
    if not last:
        return Drop("empty_assistant", "the assistant's turns are empty")
    tools = tools_of(row)
    if isinstance(tools, Drop):
        return tools
    notes = ["turns_after_the_last_answer_cut"] if last < len(messages) else []
    conversation = Conversation(messages[:last], tools, notes=notes)
    conversation.finish_reason = _finish_reason(row) if last == len(messages) else None
    made = row.get("regenerated")
    made = made.get("by") if isinstance(made, dict) else None
    if isinstance(made, dict) and isinstance(made.get("template_kwargs"), dict):
        conversation.made_with = made["template_kwargs"]
        conversation.raw = made.get("raw") is True and last == len(messages)
    return conversation


def prompt_of(row: dict[str, Any]) -> Conversation | Drop:
    """What `regenerate` answers: the messages without trailing assistant turns, ending with a user's or a tool's."""
    messages, tools = messages_of(row), tools_of(row)
    if isinstance(messages, Drop):
        return messages
    if isinstance(tools, Drop):
        return tools
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        return Drop("no_user_turn_at_end", "nothing to answer")
    return Conversation(messages, tools)


def messages_of(row: dict[str, Any]) -> list[dict[str, Any]] | Drop:
    """The turns of a row in one form: role, content (text), and `KEPT_FIELDS` where there are any."""
    turns = next((row[key] for key in TURNS if row.get(key) is not None), None)
    if turns is None and row.get("prompt") is not None:
        turns = _prompt_and_reply(row)
    if isinstance(turns, str):
        turns = _decoded(turns)
    if not isinstance(turns, list) or not turns:
        names = ", ".join(str(name)[:20] for name in list(row)[:6]) or "nothing"
        return Drop("no_messages", f"no messages, conversations, prompt/response or text: the row has {names}")
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns, 1):
        message = _message(turn, number)
        if isinstance(message, Drop):
            return message
        messages.append(message)
    return messages


def tools_of(row: dict[str, Any]) -> list[Any] | Drop | None:
    """The tools of a row, decoded."""
    tools = row.get("tools")
    tools = _decoded(tools) if isinstance(tools, str) else tools
    if tools is not None and not isinstance(tools, list):
        return Drop("bad_tools", f"tools is a {type(tools).__name__}, not a list")
    return tools or None


def _says_something(message: dict[str, Any]) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls"))


def _message(turn: Any, number: int) -> dict[str, Any] | Drop:
    if not isinstance(turn, dict):
        return Drop("bad_message", f"turn {number} is a {type(turn).__name__}, not an object")
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role.strip().lower() not in ROLES:
        return Drop("bad_role", f"turn {number} has role {role!r}")
    content = _content(turn.get("content", turn.get("value")))
    if content is None:
        return Drop("bad_content", f"turn {number} has content that is not text")
    message: dict[str, Any] = {"role": ROLES[role.strip().lower()], "content": content}
    for key in KEPT_FIELDS:
        value = turn.get(key)
        if value is None:
            continue
        if key == "tool_calls":
            value = _tool_calls(value)
            if value is None:
                return Drop("bad_tools", f"turn {number} has tool_calls that are not a list of calls")
        elif not isinstance(value, str):
            return Drop("bad_content", f"turn {number} has {key} that is not text")
        if value:
            message[key] = value
    return message


def _content(value: Any) -> str | None:
    """Text, or a list of text parts. None (no content) is the empty text; anything else has none."""
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


def _tool_calls(value: Any) -> list[Any] | None:
    """Calls with decoded arguments, as templates expect them."""
    value = _decoded(value) if isinstance(value, str) else value
    if not isinstance(value, list):
        return None
    calls = []
    for call in value:
        body = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(body, dict) or not isinstance(body.get("name"), str):
            return None
        arguments = body.get("arguments")
        if isinstance(arguments, str) and isinstance(_decoded(arguments), dict):
            body = {**body, "arguments": _decoded(arguments)}
        # Arrow tables fill the arguments of other calls with null.
        if isinstance(body.get("arguments"), dict):
            body = {**body, "arguments": {k: v for k, v in body["arguments"].items() if v is not None}}
        calls.append({**call, "function": body} if "function" in call else {"type": "function", "function": body})
    return calls


def _prompt_and_reply(row: dict[str, Any]) -> list[Any] | None:
    prompt, reply = row["prompt"], next((row[key] for key in REPLIES if key in row), None)
    turns = list(prompt) if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if isinstance(row.get("system"), str):
        turns.insert(0, {"role": "system", "content": row["system"]})
    if isinstance(reply, list):
        return [*turns, *reply]
    if any(key in row for key in REPLIES):
        thought = {"reasoning_content": row["reasoning_content"]} if row.get("reasoning_content") else {}
        turns.append({"role": "assistant", "content": reply, **thought})
    return turns


def _ready_text(row: dict[str, Any], separator: str | None) -> Conversation | Drop:
    text = _content(row["text"])
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
    return Conversation([], finish_reason=_finish_reason(row), text=text, text_start=start)


def _finish_reason(row: dict[str, Any]) -> str | None:
    reason = row.get("finish_reason")
    if reason is None or (isinstance(reason, str) and re.fullmatch(r"\w{1,24}", reason, re.ASCII)):
        return reason
    return "other"


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
