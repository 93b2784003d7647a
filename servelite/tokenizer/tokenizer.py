"""The tokenizer: text to token IDs and token IDs to bytes, from a GGUF file or a Hugging Face folder.

Text that comes from users is encoded without special-token parsing: `<|im_end|>` in a message is ten
characters of text, never the control token.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import Metaspace

from servelite.tokenizer.gguf_tokenizer import build_tokenizer
from servelite.tokenizer.length_bound import keeps_every_byte
from servelite.tokenizer.metadata_files import TOKENIZER_LIMIT, ModelFileError, read_whole
from servelite.tokenizer.model_files import ModelFiles, token_text
from servelite.tokenizer.token_bytes import PieceDecoder, UnknownTokenizer, piece_decoder


class InvalidTextError(ValueError):
    """Text that has no encoding: half of a surrogate pair in it, or a token that the model lacks."""


class Tokenizer:
    """One vocabulary. Nothing of it changes once it is made, so threads may share it.

    Control tokens are never left to the backend to find: texts are cut at those that count, and what
    lies between is encoded with the backend's special-token parsing off.

    Attributes:
        vocab_size: all token IDs are below it. The model's own vocabulary may be larger (padding), never
            smaller: tokens it lacks do not count.
        special_ids: the control tokens.
        bos_token, eos_token: their texts, "" where the model has none; chat templates use them.
        pieces: by token ID, what it adds to a text: `str` where that is whole characters, `bytes`
            where it is not, None until it is first asked for. Filled by `piece`; the detokenizer reads it.
    """

    def __init__(
        self,
        backend: Backend,
        decoder: PieceDecoder,
        *,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        eos_token: str,
        model_vocab_size: int | None = None,
    ) -> None:
        """Take over `backend`, which nobody else may use or change from now on."""
        backend.no_truncation()  # a tokenizer.json may ask for either; a prompt is never cut silently
        backend.no_padding()
        self._before, self._after = _affixes(backend)
        backend.encode_special_tokens = True  # that is: as text
        added = backend.get_added_tokens_decoder()
        special = {index: token for index, token in added.items() if token.special and token.content}
        self._backend = backend
        self._inner = _inner_backend(backend)
        self._decoder = decoder
        self._added = frozenset(added)
        self._control_ids = {token.content: index for index, token in special.items()}
        self._lstrip = frozenset(token.content for token in special.values() if token.lstrip)
        self._rstrip = frozenset(token.content for token in special.values() if token.rstrip)
        self._control_pattern = control_pattern(self._control_ids)
        self.special_ids: frozenset[int] = frozenset(special)
        size = max(backend.get_vocab_size(with_added_tokens=True), *(index + 1 for index in added), 0)
        self.vocab_size: int = size if model_vocab_size is None else min(size, model_vocab_size)
        self._lacks_tokens = self.vocab_size < size
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.bos_token: str = "" if bos_token_id is None else backend.id_to_token(bos_token_id) or ""
        self.eos_token = eos_token
        self._bytes_per_token = -1  # not looked at yet; 0: unbounded
        self.pieces: list[str | bytes | None] = [None] * self.vocab_size

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The texts of all control tokens."""
        return tuple(self._control_ids)

    def split_controls(self, text: str) -> list[str | int]:
        """`text` with the control tokens that are spelled out in it as their IDs."""
        spans = [match.span() for match in self._control_pattern.finditer(text)]
        return [part for part in self._cut(text, spans) if part != ""]

    def special_ids_in(self, texts: Sequence[str]) -> frozenset[int]:
        """The control tokens whose text is one of `texts` or occurs in one."""
        found = (index for name, index in self._control_ids.items() if any(name in text for text in texts))
        return frozenset(found)

    def added_id(self, text: str) -> int | None:
        """The token beside the model's own vocabulary that is spelled `text`, a control token or not."""
        token: int | None = self._backend.token_to_id(text)
        return token if token in self._added else None

    @property
    def strips_leading_space(self) -> bool:
        """Whether a decoded text's first character is dropped when it is a space (SentencePiece)."""
        return self._decoder.strip_leading_space

    def most_bytes(self, num_tokens: int) -> int | None:
        """A text of more bytes cannot be `num_tokens` tokens or fewer; None: there is no such bound,
        because a step may drop text, or one unknown token stand for much of it.

        Bytes that the vocabulary has no token for vanish, and count here all the same.
        """
        if self._bytes_per_token < 0:
            longest = max((len(self.token_bytes(index)) for index in range(self.vocab_size)), default=0)
            self._bytes_per_token = longest if keeps_every_byte(self._backend) else 0
        return self._bytes_per_token * num_tokens or None

    def clone(self) -> Tokenizer:
        """A tokenizer for another thread. It costs nothing: what the threads share never changes."""
        return copy.copy(self)

    # ------------------------------------------------------------ encoding

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool = False) -> list[int]:
        """The token IDs of `text`. Other threads run meanwhile.

        Args:
            add_special_tokens: BOS and EOS as the model has them; a BOS that the text itself begins
                with (`parse_special`) is not doubled.
            parse_special: read the texts of control tokens as control tokens. Never for users' text.

        Raises:
            InvalidTextError: half of a surrogate pair in `text`, or a token that the model lacks.
        """
        controls = [match.span() for match in self._control_pattern.finditer(text)] if parse_special else []
        ids = self.encode_rendered(text, controls)
        if not add_special_tokens:
            return ids
        if self._before and ids[: len(self._before)] == self._before:
            return ids + self._after
        return self._before + ids + self._after

    @property
    def affixes(self) -> tuple[list[int], list[int]]:
        """What the model has before and after a text: BOS and EOS, or nothing."""
        return self._before, self._after

    def own_bos(self, text: str) -> list[tuple[int, int]]:
        """The span of the BOS that `text` begins with, where the model puts one before every text."""
        own = self.bos_token_id in self._before and text.startswith(self.bos_token)
        return [(0, len(self.bos_token))] if own else []

    def encode_rendered(self, text: str, template_controls: Sequence[tuple[int, int]]) -> list[int]:
        """The token IDs of a rendered chat, in which only the template's control tokens are ones.

        `text` is cut at `template_controls` alone: the rest, message borders included, is encoded in
        one piece, so that merges across borders are the same as in transformers. BOS and EOS are
        the template's business: none is added. Other threads run meanwhile.

        Args:
            template_controls: ascending character spans, each exactly one control token's text.

        Raises:
            InvalidTextError: half of a surrogate pair in `text`, or a token that the model lacks.
            ValueError: a span that holds no control token.
        """
        ids: list[int] = []
        backend = self._backend
        for part in self._cut(text, template_controls):
            if isinstance(part, int):
                ids.append(part)
            elif part:
                ids += _encode(backend, part)
            backend = self._inner
        if self._lacks_tokens and (lacking := max(ids, default=0)) >= self.vocab_size:
            raise InvalidTextError(f"the model has no token for {self._backend.id_to_token(lacking)!r}")
        return ids

    def _cut(self, text: str, controls: Sequence[tuple[int, int]]) -> Iterator[str | int]:
        """The texts between `controls`, and the IDs of these."""
        start, strip_left = 0, False
        for first, last in controls:
            content = text[first:last]
            if content not in self._control_ids or first < start:
                raise ValueError(f"characters {first} to {last} of the rendered chat are no control token")
            between = text[start:first]
            if strip_left:
                between = between.lstrip()
            yield between.rstrip() if content in self._lstrip else between
            yield self._control_ids[content]
            start, strip_left = last, content in self._rstrip
        yield text[start:].lstrip() if strip_left else text[start:]

    # ------------------------------------------------------------ decoding

    def piece(self, token_id: int) -> str | bytes:
        """What a token adds to a text: `str` where it is whole characters, `bytes` where it is not."""
        if not 0 <= token_id < self.vocab_size:
            return ""
        known = self.pieces[token_id]
        if known is not None:
            return known
        text = self._backend.id_to_token(token_id)
        piece: str | bytes = ""
        if text is not None:
            special = token_id in self.special_ids
            piece = self._decoder.piece_bytes(text, added=token_id in self._added, special=special)
            try:
                piece = piece.decode()
            except UnicodeDecodeError:
                pass
        self.pieces[token_id] = piece
        return piece

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text; a control token's are its name, an unknown ID's are none."""
        piece = self.piece(token_id)
        return piece.encode() if isinstance(piece, str) else piece

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD. Spaces are never cleaned up."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(index) for index in ids if index not in skip])
        text = data.decode(errors="replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text


def control_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds control tokens as the tokenizer does: the leftmost, then the longest."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _encode(backend: Backend, text: str) -> list[int]:
    """The IDs of plain text. As a batch of one: that is the call which lets other threads run."""
    try:
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
    except (UnicodeEncodeError, TypeError):
        at = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), -1)
        raise InvalidTextError(f"the text holds half of a surrogate pair ({text[at]!a})") from None
    return list(encoding.ids)


def _affixes(backend: Backend) -> tuple[list[int], list[int]]:
    """What the backend's post-processor puts before and after a text: BOS and EOS, or nothing."""
    plain, whole = (backend.encode("a", add_special_tokens=add).ids for add in (False, True))
    for start in range(len(whole) - len(plain) + 1):
        if plain and whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    raise UnknownTokenizer(f"the tokenizer's post-processor makes {whole} of {plain}")


