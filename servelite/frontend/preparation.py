"""From messages or prompts to token IDs, in a small pool of threads off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from servelite.frontend.errors import QUEUE_FULL, APIError, bad_request, context_too_long, text_too_long
from servelite.frontend.grammar_checker import GrammarChecker
from servelite.frontend.parsers.formats import FALLBACK, Begin, ChatFormats
from servelite.frontend.prompts import Message, Prompt, numbered, text_size
from servelite.frontend.protocol import TemplateOptions, Truncation
from servelite.frontend.sampling import Sampling
from servelite.frontend.tool_prompt import ToolPrompt
from servelite.ipc.messages import pack
from servelite.tokenizer.block_hashes import block_hashes
from servelite.tokenizer.chat_template import ChatTemplate, Rendered, TemplateRefusal
from servelite.tokenizer.model_files import ModelFiles
from servelite.tokenizer.tokenizer import InvalidTextError, Tokenizer

MAX_THREADS: Final = 4
LARGE_TEXT: Final = 256 << 10  # characters; from here on a text is prepared in the one thread for such
MAX_LARGE_TEXTS: Final = 64 << 20  # characters of them under way and waiting
MAX_SIDE_JOBS: Final = 64  # /tokenize and /detokenize under way at once; admission bounds the rest
PLAIN_FORMATS: Final = ChatFormats()

_T = TypeVar("_T")


@dataclass(frozen=True)
class Caching:
    """How the blocks of a prompt are named."""

    block_size: int  # tokens; 0: they are not
    salt: str = ""


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt as the engine takes it."""

    tokens: bytes  # TOKEN
    num_tokens: int
    block_hashes: bytes
    text: str = ""  # what `echo` shows


@dataclass(frozen=True)
class Prepared:
    """A request's prompts, and the token IDs of its `bad_words`."""

    prompts: list[PreparedPrompt]
    bad_words: tuple[tuple[int, ...], ...]
    begin: Begin = Begin.ANYWHERE


class _Large(Exception):
    """What a template wrote is large: this is work for the other thread."""


