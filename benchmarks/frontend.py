"""What a streamed token costs the front end: microseconds of its CPU time.

    python benchmarks/frontend.py [--streams 64] [--tokens 200] [--rounds 5]

A front end process serves the demo model's tokenizer over HTTP; this process plays the launcher, the
engine (one `Outputs` a step with a token for each stream) and the clients (bare sockets that count
events). Only the front end's own CPU time is counted, user and system.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path

from servelite.config import Settings
from servelite.ipc.messages import (
    CONTRACT_VERSION,
    FLAG,
    NUMBER,
    Add,
    Boot,
    ChildReady,
    FinishReason,
    Hello,
    Load,
    Outputs,
    Ready,
    Stop,
    pack,
)
from servelite.ipc.progress import ProgressPage
from servelite.ipc.sockets import EngineSocket, decode_to_engine, encode, engine_address
from servelite.launcher.child import Child
from servelite.launcher.listen import open_listener
from servelite.launcher.start import find_model

STEP_S = 0.005
WORDS = 4_000  # different tokens, IDs from 1,000: ordinary text


class BenchEngine:
    """Answers each request with `tokens` tokens, one a step, all streams in step."""

    def __init__(self, address: str, streams: int, tokens: int) -> None:
        self._sock = EngineSocket(address)
        self._streams, self._tokens = streams, tokens
        self.ended = False

    def run(self) -> None:
        """Until `ended`."""
        waiting: list[int] = []
        step = 0
        while not self.ended:
            self._sock.wait(50)
            while (got := self._sock.recv()) is not None:
                peer, message = got[0], decode_to_engine(got[1])
                if isinstance(message, Hello):
                    facts = Ready(
                        0, 0, CONTRACT_VERSION, 1000, 16, 8192, 64, 512, 49152, "none", "none", "bench"
                    )
                    self._sock.send(peer, encode(facts))
                elif isinstance(message, Add):
                    waiting.append(message.request)
            if len(waiting) == self._streams:
                for index in range(self._tokens):
                    step += 1
                    time.sleep(STEP_S)
                    self._sock.send(peer, encode(self._outputs(waiting, index, step)))
                waiting = []
        self._sock.close()

    def _outputs(self, requests: list[int], index: int, step: int) -> Outputs:
        n = len(requests)
        last = index == self._tokens - 1
        return Outputs(
            0,
            0,
            step,
            Load(running=n, steps=step),
            requests=pack(requests, NUMBER),
            first_index=pack([index] * n),
            counts=pack([1] * n),
            finish=pack([FinishReason.LENGTH if last else FinishReason.NONE] * n, FLAG),
            tokens=pack([1000 + (step * 131 + i * 7919) % WORDS for i in range(n)]),
        )


def stream_all(port: int, streams: int, tokens: int) -> int:
    """Run all streams to their end; returns how many events came."""
    body = {"model": "demo", "prompt": "x", "max_tokens": tokens, "stream": True}
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n".encode()
    selector = selectors.DefaultSelector()
    for _ in range(streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(head + payload)
        selector.register(sock, selectors.EVENT_READ)
    events = 0
    while selector.get_map():
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 16)
            events += data.count(b"data: ")
            if not data or b"[DONE]" in data:
                selector.unregister(key.fileobj)
                key.fileobj.close()
    return events


def cpu_seconds(pid: int) -> tuple[float, float]:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / ticks, int(fields[12]) / ticks


def main() -> None:
    """Print the figure of each round and their median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    settings = find_model(Settings(max_num_seqs=options.streams, executor="simulated"))
    with tempfile.TemporaryDirectory() as folder, open_listener("127.0.0.1", 0) as listener:
        address = engine_address(folder, 0, 0)
        engine = BenchEngine(address, options.streams, options.tokens)
        thread = threading.Thread(target=engine.run)
        thread.start()
        page = ProgressPage.create()
        boot = Boot(settings.to_dict(), 0, 0, address, page.fd, listener.fileno())
        child = Child.start("front end", "servelite.frontend", boot, (page.fd, listener.fileno()))
        try:
            while not isinstance(child.lifeline.recv(), ChildReady):
                pass
            port = listener.getsockname()[1]
            figures = []
            for round_number in range(options.rounds + 1):
                before = cpu_seconds(child.pid)
                events = stream_all(port, options.streams, options.tokens)
                scale = 1e6 / (options.streams * options.tokens)
                user, system = ((b - a) * scale for a, b in zip(before, cpu_seconds(child.pid), strict=True))
                if round_number:  # the first warms up
                    figures.append(user + system)
                    print(
                        f"{user + system:.1f} us of CPU a token, {user:.1f} in user mode ({events} events)",
                        flush=True,
                    )
            print(f"median {statistics.median(figures):.1f}, least {min(figures):.1f} us of CPU a token")
        finally:
            child.send(Stop())
            child.reap()
            engine.ended = True
            thread.join()


if __name__ == "__main__":
    main()
