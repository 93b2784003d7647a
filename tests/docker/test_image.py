"""`docker/Dockerfile`: what it says, and, without an engine, what comes of its commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.docker.builder import Builder, Image, builder, env, why_not
from tests.docker.dockerfile import Stage, read_dockerfile, steps_of
from tests.docker.nginx import free_port
from tests.sources import ROOT, tracked_files

TEXT: Final = (ROOT / "docker" / "Dockerfile").read_text()
ARGUMENTS, STAGES = read_dockerfile(TEXT)
TARGETS: Final = ("cpu",)


def last(target: str, word: str) -> str:
    """The text of the instruction `word` that counts."""
    return [text for name, text in steps_of(STAGES, target) if name == word][-1]


@pytest.mark.parametrize("target", TARGETS)
def test_how_a_container_runs(target: str) -> None:
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last(target, "USER"))  # by number, and not root's
    assert json.loads(last(target, "ENTRYPOINT")) == ["servelite"]  # no shell: servelite itself is PID 1
    assert json.loads(last(target, "CMD")) == ["serve", "demo"]
    assert last(target, "EXPOSE") == "8000" and "SERVELITE_PORT=8000" in last(target, "ENV")
    assert json.loads(last(target, "HEALTHCHECK").partition("CMD ")[2])[0] == "python"
    assert last(target, "STOPSIGNAL") == "SIGTERM"
    names = [name for name, _ in STAGES[target].steps]
    assert names[-1] == "USER", "nothing may run or be copied as root after it"


def test_no_compiler_in_what_runs() -> None:
    for target in TARGETS:
        assert not [text for word, text in steps_of(STAGES, target) if word == "RUN" and "g++" in text]


def test_torch_is_the_makefiles() -> None:
    pinned = re.search(r"^TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned and ("ARG", f"TORCH={pinned[1]}") in STAGES["cpu"].steps


def in_context() -> set[str]:
    """The tracked files that `.dockerignore` lets through, by its patterns of whole folders and files."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]
    assert "*" in lines
    names = {str(path.relative_to(ROOT)) for path in tracked_files()}
    return {name for name in names if any(name == each or name.startswith(each + "/") for each in kept)}


def test_what_is_copied_is_in_the_context() -> None:
    context = in_context()
    for stage in STAGES.values():
        for word, text in stage.steps:
            if word == "COPY" and not text.startswith("--from="):
                for source in text.split()[:-1]:
                    assert any(name == source or name.startswith(source + "/") for name in context), source


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Builder, Image]]:
    """The CPU image, built from a copy of what the context lets through."""
    if reason := why_not():
        pytest.skip(f"an image cannot be built: {reason}")
    context = tmp_path_factory.mktemp("context")
    for name in in_context():
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, context / name)
    # This machine's package index has the CPU build of torch; the empty folder is no second one.
    index = context / "index"
    index.mkdir()
    with builder(context, {"TORCH_INDEX": index.as_uri()}) as made:
        yield made, made.build(STAGES, "cpu")


