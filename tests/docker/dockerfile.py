"""Reads a Dockerfile: its stages, and the instructions of each."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass
class Stage:
    """One FROM and what follows it: instructions as (word, text)."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def read_dockerfile(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """The arguments before the first FROM, and the stages by name in their order."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = stages[name] = Stage(name, base)
        elif stage is not None:
            stage.steps.append((word, rest.strip()))
        elif word == "ARG":
            key, _, value = rest.partition("=")
            arguments[key] = value
        else:
            raise ValueError(f"{word} before any FROM")
    return arguments, stages


def steps_of(stages: dict[str, Stage], name: str) -> list[tuple[str, str]]:
    """All instructions that make the stage `name`, those of the stages it is built on first."""
    stage = stages[name]
    below = steps_of(stages, stage.base) if stage.base in stages else []
    return [*below, *stage.steps]
