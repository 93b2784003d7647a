"""Life and death: SIGTERM drains, a second one does not; a start that fails says why."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.conformance.sse import read_events
from tests.conformance.target import COMPLETIONS, GREEDY, Target, error_of, given_url, together
from tests.http.server import Server, end, running_server, start_server, wait_ready
from tests.tokenizer.small_folder import save, sentencepiece

BODY = {"prompt": "a", "max_tokens": 100, "ignore_eos": True} | GREEDY


@pytest.fixture(autouse=True)
def _own_servers() -> None:
    if given_url():
        pytest.skip("needs servers of its own")


def _ask(server: Server, *, stream: bool, **fields: int) -> httpx.Response:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        return client.post(COMPLETIONS, json={"model": "demo", "stream": stream} | BODY | fields)


def _nothing_left(server: Server, folder: Path, children: list[int]) -> None:
    """No child, no socket file, the port free; the leftovers plugin looks for the rest."""
    assert not [pid for pid in children if Path(f"/proc/{pid}/cmdline").exists() and _words(pid)]
    assert not folder.exists()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", server.port))


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()  # empty for a zombie
    except OSError:
        return b""


def _flags(step_ms: int, folder: Path) -> tuple[str, ...]:
    simulated = ("--executor", "simulated", "--simulated-step-ms", str(step_ms))
    return (*simulated, "--drain-timeout", "20", "--drain-delay", "0", "--runtime-dir", str(folder))


def _wait_for_rows(server: Server, count: int) -> None:
    deadline = time.monotonic() + 10
    while server.metrics()["servelite_num_requests_running"] < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_lif_01_sigterm_drains(tmp_path: Path, demo_model: Path) -> None:
    """LIF-01, run and new, with `--drain-delay 0`; and it can be started again at once."""
    folder = tmp_path / "r"
    with running_server(tmp_path, *_flags(15, folder)) as server:
        children, late = server.children(), list[int]()

        def end_it() -> None:
            _wait_for_rows(server, 4)
            server.signal(signal.SIGTERM)
            time.sleep(0.3)
            for ask in (lambda: httpx.get(f"{server.url}/health").status_code,
                        lambda: _ask(server, stream=False).status_code):  # fmt: skip
                try:
                    late.append(ask())
                except httpx.TransportError:
                    late.append(0)

        calls = [lambda: _ask(server, stream=False)] * 2 + [lambda: _ask(server, stream=True)] * 2
        replies = together([*calls, end_it])[:4]  # type: ignore[list-item]
        done = time.monotonic()
        for reply in replies:
            assert reply is not None and reply.status_code == 200
            if reply.headers["content-type"].startswith("text/event-stream"):
                assert read_events(reply.content).done
            else:
                assert reply.json()["usage"]["completion_tokens"] == 100
        assert len(late) == 2 and set(late) <= {0, 503}
        assert server.wait(10) in (0, 143) and time.monotonic() - done < 10
        _nothing_left(server, folder, children)
    with running_server(tmp_path, *_flags(1, folder)) as again:
        Target(again.url, own=again).check_alive()


@pytest.mark.slow
def test_lif_01_a_second_sigterm_does_not_wait(tmp_path: Path, demo_model: Path) -> None:
    """LIF-01, twice: answers end with an error that is told."""
    folder = tmp_path / "r"
    with running_server(tmp_path, *_flags(100, folder)) as server:
        children = server.children()

        def end_it() -> None:
            _wait_for_rows(server, 2)
            server.signal(signal.SIGTERM)
            time.sleep(0.3)
            server.signal(signal.SIGTERM)

        calls = [
            lambda: _ask(server, stream=False, max_tokens=600),
            lambda: _ask(server, stream=True, max_tokens=600),
        ]
        begun = time.monotonic()
        plain, stream, _ = together([*calls, end_it])  # type: ignore[list-item]
        assert plain.status_code >= 500  # type: ignore[attr-defined]
        error_of(plain)  # type: ignore[arg-type]
        events = read_events(stream.content)  # type: ignore[attr-defined]
        assert events.error is not None and not events.done
        server.wait(30)
        assert time.monotonic() - begun < 30
        _nothing_left(server, folder, children)


def _model(tmp_path: Path, **config: object) -> Path:
    folder = save(tmp_path / "model", sentencepiece(), vocab_size=1000)
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    return folder


def _tiny(tmp_path: Path) -> Path:
    """A small model with weights and a tokenizer."""
    from tests.tiny_models import tiny_llama

    folder = save(tmp_path / "model", sentencepiece(), vocab_size=300)
    tiny_llama(folder, vocab_size=300)
    return folder


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def _start(model: str, *flags: str) -> tuple[int, str]:
    """Exit code and the last five lines of standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "servelite", "serve", model, "--port", "0", *flags],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    return done.returncode, "\n".join(done.stderr.splitlines()[-5:])