class Preparation:
    """The tokenizer and the chat template of one model; each thread has a tokenizer of its own."""

    def __init__(
        self,
        files: ModelFiles,
        tokenizer: Tokenizer,
        threads: int,
        *,
        formats: ChatFormats = PLAIN_FORMATS,
        parse_special: bool = False,
        unknown: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            parse_special: control tokens that users spell out are read as such, as in transformers.
            unknown: as for `GrammarChecker`.

        Raises:
            InvalidTemplate: the model's chat template is no valid Jinja.
        """
        self._tokenizer = tokenizer
        self._parse_special = parse_special
        self._template = None
        if files.chat_template is not None:
            self._template = ChatTemplate(
                files.chat_template,
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
                special_tokens=tokenizer.special_tokens,
            )
            self._tool_prompt = ToolPrompt(
                files.chat_template,
                self._template.render,
                declare=formats.tools is not None and formats.tools.name == FALLBACK,
            )
        self._reasoning = formats.reasoning
        # A template that does not know the newer name of the system role is given the older one.
        self._knows_developer = "developer" in (files.chat_template or "")
        self._side_jobs = 0
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(
            max(1, min(threads, MAX_THREADS)), "prepare", initializer=self._enter_thread, initargs=(False,)
        )
        # Megabytes of text take seconds and gigabytes: one at a time, and no small prompt behind them.
        self._large_pool = ThreadPoolExecutor(
            1, "prepare-large", initializer=self._enter_thread, initargs=(True,)
        )
        self._large_texts = 0
        self._grammars = GrammarChecker(tokenizer, unknown)

    def _enter_thread(self, large: bool) -> None:
        self._local.tokenizer = self._tokenizer.clone()
        self._local.large = large

    async def chat(
        self,
        messages: list[Message],
        template: TemplateOptions,
        sampling: Sampling,
        caching: Caching,
        max_model_len: int,
        *,
        truncate: Truncation | None = None,
    ) -> Prepared:
        """A conversation, up to where the assistant begins to speak.

        Args:
            truncate: what is kept of a longer prompt; None: all, which may be too much.

        Raises:
            APIError: 400; the model has no chat template, the template refuses the messages, they are
                too long for `max_model_len` whatever their tokens are, or a token ID among the sampling
                fields is out of range. 503; too many large texts wait.
        """

        def work() -> Prepared:
            rendered = self._write(messages, template)
            if truncate is None:
                self._check_size(rendered.text, "messages", max_model_len)
            ids = truncated(self._encode_rendered(rendered), truncate, sampling, max_model_len)
            begin = self._begin(rendered.text, messages, template)
            return Prepared([_named(ids, caching)], self._check(sampling), begin)

        return await self._run(work, _size(messages, template))

    async def completion(
        self,
        prompts: list[Prompt],
        sampling: Sampling,
        caching: Caching,
        max_model_len: int,
        *,
        echo: bool,
        add_special_tokens: bool = True,
        truncate: Truncation | None = None,
    ) -> Prepared:
        """Prompts to continue; given IDs are checked against the vocabulary.

        Args:
            truncate: what is kept of a longer prompt; None: all, which may be too much.

        Raises:
            APIError: 400; a token ID is out of range, a text has no encoding, or is too long for
                `max_model_len` whatever its tokens are. 503; too many large texts wait.
        """

        def work() -> Prepared:
            made = []
            for i, prompt in enumerate(prompts):
                param = numbered("prompt", i, len(prompts))
                longest = max_model_len if truncate is None else None
                whole = self._encode(prompt, param, longest, add_special_tokens)
                ids = truncated(whole, truncate, sampling, max_model_len)
                text = ""
                if echo:
                    uncut = isinstance(prompt, str) and len(ids) == len(whole)
                    text = str(prompt) if uncut else self._decode(ids, sampling)
                made.append(_named(ids, caching, text))
            return Prepared(made, self._check(sampling))

        return await self._run(work, sum(len(prompt) for prompt in prompts))

    async def embedding(
        self,
        inputs: list[Prompt],
        caching: Caching,
        max_model_len: int,
        *,
        add_special_tokens: bool,
        truncate: Truncation | None = None,
    ) -> list[PreparedPrompt]:
        """Prompts to embed, none of them above `max_model_len`. Of a text, its own tokens are cut, not those
        that the model has before and after it.

        Raises:
            APIError: as `completion`; or 400, a prompt is empty or too long.
        """

        def work() -> list[PreparedPrompt]:
            made = []
            for i, prompt in enumerate(inputs):
                param = numbered("input", i, len(inputs))
                if truncate is None:
                    ids = self._encode(prompt, param, max_model_len, add_special_tokens)
                else:
                    ids = self._cut(prompt, param, truncate, max_model_len, add_special_tokens)
                if not ids:
                    raise bad_request(f"{param} has no tokens", param)
                if len(ids) > max_model_len:
                    raise context_too_long(len(ids), 0, max_model_len, param)
                made.append(_named(ids, caching))
            return made

        return await self._run(work, sum(len(prompt) for prompt in inputs))

    async def check_grammar(self, grammar: str, field: str) -> str:
        """See `GrammarChecker.check`."""
        return await asyncio.wrap_future(self._grammars.check(grammar, field))

    async def check_made(self, make: Callable[[], str], field: str) -> str:
        """The same for a grammar that is made in a thread: a long list of texts takes 0.2 s."""
        return await self.check_grammar(await self._run(make, 0), field)

    async def parse(self, work: Callable[[], _T], size: int) -> _T:
        """Reads a body of `size` bytes: here, or where that takes long in the thread for large texts."""
        return work() if size < LARGE_TEXT else await self._run(work, size)

    async def token_texts(self, tokens: list[int]) -> list[str]:
        """The text of each token, what is no UTF-8 replaced; raises `APIError`."""
        return await self._side_job(
            lambda: [self._tokenizer.token_bytes(token).decode(errors="replace") for token in tokens],
            len(tokens),
        )

    async def tokenize(self, prompt: str, *, add_special_tokens: bool) -> list[int]:
        """A text's token IDs, for `/tokenize`; raises `APIError`."""
        return await self._side_job(lambda: self._encode_text(prompt, add_special_tokens), len(prompt))

    async def tokenize_chat(self, messages: list[Message], template: TemplateOptions) -> list[int]:
        """A conversation's token IDs, for `/tokenize`; raises `APIError`."""
        return (await self.rendered(messages, template))[1]

    async def rendered(self, messages: list[Message], template: TemplateOptions) -> tuple[str, list[int]]:
        """A conversation as the template writes it, and its token IDs; raises `APIError`."""

        def work() -> tuple[str, list[int]]:
            text = self._write(messages, template)
            return text.text, self._encode_rendered(text)

        return await self._side_job(work, _size(messages, template))

    async def detokenize(self, tokens: tuple[int, ...]) -> str:
        """The text of token IDs, control tokens included; raises `APIError`."""

        def work() -> str:
            self._check_ids(tokens, "tokens")
            text: str = self._local.tokenizer.decode(tokens, skip_special_tokens=False)
            return text

        return await self._side_job(work, len(tokens))

    def close(self) -> None:
        """End the threads; what waits is dropped."""
        self._grammars.close()
        for pool in (self._pool, self._large_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], _T], size: int) -> _T:
        """`work` in a thread; `size` (characters or token IDs) says in which."""
        loop = asyncio.get_running_loop()
        try:
            if size < LARGE_TEXT:
                try:
                    return await loop.run_in_executor(self._pool, work)
                except _Large:
                    size = LARGE_TEXT
            if self._large_texts and self._large_texts + size > MAX_LARGE_TEXTS:
                text = "The server has as many large texts to tokenize as it takes; try again later."
                raise APIError(503, text, code=QUEUE_FULL, headers=(("retry-after", "1"),))
            self._large_texts += size
            try:
                return await loop.run_in_executor(self._large_pool, work)
            finally:
                self._large_texts -= size
        except InvalidTextError as error:
            raise bad_request(f"The text cannot be encoded: {error}") from None

    async def _side_job(self, work: Callable[[], _T], size: int) -> _T:
        if self._side_jobs >= MAX_SIDE_JOBS:
            text = f"The server is at its limit of {MAX_SIDE_JOBS} texts to tokenize; try again later."
            raise APIError(503, text, code=QUEUE_FULL, headers=(("retry-after", "1"),))
        self._side_jobs += 1
        try:
            return await self._run(work, size)
        finally:
            self._side_jobs -= 1

    # ------------------------------------------------------------ in a thread of the pool

    def _write(self, messages: list[Message], template: TemplateOptions) -> Rendered:
        """The text of a conversation."""
        if self._template is None:
            raise bad_request("This model has no chat template; use /v1/completions.", "messages")
        if not self._knows_developer:
            messages = [
                message | {"role": "system"} if message["role"] == "developer" else message
                for message in messages
            ]
        try:
            return self._template.render(
                self._tool_prompt.fit(messages, template.tools),
                add_generation_prompt=template.add_generation_prompt,
                continue_final_message=template.continue_final_message,
                tools=list(template.tools) or None,
                **template.kwargs,
            )
        except TemplateRefusal as refusal:
            raise bad_request(f"The chat template refuses the messages: {refusal}", "messages") from None

    def _begin(self, prompt: str, messages: list[Message], template: TemplateOptions) -> Begin:
        """Where the answer begins."""
        if self._reasoning is None:
            return Begin.ANYWHERE
        continued = None if template.add_generation_prompt else str(messages[-1]["content"])
        return self._reasoning.begin(prompt, continued)

    def _encode_rendered(self, rendered: Rendered) -> list[int]:
        if len(rendered.text) >= LARGE_TEXT and not self._local.large:
            raise _Large
        tokenizer: Tokenizer = self._local.tokenizer
        if self._parse_special:
            return tokenizer.encode(rendered.text, add_special_tokens=False, parse_special=True)
        return tokenizer.encode_rendered(rendered.text, rendered.controls)

    def _check_size(self, text: str, param: str, max_model_len: int) -> None:
        """Raises for a text that cannot fit, before the work of finding its tokens is done."""
        if len(text) <= max_model_len:
            return
        limit = self._tokenizer.most_bytes(max_model_len)
        size = len(text.encode(errors="surrogatepass"))
        if limit is not None and size > limit:
            raise text_too_long(size, limit, max_model_len, param)

    def _encode_text(self, text: str, add_special_tokens: bool) -> list[int]:
        """A raw prompt's token IDs. Of the control tokens that it spells out, the BOS at its beginning is
        one where the client says that it takes care of them itself."""
        tokenizer: Tokenizer = self._local.tokenizer
        if add_special_tokens or self._parse_special:
            return tokenizer.encode(
                text, add_special_tokens=add_special_tokens, parse_special=self._parse_special
            )
        return tokenizer.encode_rendered(text, tokenizer.own_bos(text))

    def _encode(
        self, prompt: Prompt, param: str, max_model_len: int | None, add_special_tokens: bool
    ) -> list[int]:
        """A prompt's token IDs; `max_model_len` None: of any length."""
        if isinstance(prompt, str):
            if max_model_len is not None:
                self._check_size(prompt, param, max_model_len)
            return self._encode_text(prompt, add_special_tokens)
        if max_model_len is not None and len(prompt) > max_model_len:
            raise context_too_long(len(prompt), 1, max_model_len, param)
        self._check_ids(prompt, param)
        return prompt

    def _cut(
        self, prompt: Prompt, param: str, truncate: Truncation, max_model_len: int, add_special_tokens: bool
    ) -> list[int]:
        """At most as many of a prompt's token IDs as `truncate` says, a text's affixes among them."""
        text = isinstance(prompt, str) and add_special_tokens
        before, after = self._tokenizer.affixes if text else ([], [])
        ids = self._encode(prompt, param, None, False)
        size = max_model_len if truncate.tokens < 0 else truncate.tokens
        kept = size - len(before) - len(after)
        if kept <= 0:
            reason = f"is {size}: this model's own tokens around a text leave no room"
            raise bad_request(f"truncate_prompt_tokens {reason}", "truncate_prompt_tokens")
        return [*before, *truncate.cut(ids, kept), *after]

    def _decode(self, ids: list[int], sampling: Sampling) -> str:
        tokenizer: Tokenizer = self._local.tokenizer
        return tokenizer.decode(ids, skip_special_tokens=sampling.skip_special_tokens)

    def _check_ids(self, ids: list[int] | tuple[int, ...], param: str) -> None:
        size = self._tokenizer.vocab_size
        for i, token in enumerate(ids):
            if not 0 <= token < size:
                raise bad_request(f"{param}[{i}] is {token}; token IDs go from 0 to {size - 1}", param)

    def _check(self, sampling: Sampling) -> tuple[tuple[int, ...], ...]:
        """Raises for token IDs out of range; the token IDs of `bad_words`, with and without a space."""
        sampling.check_tokens(self._tokenizer.vocab_size)
        words: dict[tuple[int, ...], None] = {}
        for word in sampling.bad_words:
            bare = word.lstrip()
            for text in (word, bare, f" {bare}"):
                ids = self._local.tokenizer.encode(text, add_special_tokens=False)
                if ids:
                    words[tuple(ids)] = None
        return tuple(words)


