"""`regenerate` by a server that speaks the OpenAI chat protocol (vLLM, SGLang, and others).

Guarantees: at most `concurrency` requests at once; each is tried again after time-outs, broken connections, 429 and
5xx, with growing pauses; a prompt that fails for good is named, and skipped or stops the run; a server that is not
there is an error within seconds. What was answered is on disk, so the same command goes on. Called by `api` and `cli`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from forebay.data.progress import Progress
from forebay.errors import ForebayError, UsageError
from forebay.stages.regenerate import AnswerFile, Prompt, Prompts, Summary, seed_of, settings_record

CONNECT_S = 3.0
LONGEST_PAUSE_S = 60.0


class EndpointError(ForebayError):
    """The server is not there, or goes on failing."""


@dataclass
class _Failed(Exception):
    """One request's failure. `again`: whether the same request may succeed later."""

    reason: str
    again: bool
    wait_s: float | None = None


def regenerate_by_endpoint(
    prompts_file: Any,
    out_file: str | os.PathLike[str],
    *,
    endpoint: str,
    model: str | None = None,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    seed: int = 0,
    template_kwargs: dict[str, Any] | None = None,
    fields: Mapping[str, str] | None = None,
    concurrency: int = 64,
    timeout_s: float = 120.0,
    retries: int = 3,
    pause_s: float = 1.0,
    on_fail: Literal["skip", "stop"] = "skip",
    api_key: str | None = None,
    progress: bool = True,
) -> Summary:
    """Answer prompts by the server at `endpoint` (with or without /v1). `model`: None takes the one it serves.

    Raises EndpointError: no server, or failures of many prompts in a row. UsageError, DataError as `regenerate` does.
    """
    if concurrency < 1:
        raise UsageError(f"concurrency {concurrency} must be at least 1")
    base = endpoint.rstrip("/")
    base = base if base.endswith("/v1") else base + "/v1"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    started = time.monotonic()
    name = _served_model(base, headers, model)
    made_by = settings_record(name, template_kwargs or {}, temperature, seed, max_new_tokens, raw=False)
    summary = Summary()
    with AnswerFile(Path(out_file), made_by) as answers:
        prompts = Prompts(prompts_file, answers.keys, summary, fields)
        body = {"model": name, "max_tokens": max_new_tokens, "temperature": temperature}
        if template_kwargs:
            body["chat_template_kwargs"] = template_kwargs
        client = _Client(base, headers, body, seed if temperature > 0 else None, timeout_s, retries, pause_s)
        with Progress("regenerate", prompts.total, progress) as shown:
            asyncio.run(_answer_all(client, prompts, answers, summary, concurrency, on_fail, shown))
        summary.finish_reasons = dict(answers.finish_reasons)
    summary.seconds = time.monotonic() - started
    return summary


def _served_model(base: str, headers: dict[str, str], wanted: str | None) -> str:
    """The name to ask for; a server that is not there, or serves something else, is found before any work."""
    try:
        answer = httpx.get(f"{base}/models", headers=headers, timeout=CONNECT_S)
        answer.raise_for_status()
        served = [str(entry["id"]) for entry in answer.json()["data"]]
    except httpx.HTTPError as error:
        raise EndpointError(
            f"no server answers at {base}/models ({type(error).__name__}: {error}): start it, or check --endpoint"
        ) from None
    except (httpx.InvalidURL, ValueError, KeyError, TypeError):
        raise EndpointError(
            f"{base}/models does not answer like an OpenAI-compatible server: check --endpoint"
        ) from None
    if wanted is None:
        if len(served) != 1:
            raise UsageError(f"{base} serves {len(served)} models ({', '.join(served[:5])}): say which with --model")
        return served[0]
    if wanted not in served:
        raise UsageError(f"{base} does not serve '{wanted}': --model must be one of {', '.join(served[:5])}")
    return wanted