def _told(outcome: tuple[int, str], *words: str) -> None:
    code, last = outcome
    assert code != 0 and "root cause above" not in last
    assert all(word in last for word in words), last


def test_lif_03_flags_that_cannot_be(tmp_path: Path, demo_model: Path) -> None:
    """LIF-03: found before anything is loaded."""
    _told(_start(str(tmp_path / "nowhere")), str(tmp_path / "nowhere"))
    _told(_start("demo", "--no-such-flag"), "--no-such-flag")


def test_lif_03_nobody_is_served_before_it_is_ready(tmp_path: Path, demo_model: Path) -> None:
    """LIF-03: whoever asks earlier is refused, or told 503."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    server = start_server(tmp_path, "--executor", "simulated", "--port", str(port))
    early = []
    try:
        while not select.select([server.process.stdout], [], [], 0.02)[0]:
            try:
                early.append(httpx.get(f"http://127.0.0.1:{port}/health", timeout=0.5).status_code)
            except httpx.TransportError:
                early.append(0)
        wait_ready(server)
        assert server.get("/health")[0] == 200
    finally:
        end(server)
    assert early and set(early[:-1]) <= {0, 503}  # during the last it may have become ready


def test_lif_03_a_port_in_use(tmp_path: Path, demo_model: Path) -> None:
    """LIF-03: found before the model is loaded."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        begun = time.monotonic()
        outcome = _start("demo", "--port", port)
        assert time.monotonic() - begun < 10
    _told(outcome, port)


@pytest.mark.slow
def test_lif_03_broken_folders(tmp_path: Path) -> None:
    """LIF-03: what is not there or not right is named."""
    folder = _model(tmp_path)
    (folder / "config.json").unlink()
    _told(_start(str(folder)), "config.json")
    folder = _model(tmp_path, architectures=["FancyForCausalLM"])
    _told(_start(str(folder)), "FancyForCausalLM", "LlamaForCausalLM")
    folder = _tiny(tmp_path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    _truncate(weights)
    _told(_start(str(folder)), "model.safetensors")
    weights.write_bytes(whole)
    _drop_tensor(weights)
    _told(_start(str(folder)), "model.norm.weight")
    weights.write_bytes(whole)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    _told(_start(str(folder)), "tokenizer")


def _drop_tensor(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.slow
def test_lif_03_numbers_that_do_not_fit(tmp_path: Path, demo_model: Path) -> None:
    """LIF-03: length and pool, pool and memory, ranks and model."""
    _told(_start("demo", "--max-model-len", "4096", "--num-gpu-blocks-override", "20"), "4096", "20")
    much = ("--kv-cache-memory-bytes", str(10**12), "--max-num-seqs", "512")
    _told(_start("demo", *much), "--kv-cache-memory-bytes", str(10**12), "available")
    _told(_start("demo", "--tp", "4"), "--tp is 4")  # heads are parted here, not devices