def _inner_backend(backend: Backend) -> Backend:
    """The backend for the parts of a text that come after a control token; most often the same one.

    Metaspace with the scheme "first" puts a space before a text, but not after a control token.
    """
    if backend.pre_tokenizer is None:
        return backend
    state = json.loads(backend.pre_tokenizer.__getstate__())
    if state["type"] != "Metaspace" or state["prepend_scheme"] != "first":
        return backend
    inner = Backend.from_str(backend.to_str())
    inner.pre_tokenizer = Metaspace(
        replacement=state["replacement"], prepend_scheme="never", split=state["split"]
    )
    inner.encode_special_tokens = True
    return inner


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of an opened model.

    Raises:
        ModelFileError: it is absent, damaged, or of a kind that cannot be read.
    """
    if files.gguf is not None:
        backend = build_tokenizer(files.gguf)
        place = files.path
    else:
        backend, place = _folder_backend(files.path)
    bos = _named_id(files, backend, "bos")
    eos = _named_id(files, backend, "eos")
    model_vocab_size = files.config.get("vocab_size")
    try:
        return Tokenizer(
            backend,
            piece_decoder(backend),
            bos_token_id=bos,
            eos_token_ids=tuple(sorted({*files.eos_token_ids} | ({eos} if eos is not None else set()))),
            eos_token="" if eos is None else backend.id_to_token(eos) or "",
            model_vocab_size=model_vocab_size if isinstance(model_vocab_size, int) else None,
        )
    except UnknownTokenizer as error:
        raise ModelFileError(place, str(error)) from None


def _named_id(files: ModelFiles, backend: Backend, which: str) -> int | None:
    """The ID of `bos` or `eos`: by the tokenizer's own text for it, else by the config's number."""
    text = token_text(files.tokenizer_config.get(f"{which}_token"))
    if text and (index := backend.token_to_id(text)) is not None:
        return int(index)
    value = files.config.get(f"{which}_token_id")
    first = value[0] if isinstance(value, list) and value else value
    size = backend.get_vocab_size(with_added_tokens=True)
    return first if isinstance(first, int) and 0 <= first < size else None


def _folder_backend(folder: Path) -> tuple[Backend, Path]:
    """The tokenizer of a Hugging Face folder, and the file it came from."""
    file = folder / "tokenizer.json"
    try:
        content = read_whole(file, TOKENIZER_LIMIT)
    except FileNotFoundError:
        return _converted_backend(folder), folder
    try:
        return Backend.from_buffer(content), file
    except Exception as error:  # tokenizers raises a bare Exception for a damaged file
        raise ModelFileError(file, f"damaged ({error})") from None


def _converted_backend(folder: Path) -> Backend:
    """transformers' conversion of older formats; imported only here, where nothing else has an answer."""
    for entry in folder.iterdir():
        if entry.exists() and not entry.is_dir() and not entry.is_file():
            raise ModelFileError(entry, "not a regular file")  # which transformers would wait for
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever the folder makes it raise, the answer is the same
        reason = str(error).strip().split("\n")[0]
        raise ModelFileError(
            folder, f"no tokenizer.json, and transformers reads no tokenizer ({reason})"
        ) from None
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ModelFileError(folder, "no tokenizer.json, and transformers has only a slow tokenizer for it")
    return backend
