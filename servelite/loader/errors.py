"""What keeps a model from being found."""

from __future__ import annotations


class ModelNotFound(ValueError):
    """No model under the name that was given; one line saying what was tried."""