def _size(messages: list[Message], template: TemplateOptions) -> int:
    """Characters."""
    return text_size(messages) + text_size(template.tools)


def _named(ids: list[int], caching: Caching, text: str = "") -> PreparedPrompt:
    tokens = pack(ids)
    names = block_hashes(tokens, caching.block_size, caching.salt) if caching.block_size else b""
    return PreparedPrompt(tokens, len(ids), names, text)


def truncated(
    ids: list[int], truncate: Truncation | None, sampling: Sampling, max_model_len: int
) -> list[int]:
    """What of a prompt is kept."""
    if truncate is None:
        return ids
    kept = truncate.tokens
    if kept < 0:
        kept = max(max_model_len - (sampling.max_tokens or 1), 0)
    return truncate.cut(ids, kept)


def answer_tokens(
    prompt_tokens: int, max_tokens: int | None, max_model_len: int, param: str, length_param: str
) -> int:
    """How many tokens an answer may have: as many as asked for, or all that the context leaves.

    Args:
        param, length_param: the fields of the prompt and of `max_tokens`, to name what is too much.

    Raises:
        APIError: 400; the prompt is empty, or prompt and answer exceed the context. An answer of no
            tokens takes the room of one.
    """
    if prompt_tokens == 0:
        raise bad_request(f"{param} has no tokens", param)
    wanted = max_model_len - prompt_tokens if max_tokens is None else max_tokens
    if prompt_tokens + max(wanted, 1) > max_model_len:
        named = param if prompt_tokens >= max_model_len else length_param
        raise context_too_long(prompt_tokens, max(wanted, 1), max_model_len, named)
    return wanted
