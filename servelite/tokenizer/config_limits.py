"""How large a configuration's sizes may be: far above any model's, far below what breaks arithmetic.

A size that is merely wrong is found when the checkpoint's shapes are compared with those the
configuration asks for, which takes a model without memory; these limits bound what that costs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from servelite.tokenizer.metadata_files import ModelFileError, brief

LIMITS: Final = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "num_hidden_layers": 1 << 12,
    "num_experts": 1 << 12,
    "num_local_experts": 1 << 12,
    "max_position_embeddings": (1 << 31) - 1,
}
"""By config.json's name. The largest tensor there can be then has fewer than 2**53 elements."""

_EXPERTS_IN_ALL: Final = 1 << 16  # layers x experts; the largest known models have under 24,000


def check_sizes(path: Path, config: dict[str, Any]) -> None:
    """Check what is an integer; other kinds of values are the model class's to refuse.

    Raises:
        ModelFileError: a size is above its limit.
    """
    for field, limit in LIMITS.items():
        value = config.get(field)
        if isinstance(value, int) and value > limit:
            raise ModelFileError(path, f"config field {field} is {brief(value)}, above the limit of {limit}")
    layers = config.get("num_hidden_layers")
    for field in ("num_experts", "num_local_experts"):
        experts = config.get(field)
        if isinstance(layers, int) and isinstance(experts, int) and layers * experts > _EXPERTS_IN_ALL:
            raise ModelFileError(
                path,
                f"config field {field} is {experts} for {layers} layers, "
                f"above the limit of {_EXPERTS_IN_ALL} experts in all",
            )
