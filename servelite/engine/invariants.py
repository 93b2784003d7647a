"""The error of an engine whose own books do not add up."""

from __future__ import annotations


class InvariantError(AssertionError):
    """A bug of ours, never a client's doing."""
