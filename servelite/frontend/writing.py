"""What of an answer is written besides its text: logprobs, token IDs, the prompt where it is echoed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servelite.frontend.answer import Answer
from servelite.frontend.chunks import Choice, Usage
from servelite.frontend.logprobs import (
    LegacyLogprobs,
    Logprobs,
    chat_entries,
    chat_logprobs,
    join_legacy,
    prompt_logprobs,
)
from servelite.frontend.parsers.assembled import Assembled
from servelite.frontend.protocol import AnswerForm
from servelite.frontend.sampling import Sampling
from servelite.tokenizer.tokenizer import Tokenizer


class ChoiceWriter:
    """One choice, from its tokens as they come. Made only where more than text is asked for, or for a
    whole answer; then `part` is called after each `Answer.next`."""

    def __init__(
        self, answer: Answer, form: AnswerForm, sampling: Sampling, tokenizer: Tokenizer, *, chat: bool
    ) -> None:
        self._answer = answer
        self._form = form
        self._tokenizer = tokenizer
        self._chat = chat
        self._entries = chat_entries(tokenizer)
        self._told = 0  # tokens
        self._legacy: LegacyLogprobs | None = None
        if form.logprobs and not chat:
            self._legacy = LegacyLogprobs(tokenizer, skip_special_tokens=sampling.skip_special_tokens)

    def echo(self) -> dict[str, Any] | None:
        """The prompt's logprobs, where the prompt is echoed and they are asked for. Comes first."""
        if self._legacy is None or not self._form.echo:
            return None
        record = self._answer.record
        part = self._legacy.part(record.prompt_ids, record.prompt_logprobs, 0)
        self._legacy.begin_answer(len(self._answer.prompt_text))
        return part

    def part(self) -> tuple[Logprobs | None, dict[str, Any]]:
        """(logprobs, other fields) of the tokens since the last call."""
        start, answer = self._told, self._answer
        tokens = answer.record.produced[start : answer.completion_tokens]
        self._told = start + len(tokens)
        table = answer.record.logprobs
        logprobs: Logprobs | None = None
        if self._legacy is not None:
            logprobs = self._legacy.part(tokens, table, start)
        elif self._form.logprobs:
            logprobs = chat_logprobs(self._entries, tokens, table, start)
        return logprobs, {"token_ids": tokens} if self._form.return_token_ids else {}

    def whole(self, read: Assembled) -> Choice:
        """The finished choice, of which `part` was never called."""
        answer, form = self._answer, self._form
        assert answer.finish_reason is not None
        echoed = self.echo()
        logprobs, more = self.part()
        if echoed is not None and isinstance(logprobs, dict):
            logprobs = join_legacy([echoed, logprobs])
        more["stop_reason"] = answer.stop_reason
        if not self._chat:
            more |= self.prompt_fields()
        if form.echo:
            read.content = answer.prompt_text + read.content
        return Choice(read, answer.finish_reason, logprobs, more)

    def prompt_fields(self) -> dict[str, Any]:
        """What is asked for of the prompt, in the fields' names."""
        record, fields = self._answer.record, dict[str, Any]()
        if self._form.return_token_ids:
            fields["prompt_token_ids"] = record.prompt_ids
        if self._form.prompt_logprobs:
            fields["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, record.prompt_ids, record.prompt_logprobs
            )
        return fields


def usage_so_far(answer: Answer) -> Usage:
    """The counts of one choice, its prompt's included; reasoning is counted at the end alone."""
    record = answer.record
    return Usage(record.prompt_tokens, answer.completion_tokens, record.cached_tokens)


def usage_of(answers: Sequence[Answer]) -> Usage:
    """The counts of a request; a prompt counts once, however many answers it has."""
    firsts = [answer.record for answer in answers if answer.record.choice == 0]
    reasoning = [answer.reasoning_tokens for answer in answers]
    return Usage(
        sum(record.prompt_tokens for record in firsts),
        sum(answer.completion_tokens for answer in answers),
        sum(record.cached_tokens for record in firsts),
        None if None in reasoning else sum(filter(None, reasoning)),
    )