@dataclass
class _Client:
    base: str
    headers: dict[str, str]
    body: dict[str, Any]
    seed: int | None
    timeout_s: float
    retries: int
    pause_s: float

    async def answer(self, http: httpx.AsyncClient, prompt: Prompt) -> tuple[dict[str, Any], str, int]:
        """Message, finish reason and number of new tokens. Raises _Failed when no try is left."""
        for tries_left in range(self.retries, -1, -1):
            try:
                return await self._ask(http, prompt)
            except _Failed as failed:
                if not failed.again or not tries_left:
                    raise
                growing = self.pause_s * 2 ** (self.retries - tries_left)
                await asyncio.sleep(min(failed.wait_s if failed.wait_s is not None else growing, LONGEST_PAUSE_S))
        raise AssertionError("the last try returns or raises")

    async def _ask(self, http: httpx.AsyncClient, prompt: Prompt) -> tuple[dict[str, Any], str, int]:
        body = {**self.body, "messages": [_for_server(m) for m in prompt.messages]}
        if prompt.conversation.tools:
            body["tools"] = prompt.conversation.tools
        if self.seed is not None:
            body["seed"] = seed_of(self.seed, prompt.key) % 2**31
        try:
            answer = await http.post(f"{self.base}/chat/completions", json=body)
        except httpx.TimeoutException:
            raise _Failed(f"no answer within {self.timeout_s:g} s", again=True) from None
        except httpx.TransportError as error:
            raise _Failed(f"{type(error).__name__}: {error}", again=True) from None
        if answer.status_code != 200:
            again = answer.status_code == 429 or answer.status_code >= 500
            wait = answer.headers.get("retry-after", "")
            raise _Failed(
                f"HTTP {answer.status_code}: {answer.text[:200]}", again, float(wait) if wait.isdigit() else None
            )
        try:
            return _read_answer(answer.json())
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            shown = f"({type(error).__name__}): {answer.text[:120]}"
            raise _Failed(f"an answer of another form {shown}", again=False) from None


def _read_answer(value: Any) -> tuple[dict[str, Any], str, int]:
    choice = value["choices"][0]
    said = choice["message"]
    message = {"role": "assistant", "content": said.get("content") or ""}
    thought = said.get("reasoning_content") or said.get("reasoning")
    if thought:
        message["reasoning_content"] = thought
    if said.get("tool_calls"):
        message["tool_calls"] = said["tool_calls"]
    tokens = (value.get("usage") or {}).get("completion_tokens") or 0
    return message, choice.get("finish_reason") or "unknown", int(tokens)


def _for_server(message: dict[str, Any]) -> dict[str, Any]:
    """Servers take the arguments of calls as text."""
    if "tool_calls" not in message:
        return message
    calls = []
    for number, call in enumerate(message["tool_calls"]):
        body = dict(call["function"])
        if not isinstance(body.get("arguments"), str):
            body["arguments"] = json.dumps(body.get("arguments") or {}, ensure_ascii=False)
        calls.append({"id": f"call_{number}", "type": "function", **call, "function": body})
    return {**message, "tool_calls": calls}


async def _answer_all(
    client: _Client,
    prompts: Prompts,
    answers: AnswerFile,
    summary: Summary,
    concurrency: int,
    on_fail: str,
    shown: Progress,
) -> None:
    """`concurrency` tasks take prompts from one iterator until it ends; the first error stops them all."""
    source: Iterator[Prompt] = iter(prompts)
    in_a_row = 0

    async def work(http: httpx.AsyncClient) -> None:
        nonlocal in_a_row
        for prompt in source:
            try:
                message, reason, tokens = await client.answer(http, prompt)
            except _Failed as failed:
                in_a_row += 1
                summary.failed.append(f"{prompt.place}: {failed.reason}")
                if on_fail == "stop" or in_a_row >= 2 * concurrency + 8:
                    many = f" ({in_a_row} prompts failed in a row)" if on_fail != "stop" else ""
                    raise EndpointError(
                        f"{prompt.place} was not answered after {client.retries + 1} tries{many}: {failed.reason}; "
                        f"{summary.written} answers are kept, the same command goes on"
                    ) from None
                continue
            in_a_row = 0
            answers.write(prompt, message, reason)
            summary.written += 1
            summary.new_tokens += tokens
            done = prompts.passed + summary.written + len(summary.failed)
            shown.update(done, {"tokens": summary.new_tokens}, known=prompts.passed)

    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    timeout = httpx.Timeout(client.timeout_s, connect=CONNECT_S)
    async with httpx.AsyncClient(headers=client.headers, timeout=timeout, limits=limits) as http:
        tasks = [asyncio.create_task(work(http)) for _ in range(concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
