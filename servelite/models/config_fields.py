"""Reads a config.json: every field checked, and what would change the computation and is not done refused."""

from __future__ import annotations

from typing import Any, Final

from servelite.layers.rotary import is_positive
from servelite.models.base import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"

# Fields of other families, or of rare variants, and the values with which they change nothing.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "final_logit_softcapping": (None,),
    "no_rope_layers": (None,),
    "partial_rotary_factor": (None, 1),
    "use_bidirectional_attention": (None, False),
}
_NEED_ORIGINAL_LENGTH: Final = ("llama3", "yarn")
_WINDOW: Final = 4096  # where a config has no `sliding_window` and its family has no other default


class ConfigFields:
    """The fields of one model's config, for the class `architecture`."""

    def __init__(self, config: dict[str, Any], architecture: str) -> None:
        """
        Raises:
            ConfigError: a field is set that no family here can do.
        """
        self._config, self._architecture = config, architecture
        for field, neutral in _NEUTRAL.items():
            self.refuse(field, *neutral)

    def refuse(self, field: str, *neutral: Any) -> None:
        """Raise ConfigError if the field is there with a value that is none of `neutral`."""
        if field in self._config and self._config[field] not in neutral:
            raise self.error(field, f"{self._architecture} here cannot do that")

    def error(self, field: str, why: str) -> ConfigError:
        """A ConfigError that names the field and its value."""
        return ConfigError(f"config field {field} is {self._config.get(field)!r}: {why}")

    def get(self, field: str, default: Any = None) -> Any:
        """The value as it is; `default` where it is absent or null."""
        value = self._config.get(field)
        return default if value is None else value

    def size(self, field: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(field, default)
        if type(value) is not int or value < 1:
            raise ConfigError(f"config field {field} is {value!r}, not a positive integer")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A positive number."""
        return _positive(self.get(field, default), field)

    def flag(self, field: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(field, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config field {field} is {value!r}, neither true nor false")
        return value

    def choice(self, field: str, default: str, *known: str) -> str:
        """One of `known`."""
        value = self.get(field, default)
        if value not in known:
            raise ConfigError(f"config field {field} is {value!r}: {', '.join(known)} can be run")
        return value

    # ------------------------------------------------------------ windows

    def windows_by_type(self, types: Any, layers: int) -> tuple[int, ...]:
        """By layer, the tokens it sees (0: all), from its type as `layer_types` has it."""
        if not isinstance(types, list) or len(types) != layers:
            raise ConfigError(
                f"config field layer_types is {types!r}, not one type for each of {layers} layers"
            )
        if unknown := [kind for kind in types if kind not in (FULL, SLIDING)]:
            raise ConfigError(f"config field layer_types has {unknown[0]!r}: {FULL} and {SLIDING} can be run")
        if SLIDING not in types:
            return (0,) * layers
        window = self._window(_WINDOW)
        if not window:
            raise ConfigError(f"config field sliding_window is None, and {SLIDING} layers need one")
        return tuple(window if kind == SLIDING else 0 for kind in types)

    def _window(self, default: int | None) -> int:
        """`sliding_window`; 0 for null, which unlike absence is a setting."""
        none = self._config.get("sliding_window", default) is None
        return 0 if none else self.size("sliding_window", default)

    def one_window(self, layers: int, default: int | None = _WINDOW) -> tuple[int, ...]:
        """`sliding_window` for all layers; null: they see all. `default`: where the field is absent."""
        window = self._window(default)
        kind = SLIDING if window else FULL
        self.refuse("layer_types", None, [kind] * layers)
        return (window,) * layers

    def upper_windows(self, layers: int) -> tuple[int, ...]:
        """Qwen's: none unless `use_sliding_window`; then by `layer_types`, or from `max_window_layers` on."""
        if not self.flag("use_sliding_window"):
            self.refuse("layer_types", None, [FULL] * layers)
            return (0,) * layers
        first = self.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise self.error("max_window_layers", "not a number of layers")
        default = [SLIDING if layer >= first else FULL for layer in range(layers)]
        return self.windows_by_type(self.get("layer_types", default), layers)

    # ------------------------------------------------------------ experts

    def experts(self, field: str, default: int, default_top_k: int) -> tuple[int, int]:
        """How many experts a layer has, from `field`, and how many of them a token goes through."""
        experts, top_k = self.size(field, default), self.size("num_experts_per_tok", default_top_k)
        if top_k > experts:
            raise ConfigError(f"config field num_experts_per_tok is {top_k}, above {field} {experts}")
        return experts, top_k

    # ------------------------------------------------------------ rotary embedding

    @property
    def rope_by_type(self) -> bool:
        """Whether `rope_parameters` has settings for each layer type."""
        parameters = self._object("rope_parameters")
        return FULL in parameters or SLIDING in parameters

    def _object(self, field: str) -> dict[str, Any]:
        value = self.get(field, {})
        if not isinstance(value, dict):
            raise self.error(field, "not an object")
        return value

    def rope(self, kind: str = "", *, theta: float = 10000.0) -> tuple[float, dict[str, Any]]:
        """Base and scaling, for all layers or (`kind`) for those of one type.

        They are in `rope_parameters`, by layer type in models with several, or in the older
        `rope_theta` and `rope_scaling`.

        Args:
            theta: the base where the config has none.
        """
        parameters = self._object("rope_parameters")
        scaling = self._object("rope_scaling") or parameters
        if self.rope_by_type:
            if not kind:
                raise self.error("rope_parameters", f"{self._architecture} here has one for all layers")
            scaling = parameters = parameters.get(kind) or {}
            if not isinstance(scaling, dict):
                raise self.error("rope_parameters", f"{kind} is not an object")
        else:
            theta = self.number("rope_theta", theta)
        stated = scaling.get("rope_theta", parameters.get("rope_theta"))
        if stated is not None:
            theta = _positive(stated, f"rope_theta of rope_parameters {kind}".rstrip())
        if scaling.get("partial_rotary_factor", 1) != 1:
            raise ConfigError(f"rope_scaling {scaling}: partial_rotary_factor other than 1 cannot be run")
        return theta, self._completed(scaling)

    def _completed(self, scaling: dict[str, Any]) -> dict[str, Any]:
        """As transformers completes it: lengths that it leaves out are the model's."""
        scaling = dict(scaling)
        if scaling.get("rope_type", scaling.get("type")) not in _NEED_ORIGINAL_LENGTH:
            return scaling
        length = self.size("max_position_embeddings")
        original = scaling.setdefault("original_max_position_embeddings", length)
        _positive(original, "original_max_position_embeddings of the rope scaling")
        if scaling.get("factor") is None:
            scaling["factor"] = length / original
        return scaling


def _positive(value: Any, field: str) -> float:
    if not is_positive(value):
        raise ConfigError(f"config field {field} is {value!r}, not a positive number")
    return float(value)
