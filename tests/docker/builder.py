"""Builds a Dockerfile's stages without Docker: each RUN line runs as it stands, in a root of its own.

The root is an overlay of this machine's, writable in memory only, in a mount namespace that ends with
the builder. What stands in for the base image is this machine with a fresh virtual environment first
on PATH. Only root can do so, and only on Linux with overlayfs.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from tests.docker.dockerfile import Stage

PYTHON: Final = "/opt/python"
PATH: Final = f"{PYTHON}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# How this machine's pip reaches its packages; no image has it, and no build would work without.
_OF_THE_MACHINE: Final = re.compile(r"PIP_(?!COMPILE)\w+|\w+_proxy|\w+_PROXY|SSL_CERT_FILE")


@dataclass
class Image:
    """What a stage has come to: folders of layers (the last on top), and how a container starts."""

    layers: list[str]
    environment: dict[str, str]
    folder: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health_check: list[str] = field(default_factory=list)


class Builder:
    """A mount namespace, and the images built in it."""

    def __init__(self, holder: int, folder: Path, context: Path, arguments: dict[str, str]) -> None:
        """`holder`: PID of a process in the namespace; `folder`: in memory there; `arguments`: as of
        `--build-arg`."""
        self._holder, self._folder, self._context, self._arguments = holder, folder, context, arguments
        self._images: dict[str, Image] = {}
        self._mounts = 0

    def command(self, *words: str) -> list[str]:
        """`words` as root in the namespace."""
        return ["nsenter", "-t", str(self._holder), "-m", *words]

    def do(self, *words: str) -> str:
        """Run a command in the namespace; returns what it prints, raises if it fails."""
        done = subprocess.run(
            self.command(*words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{shlex.join(words)}: {done.returncode}\n{done.stdout[-4000:]}"
        return done.stdout

    def base(self) -> Image:
        """What stands in for the image that the first FROM names."""
        image = Image(["/"], {"PATH": PATH})
        root = self.mount(image, writable=True)
        self.do("chroot", root, sys.executable, "-m", "venv", PYTHON)
        # The interpreter may lie in a private home folder; the image's own user must reach it.
        for parent in Path(os.path.realpath(sys.executable)).parents:
            self.do("chmod", "a+rx", f"{root}{parent}")
        return image

    def build(self, stages: dict[str, Stage], name: str) -> Image:
        """The image of a stage; those it needs are built first, each once."""
        if name in self._images:
            return self._images[name]
        if name not in stages:
            return self._images.setdefault(name, self.base())
        stage = stages[name]
        under = self.build(stages, stage.base if stage.base in stages else "")
        image = replace(under, layers=[*under.layers], environment=dict(under.environment))
        root = self.mount(image, writable=True)
        arguments: dict[str, str] = {}
        for word, text in stage.steps:
            if word == "ARG":
                key, _, value = text.partition("=")
                arguments[key] = self._arguments.get(key, value)
            elif word == "RUN":
                machine = {k: v for k, v in os.environ.items() if _OF_THE_MACHINE.fullmatch(k)}
                variables = image.environment | arguments | machine
                self.do("chroot", root, *env(variables, image.folder), "/bin/sh", "-ec", text)
            elif word == "COPY":
                source = self._context
                if text.startswith("--from="):
                    other, _, text = text.removeprefix("--from=").partition(" ")
                    source = Path(self.mount(self.build(stages, other), writable=False))
                self._copy(source, f"{root}{image.folder}", root, text)
            elif word == "WORKDIR":
                image.folder = text
                self.do("mkdir", "-p", f"{root}{text}")
            else:
                self._note(image, word, text)
        self._images[name] = image
        return image

    def _copy(self, source: Path, folder: str, root: str, text: str) -> None:
        *names, target = text.split()
        place = root + target if target.startswith("/") else os.path.normpath(f"{folder}/{target}")
        several = target.endswith("/")
        self.do("mkdir", "-p", place if several else os.path.dirname(place))
        for name in names:
            option = "--target-directory" if several else "--no-target-directory"
            copied = f"{source}/{name.lstrip('/')}"
            self.do("cp", "-r", *((f"{option}={place}", copied) if several else (option, copied, place)))

    @staticmethod
    def _note(image: Image, word: str, text: str) -> None:
        """An instruction that says how a container starts."""
        match word:
            case "ENV":
                image.environment |= dict(pair.split("=", 1) for pair in shlex.split(text))
            case "USER":
                image.user = text
            case "ENTRYPOINT":
                image.entrypoint = json.loads(text)
            case "CMD":
                image.command = json.loads(text)
            case "HEALTHCHECK":
                image.health_check = json.loads(text.partition("CMD ")[2])
            case "EXPOSE" | "VOLUME" | "STOPSIGNAL":
                pass  # nothing to do without an engine
            case _:
                raise AssertionError(f"the builder knows no {word}")

    def mount(self, image: Image, *, writable: bool) -> str:
        """A root with the image's layers; what is written to it becomes the image's top layer."""
        self._mounts += 1
        upper, work, root = (str(self._folder / f"{self._mounts}{kind}") for kind in ("", "-work", "-root"))
        self.do("mkdir", upper, work, root)
        options = "lowerdir=" + ":".join(reversed(image.layers))
        if writable:
            options += f",upperdir={upper},workdir={work}"
            image.layers.append(upper)
        elif len(image.layers) == 1:
            options += f":{upper}"  # overlayfs wants two
        self.do("mount", "-t", "overlay", "overlay", "-o", options, root)
        for folder in ("/proc", "/dev"):
            self.do("mount", "--rbind", folder, root + folder)
        return root


def env(variables: dict[str, str], folder: str) -> list[str]:
    """The command that runs what follows it with these variables only, in `folder`."""
    return ["env", "-i", "-C", folder, *(f"{name}={value}" for name, value in variables.items())]


def why_not() -> str | None:
    """Why this machine cannot build, if it cannot."""
    if os.geteuid() != 0:
        return "only root can mount"
    trial = "mount -t tmpfs none /mnt && mkdir /mnt/u /mnt/w /mnt/r && " + (
        "mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/r"
    )
    try:
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", trial], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "there is no unshare"
    return f"no overlay can be mounted: {done.stderr.strip()}" if done.returncode else None


@contextmanager
def builder(context: Path, arguments: dict[str, str]) -> Iterator[Builder]:
    """A builder with the folder `context` and values for ARG; nothing is left of it at the end."""
    with tempfile.TemporaryDirectory(prefix="slt-image-", dir="/tmp") as folder:
        script = (
            f"mount -t tmpfs -o mode=755 none {shlex.quote(folder)} && echo mounted && exec sleep infinity"
        )
        holder = subprocess.Popen(
            ["unshare", "-m", "--propagation", "private", "sh", "-c", script],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "mounted\n"
            yield Builder(holder.pid, Path(folder), context, arguments)
        finally:
            holder.kill()
            holder.communicate()
