"""servelite: a production LLM serving engine with an OpenAI-compatible API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from servelite.llm import LLM

__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    """Import `LLM` on first use: `import servelite` alone costs nothing."""
    if name == "LLM":
        from servelite.platform_check import platform_refusal

        if refusal := platform_refusal():
            raise ImportError(refusal)
        from servelite.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
