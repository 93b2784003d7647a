"""From messages or a prompt to token IDs, in a small pool of threads off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from servelite.frontend.errors import bad_request, context_too_long
from servelite.tokenizer.chat_template import ChatTemplate, TemplateRefusal
from servelite.tokenizer.model_files import ModelFiles
from servelite.tokenizer.tokenizer import Tokenizer

MAX_THREADS: Final = 4

_T = TypeVar("_T")


class Preparation:
    """The tokenizer and the chat template of one model; each thread has a tokenizer of its own."""

    def __init__(self, files: ModelFiles, tokenizer: Tokenizer, threads: int) -> None:
        self._tokenizer = tokenizer
        self._template = None
        if files.chat_template is not None:
            self._template = ChatTemplate(
                files.chat_template,
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
                special_tokens=tokenizer.special_tokens,
            )
        # A template that does not know the newer name of the system role is given the older one.
        self._knows_developer = "developer" in (files.chat_template or "")
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(
            max(1, min(threads, MAX_THREADS)), "prepare", initializer=self._clone_tokenizer
        )

    def _clone_tokenizer(self) -> None:
        self._local.tokenizer = self._tokenizer.clone()

    async def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The token IDs of a conversation, up to where the assistant begins to speak.

        Raises:
            APIError: 400; the model has no chat template, or the template refuses the messages.
        """
        return await self._run(self._chat, messages)

    async def completion(self, prompt: str | list[int]) -> list[int]:
        """The token IDs of a prompt; given IDs are checked against the vocabulary.

        Raises:
            APIError: 400; an ID is out of range.
        """
        return await self._run(self._completion, prompt)

    def close(self) -> None:
        """End the threads; what waits is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Callable[[_T], list[int]], argument: _T) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, argument)

    def _chat(self, messages: list[dict[str, str]]) -> list[int]:
        if self._template is None:
            raise bad_request("This model has no chat template; use /v1/completions.", "messages")
        if not self._knows_developer:
            messages = [
                message | {"role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        try:
            rendered = self._template.render(messages)
        except TemplateRefusal as refusal:
            raise bad_request(f"The chat template refuses the messages: {refusal}", "messages") from None
        tokenizer: Tokenizer = self._local.tokenizer
        return tokenizer.encode_rendered(rendered.text, rendered.controls)

    def _completion(self, prompt: str | list[int]) -> list[int]:
        tokenizer: Tokenizer = self._local.tokenizer
        if isinstance(prompt, str):
            return tokenizer.encode(prompt, add_special_tokens=True)
        for i, token in enumerate(prompt):
            if not 0 <= token < tokenizer.vocab_size:
                raise bad_request(
                    f"prompt[{i}] is {token}; token IDs go from 0 to {tokenizer.vocab_size - 1}", "prompt"
                )
        return prompt


def answer_tokens(prompt_tokens: int, max_tokens: int | None, max_model_len: int, param: str) -> int:
    """How many tokens an answer may have: as many as asked for, or all that the context leaves.

    Raises:
        APIError: 400; the prompt is empty, or prompt and answer exceed the context.
    """
    if prompt_tokens == 0:
        raise bad_request(f"{param} has no tokens", param)
    wanted = max_model_len - prompt_tokens if max_tokens is None else max_tokens
    if wanted < 1 or prompt_tokens + wanted > max_model_len:
        raise context_too_long(prompt_tokens, max(wanted, 1), max_model_len, param)
    return wanted