class Container:
    """A container of an image: its own process tree, its own user, a root that is read-only."""

    def __init__(self, made: Builder, image: Image, log: Path, model: Path) -> None:
        self._made, self._image, self._log = made, image, log
        self.port = free_port()
        self._environment = image.environment | {"SERVELITE_PORT": str(self.port)}
        user = image.user.replace(":", ",gid=")
        self.root = made.mount(image, writable=False)
        for folder in ("/cache", "/run/servelite", "/tmp"):
            made.do("mount", "-t", "tmpfs", "-o", f"uid={user},mode=0700", "none", self.root + folder)
        models = f"{self.root}{self._environment['SERVELITE_CACHE']}/models"
        made.do("mkdir", "-p", models)
        made.do("cp", str(model), models)
        made.do("chown", "-R", image.user, f"{self.root}/cache")

    def start(self, *arguments: str) -> None:
        """`docker run IMAGE ARGUMENTS`."""
        user, group = self._image.user.split(":")
        words = [*self._image.entrypoint, *(arguments or self._image.command)]
        alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--root", self.root]
        alone += ["--setuid", user, "--setgid", group]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                self._made.command(*alone, *env(self._environment, self._image.folder), *words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def health(self) -> tuple[int, str]:
        """The exit code and the output of the health check."""
        user = f"--userspec={self._image.user}"
        command = env(self._environment, self._image.folder) + self._image.health_check
        done = subprocess.run(
            self._made.command("chroot", user, self.root, *command),
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def wait_healthy(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.health()[0] != 0:
            assert self.process.poll() is None and time.monotonic() < deadline, self.output()
            time.sleep(0.2)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    @property
    def first_process(self) -> int:
        """PID 1 of the container, as this machine counts."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    def stop(self) -> int:
        """`docker stop`: SIGTERM to PID 1; the exit code."""
        os.kill(self.first_process, signal.SIGTERM)
        return self.process.wait(60)

    def remove(self) -> None:
        """`docker rm -f`."""
        if self.process.poll() is None:
            os.kill(self.first_process, signal.SIGKILL)  # and with PID 1 all others
            self.process.wait(10)

    def output(self) -> str:
        return self._log.read_text()


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(900)
def test_a_container_of_the_image(build: tuple[Builder, Image], tmp_path: Path, demo_model: Path) -> None:
    """As user 10001, PID 1 of its own process tree, on a read-only root."""
    made, image = build
    container = Container(made, image, tmp_path / "log", demo_model)
    assert container.health() == (1, "no answer: ConnectionRefusedError(111, 'Connection refused')\n")
    container.start()
    try:
        container.wait_healthy(120)
        pid = container.first_process
        status = Path(f"/proc/{pid}/status").read_text()
        assert re.search(r"^NSpid:.*\t1$", status, re.MULTILINE)
        assert re.search(r"^Uid:\t10001\t10001", status, re.MULTILINE)
        assert Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"servelite: launcher\0")
        made.do("nsenter", "-t", str(pid), "-p", "sh", "-c", "sleep 0.1 & exec true")  # leaves it an orphan
        deadline = time.monotonic() + 10
        while len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()) > 2:
            assert time.monotonic() < deadline, "PID 1 does not reap"
            time.sleep(0.05)
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        answer = container.post(
            "/v1/chat/completions", {"model": "demo", "messages": messages, "temperature": 0}
        )
        assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
        with pytest.raises(AssertionError, match="Read-only file system"):
            made.do("chroot", container.root, "touch", "/opt/x")
        assert container.stop() == 0
    finally:
        container.remove()
    assert "kernels: native attention for " in container.output()  # of the stage with the compiler
    assert container.output().splitlines()[-1] == "servelite: drained: no answers were cut"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_container_that_drains_is_not_healthy(
    build: tuple[Builder, Image], tmp_path: Path, demo_model: Path
) -> None:
    made, image = build
    container = Container(made, image, tmp_path / "log", demo_model)
    container.start("serve", "demo", "--executor", "simulated", "--drain-delay", "20")
    try:
        container.wait_healthy(60)
        os.kill(container.first_process, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while (health := container.health())[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert health == (1, '503 {"status":"draining"}\n')
        assert container.stop() == 0  # the second signal ends the drain
    finally:
        container.remove()


def catches(container: Container, number: int) -> bool:
    """Whether PID 1 has a handler for a signal by now."""
    try:
        status = Path(f"/proc/{container.first_process}/status").read_text()
    except (OSError, ValueError):
        return False  # not there yet
    caught = re.search(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_container_can_be_stopped_before_it_serves(
    build: tuple[Builder, Image], tmp_path: Path, demo_model: Path
) -> None:
    """The kernel gives PID 1 no signal that it has no handler for."""
    made, image = build
    container = Container(made, image, tmp_path / "log", demo_model)
    container.start()
    try:
        while not catches(container, signal.SIGTERM):
            time.sleep(0.01)
        assert container.stop() in (0, 128 + signal.SIGTERM)
    finally:
        container.remove()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_broken_line_fails(build: tuple[Builder, Image]) -> None:
    made, _ = build
    stage = Stage("broken", "", [("ENV", "A=1"), ("RUN", "test $A = 1 && pip install --no-index no-such")])
    with pytest.raises(AssertionError, match="no-such"):
        made.build({"broken": stage}, "broken")
