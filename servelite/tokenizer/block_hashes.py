"""Names of KV blocks by content: a chain of hashes, one a full block of tokens.

A block's name depends on the salt and adapter, on every token before it, and on its own tokens, so
that two requests share a block only if all of that is equal. 128 bits of BLAKE2b: no two contents
that anyone can find share a name.
"""

from __future__ import annotations

import hashlib
from typing import Final

BLOCK_HASH_BYTES: Final = 16
TOKEN_BYTES: Final = 4  # of a token ID in a column of IDs
_ROOT: Final = b"servelite-kv-block"


def root_hash(cache_salt: str, adapter: str) -> bytes:
    """The parent of a request's first block: requests of another salt or adapter share nothing."""
    digest = hashlib.blake2b(_ROOT, digest_size=BLOCK_HASH_BYTES)
    for part in (cache_salt, adapter):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def next_hash(parent: bytes, block_tokens: bytes) -> bytes:
    """The name of a full block after `parent`; `block_tokens` is a column of token IDs."""
    return hashlib.blake2b(parent + block_tokens, digest_size=BLOCK_HASH_BYTES).digest()


def block_hashes(prompt: bytes, block_size: int, cache_salt: str = "", adapter: str = "") -> bytes:
    """The names of a prompt's full blocks, one after the other, for `Add.block_hashes`."""
    size, parent, names = block_size * TOKEN_BYTES, root_hash(cache_salt, adapter), []
    for start in range(0, len(prompt) - size + 1, size):
        parent = next_hash(parent, prompt[start : start + size])
        names.append(parent)
    return b"".join(names)
