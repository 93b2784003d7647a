"""Answers in one form, plain or streamed, so that the two can be compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.conformance.sse import Events


@dataclass
class Call:
    """One tool call, put together."""

    id: str
    name: str
    arguments: str


@dataclass
class Choice:
    """One choice, put together."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    calls: list[Call] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)


@dataclass
class Answer:
    """What a client was told in all."""

    choices: list[Choice]
    usage: dict[str, Any] | None

    @property
    def text(self) -> str:
        """The one choice's."""
        (choice,) = self.choices
        return choice.text

    @property
    def finish_reason(self) -> str | None:
        """The one choice's."""
        (choice,) = self.choices
        return choice.finish_reason

    @property
    def calls(self) -> list[Call]:
        """The one choice's."""
        (choice,) = self.choices
        return choice.calls

    @property
    def counts(self) -> dict[str, Any]:
        """The usage without what depends on what was asked before."""
        assert self.usage is not None, "no usage"
        return {name: self.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}

    @property
    def cached(self) -> int:
        """Prompt tokens found in the prefix cache, as the usage tells."""
        assert self.usage is not None, "no usage"
        cached = self.usage["prompt_tokens_details"]["cached_tokens"]
        assert isinstance(cached, int), cached
        return cached


def whole(body: dict[str, Any]) -> Answer:
    """A plain answer's."""
    made: dict[int, Choice] = {}
    for choice in body["choices"]:
        said = choice.get("message") or {"content": choice.get("text")}
        made[choice["index"]] = Choice(
            said.get("content") or "",
            said.get("reasoning_content") or "",
            choice["finish_reason"],
            [_call(call) for call in said.get("tool_calls") or []],
            choice.get("logprobs") or {},
            choice.get("token_ids") or [],
        )
    return Answer([made[index] for index in range(len(made))], body["usage"])


def _call(call: dict[str, Any]) -> Call:
    assert call["type"] == "function" and call["id"], call
    return Call(call["id"], call["function"]["name"], call["function"]["arguments"])


def streamed(events: Events) -> Answer:
    """A stream's chunks, put together; fails for chunks in an order or a shape that OpenAI's has not."""
    assert events.error is None, events.error
    made: dict[int, Choice] = {}
    usage: dict[str, Any] | None = None
    for chunk in events.chunks:
        if not chunk["choices"]:
            assert usage is None, "two chunks with the usage"
            usage = chunk["usage"]
            continue
        assert usage is None, "a choice after the usage"
        for choice in chunk["choices"]:
            _add(made.setdefault(choice["index"], Choice()), choice)
    assert all(choice.finish_reason for choice in made.values()), "a choice without a finish reason"
    return Answer([made[index] for index in range(len(made))], usage)


def _add(choice: Choice, part: dict[str, Any]) -> None:
    delta = part["delta"] if "delta" in part else {"content": part["text"]}
    told = any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))
    assert not (choice.finish_reason and told), "text after the finish reason"
    choice.text += delta.get("content") or ""
    choice.reasoning += delta.get("reasoning_content") or ""
    for call in delta.get("tool_calls") or []:
        _add_call(choice, call)
    for name, values in (part.get("logprobs") or {}).items():
        if values is not None:
            choice.logprobs.setdefault(name, []).extend(values)
    choice.token_ids += part.get("token_ids") or []
    if part.get("finish_reason") is not None:
        assert choice.finish_reason is None, "two finish reasons"
        choice.finish_reason = part["finish_reason"]


def _add_call(choice: Choice, call: dict[str, Any]) -> None:
    """OpenAI's shape: the first delta of a call has its ID, type and name, the later ones arguments only."""
    index, function = call["index"], call.get("function") or {}
    if index == len(choice.calls):
        assert call["type"] == "function" and call["id"] and function["name"], call
        choice.calls.append(Call(call["id"], function["name"], ""))
    else:
        assert index == len(choice.calls) - 1, f"call {index} after {len(choice.calls)} calls"
        assert not call.get("id") and not function.get("name"), f"a call is named twice: {call}"
    choice.calls[index].arguments += function.get("arguments") or ""
