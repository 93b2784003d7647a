"""How a text becomes one vector, by the model's files: sentence-transformers' modules.json and 1_Pooling."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from servelite.tokenizer.metadata_files import JSON_LIMIT, ModelFileError, brief, decode_json, read_whole

_MODULES: Final = "modules.json"
_MODES: Final = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_OLD_MODES: Final = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "lasttoken"}
"""By what follows `pooling_mode_` in the name of a flag; its later versions write `pooling_mode`."""


class _Module(msgspec.Struct):
    type: str  # a Python class's name, of which only the last part is looked at
    path: str = ""


def read_pooling(model: Path, choice: str, *, encoder: bool) -> tuple[str, bool]:
    """Of which positions' hidden states a vector is made, "mean", "last" or "cls"; whether its length is 1.

    Args:
        choice: as `--pooling` has it.
        encoder: what decides where neither `choice` nor a file does.

    Raises:
        ModelFileError: the folder's modules are of a kind that is not supported.
    """
    kind = choice if choice != "auto" else "mean" if encoder else "last"
    path = model / _MODULES
    if not path.exists():  # in a GGUF file neither
        return kind, True
    normalize = False
    for module in decode_json(path, read_whole(path, JSON_LIMIT), list[_Module]):
        name = module.type.rpartition(".")[2]
        if name == "Pooling" and choice == "auto":
            kind = _pooling_mode(model / Path(module.path).name / "config.json")
        elif name == "Normalize":
            normalize = True
        elif name not in ("Transformer", "Pooling"):
            raise ModelFileError(path, f"the module {brief(module.type)} is not supported")
    return kind, normalize


def _pooling_mode(path: Path) -> str:
    try:
        config = decode_json(path, read_whole(path, JSON_LIMIT), dict[str, Any])
    except FileNotFoundError:
        raise ModelFileError(path, f"the file is missing ({_MODULES} names it)") from None
    begin = "pooling_mode_"
    flags = [name.removeprefix(begin) for name in config if name.startswith(begin) and config[name] is True]
    flags = [_OLD_MODES.get(flag, flag) for flag in flags]
    mode = config.get("pooling_mode", flags[0] if len(flags) == 1 else flags)
    if not isinstance(mode, str) or mode not in _MODES:
        raise ModelFileError(
            path, f"pooling_mode is {brief(mode)}; supported: {', '.join(_MODES)}, or what --pooling says"
        )
    return _MODES[mode]
