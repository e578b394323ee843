"""Conversations -> text by the tokenizer's own chat template, and which characters of it the target would write.

Guarantees: the supervised spans are found by rendering prefixes of the conversation with and without the generation
prompt, never by looking for markers; what the generation prompt supplies (headers, an empty thinking block) is outside;
the end of turn is inside; an answer whose text the template drops or rewrites is never supervised by accident. An
earlier answer that the template rewrites once a later turn follows (thinking stripped from the history) is not what
the target would write there: it is left out and counted, or given a row of its own (`split_turns`). Called by
`data.encode`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import jinja2

from forebay.data.conversation import Conversation, Drop

#: What a template may raise: its own complaints, and the slips of an author who did not expect this row.
FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
SENTINEL = "forebay0answer0starts0here"


@dataclass(slots=True)
class Rendered:
    """Text and the supervised character ranges, in order. `notes` are counted in the report, once per row."""

    text: str
    spans: list[tuple[int, int]]
    notes: list[str] = field(default_factory=list)
    thinking: bool = False


class ChatTemplate:
    """A tokenizer's chat template with its arguments (`enable_thinking` and the like), or another one in its place."""

    def __init__(
        self,
        tokenizer: Any,
        arguments: dict[str, Any] | None = None,
        *,
        chat_template: str | None = None,
        last_turn_only: bool = False,
        split_turns: bool = False,
    ):
        self.tokenizer, self.arguments, self.chat_template = tokenizer, arguments or {}, chat_template
        self.last_turn_only, self.split_turns = last_turn_only, split_turns
        marks = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()} - {""}
        self._end_mark = re.compile(rf"(?:{'|'.join(map(re.escape, sorted(marks)))})\s*\Z") if marks else None

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, *, prompt: bool = False) -> str:
        """The text of some messages; with `prompt`, up to where the next answer begins."""
        return self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self.chat_template,
            tokenize=False,
            add_generation_prompt=prompt,
            **self.arguments,
        )

    def rows(self, conversation: Conversation) -> list[Rendered] | Drop:
        """The training rows of one conversation: one, or with `split_turns` one more per rewritten answer."""
        if conversation.text is not None:
            return [Rendered(conversation.text, [(conversation.text_start, len(conversation.text))])]
        try:
            messages, notes = self._known_roles(conversation)
            return self._rows(conversation, messages, notes)
        except FAULTS as error:
            first = str(error).splitlines()[0] if str(error) else ""
            return Drop("template_error", f"{type(error).__name__}: {first}")

    def _known_roles(self, conversation: Conversation) -> tuple[list[dict[str, Any]], list[str]]:
        """A template that knows no `developer` gets a system turn instead."""
        messages = conversation.messages
        told = [m["content"] for m in messages if m["role"] == "developer"]
        if not told:
            return messages, []
        try:
            text = self.render(messages, conversation.tools)
            if all(content.strip() in text for content in told):
                return messages, []
        except FAULTS:
            pass  # tried again as a system turn; if that fails too, the row says so
        as_system = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        return as_system, ["developer_as_system"]

    def _rows(
        self, conversation: Conversation, messages: list[dict[str, Any]], notes: list[str]
    ) -> list[Rendered] | Drop:
        tools, last = conversation.tools, len(messages) - 1
        asked = next((i for i, m in enumerate(messages) if m["role"] in ("user", "tool")), last)
        if asked == last:
            return Drop("no_user", "no user turn before the answer")
        final = self._final(messages, tools, conversation.finish_reason, raw=conversation.raw)
        if isinstance(final, Drop):
            return final
        rewritten = []
        # `regenerate` answers the last turn; who wrote the earlier ones is not known.
        only_last = self.last_turn_only or conversation.made_with is not None
        if only_last and not self.last_turn_only and any(m["role"] == "assistant" for m in messages[:last]):
            notes.append("earlier_answers_not_by_the_target")
        for turn in range(0 if only_last else last):
            message = messages[turn]
            if message["role"] != "assistant" or not (message["content"].strip() or message.get("tool_calls")):
                continue
            if turn < asked:
                notes.append("answer_without_question")
                continue
            span = self._earlier(messages, tools, turn, final.text)
            if span is None:
                rewritten.append(turn)
            else:
                final.spans.insert(-1, span)
        if tools and not _names_a_tool(tools, final.text):
            notes.append("tools_dropped")
        final.notes += notes
        rows = [final]
        for turn in rewritten:
            alone = self._final(messages[: turn + 1], tools, None) if self.split_turns else Drop("")
            if isinstance(alone, Drop):
                final.notes.append("turns_rewritten_by_the_template")
            else:
                rows.append(alone)
        return rows

    def _final(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, finish_reason: str | None, *, raw: bool = False
    ) -> Rendered | Drop:
        """The text of a conversation with its last answer supervised."""
        before, answer = messages[:-1], messages[-1]
        if raw:
            return self._raw(before, tools, answer["content"], finish_reason)
        prompt, text = self.render(before, tools, prompt=True), self.render(messages, tools)
        start, notes = len(prompt), []
        if prompt == self.render(before, tools) or not text.startswith(prompt):
            header = self._header(before, tools)
            if header is None or not text.startswith(header):
                return Drop("no_span", f"the text does not go on from the prompt, which ends {_end(prompt)}")
            if header.startswith(prompt):
                if header[start:].strip():  # a space before the answer is the target's own
                    notes.append("template_without_generation_prompt")
                    start = len(header)
            elif prompt.startswith(header):
                # Served, the answer follows the prompt as it is, with whatever the template puts there.
                reply = text[len(header) :]
                if _opens_thinking(prompt[len(header) :]) and "</think>" not in reply:
                    return Drop("no_span", f"the prompt ends {_end(prompt)} but the row has no thinking: turn it off")
                text = prompt + reply
            else:
                return Drop("no_span", f"the prompt ends {_end(prompt)}, the conversation reads {_end(header)} there")
        end = self._end(text, start, with_mark=finish_reason != "length")
        reply = text[start:end]
        if not _holds(reply, answer):
            return Drop("no_span", f"the template renders the answer as {reply[:60]!r}")
        thought = answer.get("reasoning_content") or answer.get("thinking") or ""
        if (thought and thought.strip() not in text) or ("</think>" in answer["content"] and "</think>" not in text):
            notes.append("reasoning_dropped")
        return Rendered(text, [(start, end)], notes, thinking="</think>" in reply or bool(thought and thought in reply))

    def _raw(
        self, before: list[dict[str, Any]], tools: list[Any] | None, answer: str, finish_reason: str | None
    ) -> Rendered | Drop:
        """The answer behind its prompt as the target wrote it, with the template's end mark if it came to an end."""
        prompt = self.render(before, tools, prompt=True)
        done = self.render([*before, {"role": "assistant", "content": SENTINEL}], tools)
        if SENTINEL not in done:
            return Drop("no_span", "the template does not render the answer")
        mark = done.split(SENTINEL)[-1] if finish_reason != "length" else ""
        end = len(prompt) + len((answer + mark).rstrip() if mark else answer)
        return Rendered(prompt + answer + mark, [(len(prompt), end)], thinking="</think>" in answer)

    def _earlier(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, turn: int, text: str
    ) -> tuple[int, int] | None:
        """Where an earlier answer stands in the whole text, if it stands there as the target would write it."""
        prompt = self.render(messages[:turn], tools, prompt=True)
        done = self.render(messages[: turn + 1], tools)
        start = len(prompt)
        if prompt == self.render(messages[:turn], tools):
            header = self._header(messages[:turn], tools) or prompt
            start = len(header) if header[start:].strip() else start
        if not done.startswith(prompt):
            return None
        for with_mark in (True, False):  # some templates end the last answer by another mark than earlier ones
            end = self._end(done, start, with_mark=with_mark)
            if text.startswith(done[:end]) and _holds(done[start:end], messages[turn]):
                return start, end
        return None

    def _header(self, before: list[dict[str, Any]], tools: list[Any] | None) -> str | None:
        """What an answer's own turn begins with, after the turns before it."""
        text = self.render([*before, {"role": "assistant", "content": SENTINEL}], tools)
        at = text.find(SENTINEL)
        return text[:at] if at >= 0 else None

    def _end(self, text: str, start: int, *, with_mark: bool) -> int:
        """The end of an answer that begins at `start`: after its end mark or before it; no trailing line break."""
        end = start + len(text[start:].rstrip())
        if not with_mark and self._end_mark and (mark := self._end_mark.search(text, start, end)):
            return mark.start()
        return end


def _holds(reply: str, answer: dict[str, Any]) -> bool:
    """Whether a rendered answer has the row's words: the visible text, or the call's name."""
    said = answer["content"].split("</think>")[-1].strip()
    calls = answer.get("tool_calls") or []
    return bool(reply.strip()) and said in reply and all(call["function"]["name"] in reply for call in calls)


def _names_a_tool(tools: list[Any], text: str) -> bool:
    bodies = [t.get("function", t) if isinstance(t, dict) else {} for t in tools]
    return any(isinstance(b, dict) and str(b.get("name")) in text for b in bodies)


def _opens_thinking(inserted: str) -> bool:
    return "<think>" in inserted.split("</think>")[-1]


def _end(text: str) -> str:
    return repr(text[-40:])
