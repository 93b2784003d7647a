"""SentencePiece's byte-pair vocabularies as GGUF keeps them: pieces and scores, no list of merges.

SentencePiece joins the two neighbours that make the piece of the highest score, wherever that piece may
be cut in two. As merges that is: every cut of every piece whose parts are pieces, the best piece first.
User-defined pieces (runs of newlines, of spaces) are found in a text before anything is joined.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from servelite.tokenizer.gguf import GGUFFile
from servelite.tokenizer.metadata_files import ModelFileError, brief

SPACE: Final = "\u2581"

# Values of tokenizer.ggml.token_type.
NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
BYTE: Final = 6
KINDS: Final = frozenset(range(7))
"""All there are, the two that mean nothing here (undefined, unused) among them."""

MAX_PIECE: Final = 1024
"""Characters of a piece; each is cut at every place, which takes the square of its length."""

_SPARE: Final = re.compile(r"<unused\d+>")
"""Places kept free in Gemma's vocabularies, thousands of them. GGUF calls them control tokens; they
control nothing, and the model's own tokenizer finds them in a text like user-defined ones."""


def pieces_of(tokens: list[str], types: list[int]) -> tuple[list[str], list[int]]:
    """Tokens and their types, as the model's own tokenizer has them.

    GGUF's converter writes user-defined runs of spaces with real spaces, which no text holds once its
    spaces are U+2581.
    """
    pieces, kinds = list(tokens), list(types)
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == USER_DEFINED and " " in token:
            pieces[index] = token.replace(" ", SPACE)
        elif kind == CONTROL and _SPARE.fullmatch(token):
            kinds[index] = USER_DEFINED
    return pieces, kinds


def build_sentencepiece(gguf: GGUFFile, pieces: list[str], kinds: list[int]) -> Tokenizer:
    """The tokenizer without its added tokens and its rule of BOS and EOS.

    Raises:
        ModelFileError: pieces twice or too long, scores missing, or no piece for an unknown character.
    """
    scores = gguf.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(pieces):
        raise ModelFileError(gguf.path, "tokenizer.ggml.scores is absent or not as long as the tokens")
    if type(scores[0]) not in (int, float) or any(math.isnan(score) for score in scores):
        raise ModelFileError(gguf.path, f"tokenizer.ggml.scores is {brief(scores)}, no list of numbers")
    if (longest := max(pieces, key=len)) and len(longest) > MAX_PIECE:
        raise ModelFileError(
            gguf.path,
            f"tokenizer.ggml.tokens holds {brief(longest)} of {len(longest)} characters, "
            f"above the limit of {MAX_PIECE}",
        )
    vocab = {piece: index for index, piece in enumerate(pieces)}
    if len(vocab) != len(pieces):
        raise ModelFileError(gguf.path, "tokenizer.ggml.tokens holds a token twice")
    unknown: Any = gguf.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if type(unknown) is not int or not 0 <= unknown < len(pieces):
        raise ModelFileError(gguf.path, f"tokenizer.ggml.unknown_token_id is {brief(unknown)}")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(vocab, scores, kinds),
            unk_token=pieces[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in kinds,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if gguf.metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        tokenizer.normalizer = spaces
        # No space is left to split at. Gemma's tokenizer has this step, and so has this one.
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(vocab: dict[str, int], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """All cuts of all pieces, by the piece's score, then the longer first part first.

    Control tokens and bytes are in no text, so nothing is joined to or from them. User-defined pieces
    come first of all, by length alone: that way a run of characters becomes its longest piece.
    """
    joined = {piece: index for piece, index in vocab.items() if kinds[index] in (NORMAL, USER_DEFINED)}
    runs: list[tuple[str, str]] = []
    ranked: list[tuple[float, list[tuple[str, str]]]] = []
    for piece, index in joined.items():
        cuts = [
            (left, piece[cut:])
            for cut in range(len(piece) - 1, 0, -1)
            if (left := piece[:cut]) in joined and piece[cut:] in joined
        ]
        if not cuts:
            continue
        if kinds[index] == USER_DEFINED:
            runs += cuts
        else:
            ranked.append((-scores[index], cuts))
    runs.sort(key=lambda pair: (-len(pair[0]), -len(pair[1])))
    ranked.sort(key=lambda entry: entry[0])
    return runs + [pair for _, cuts in ranked for pair in cuts]
