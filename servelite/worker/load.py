"""Makes the model runner that the settings ask for. torch is imported only where a model is run."""

from __future__ import annotations

from pathlib import Path

from servelite.config import Settings
from servelite.kernels.collective import ONE_RANK, Collective
from servelite.worker.base import ModelRunner


def load_runner(settings: Settings, model_path: Path, group: Collective = ONE_RANK) -> ModelRunner:
    """
    Args:
        model_path: a GGUF file or a Hugging Face folder (`loader.resolve` finds it).
        group: the ranks that share the model; all of them load at once.

    Raises:
        ModelFileError: the model's files cannot be used; one line naming the file.
        SettingError: a setting does not fit the model or the memory.
    """
    if settings.executor == "simulated":
        from servelite.worker.simulated import SimulatedRunner

        return SimulatedRunner.from_settings(settings, model_path, group)
    from servelite.worker.model_runner import CPUModelRunner

    return CPUModelRunner.load(settings, model_path, group)
