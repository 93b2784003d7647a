"""What a streamed token costs the front end: microseconds of its CPU time.

    python benchmarks/frontend.py [--kinds plain stop tools] [--streams 64] [--tokens 200] [--rounds 5]

For each kind of answer a front end process serves the demo model's tokenizer over HTTP; this process plays
the launcher, the engine (one `Outputs` a step with a token for each stream) and the clients (bare sockets
that count events). Only the front end's own CPU time is counted, user and system: from the engine's first
token to the last byte, over all tokens; and before that, over the requests.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
    TokenLogprobs,
    pack,
)
from servelite.ipc.progress import ProgressPage
from servelite.ipc.sockets import EngineSocket, decode_to_engine, encode, engine_address
from servelite.launcher.child import Child
from servelite.launcher.listen import open_listener
from servelite.launcher.start import find_model
from servelite.tokenizer.model_files import open_model_files
from servelite.tokenizer.tokenizer import Tokenizer, load_tokenizer

STEP_S = 0.005
WORDS = 4_000  # different tokens, IDs from 1,000: ordinary text
FACTS = Ready(
    *(0, 0, CONTRACT_VERSION, 1000, 16, 8192, 64, 512, 49152, "none", "none", "bench"), features=("logprobs",)
)


@dataclass(frozen=True)
class Kind:
    """A kind of answer.

    Attributes:
        text: what the model writes, of which the middle comes as often as it takes; None: words at random.
        logprobs: how many alternatives the engine sends with each token; -1: it sends no logprobs.
        reasoning_parser: what the server is started with.
    """

    path: str
    body: dict[str, Any]
    text: tuple[str, str, str] | None = None
    logprobs: int = -1
    reasoning_parser: str = "none"

    def tokens(self, tokenizer: Tokenizer, count: int) -> list[int]:
        """The answer's token IDs."""
        if self.text is None:
            return [1000 + i * 131 % WORDS for i in range(count)]
        begin, middle, end = (tokenizer.encode(part, add_special_tokens=False) for part in self.text)
        filled = middle * (count // len(middle) + 1)
        return begin + filled[: count - len(begin) - len(end)] + end


CHAT = "/v1/chat/completions"
MESSAGES = {"messages": [{"role": "user", "content": "x"}]}
TOOLS = {"tools": [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}]}
PROSE = "The quick brown fox jumps over the lazy dog, and 12 others watch it. "
CALL = (
    '<tool_call>\n{"name": "write", "arguments": {"text": "',
    PROSE,
    '", "n": [1, 2]}}\n</tool_call>',
)
STOPS = ["\n\nUser:", "#### END", "</answer>", "Observation:"]  # whose beginnings occur, and they do not
KINDS = {
    "plain": Kind("/v1/completions", {"prompt": "x"}),
    "stop": Kind("/v1/completions", {"prompt": "x", "stop": STOPS}),
    "logprobs-0": Kind(CHAT, MESSAGES | {"logprobs": True, "top_logprobs": 0}, logprobs=0),
    "logprobs-5": Kind(CHAT, MESSAGES | {"logprobs": True, "top_logprobs": 5}, logprobs=5),
    "tools": Kind(CHAT, MESSAGES | TOOLS, CALL),
    "chat": Kind(CHAT, MESSAGES),
    "legacy-logprobs-5": Kind("/v1/completions", {"prompt": "x", "logprobs": 5}, logprobs=5),
    "reasoning": Kind(CHAT, MESSAGES, ("<think>\n", PROSE, "</think>\n\nHi."), reasoning_parser="qwen3"),
    "responses": Kind("/v1/responses", {"input": "x"}),
    "messages": Kind("/v1/messages", MESSAGES),
}


class BenchEngine:
    """Answers each request with the same tokens, one a step, all streams in step."""

    def __init__(self, address: str, streams: int, tokens: list[int], logprobs: int) -> None:
        self._sock = EngineSocket(address)
        self.begin: Callable[[], None]  # called when all requests are there
        self._streams, self._tokens, self._logprobs = streams, tokens, logprobs
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
                    self._sock.send(peer, encode(FACTS))
                elif isinstance(message, Add):
                    waiting.append(message.request)
            if len(waiting) == self._streams:
                self.begin()
                for index in range(len(self._tokens)):
                    step += 1
                    time.sleep(STEP_S)
                    self._sock.send(peer, encode(self._outputs(waiting, index, step)))
                waiting = []
        self._sock.close()

    def _outputs(self, requests: list[int], index: int, step: int) -> Outputs:
        n = len(requests)
        last = index == len(self._tokens) - 1
        return Outputs(
            0,
            0,
            step,
            Load(running=n, steps=step),
            requests=pack(requests, NUMBER),
            first_index=pack([index] * n),
            counts=pack([1] * n),
            finish=pack([FinishReason.LENGTH if last else FinishReason.NONE] * n, FLAG),
            tokens=pack([self._tokens[index]] * n),
            logprobs=dict.fromkeys(requests, self._table(index)) if self._logprobs >= 0 else {},
        )

    def _table(self, index: int) -> TokenLogprobs:
        """One token's: itself with alternatives beside it in the vocabulary."""
        k, token = self._logprobs, self._tokens[index]
        values = np.log(np.full(k, 0.1, np.float32)) - np.arange(k, dtype=np.float32)
        ids = pack([token + i for i in range(k)])
        return TokenLogprobs(index, k, np.float32([-0.5]).tobytes(), ids, values.astype("<f4").tobytes())


def stream_all(port: int, kind: Kind, streams: int, tokens: int) -> int:
    """Run all streams to their end; returns how many events came."""
    length = {"max_output_tokens" if kind.path.endswith("responses") else "max_tokens": tokens}
    payload = json.dumps({"model": "demo", "stream": True} | kind.body | length).encode()
    head = f"POST {kind.path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n".encode()
    selector = selectors.DefaultSelector()
    for _ in range(streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(head + payload)
        selector.register(sock, selectors.EVENT_READ, bytearray())
    events = 0
    while selector.get_map():
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 16)
            events += data.count(b"data: ")
            key.data[:] = key.data[-5:] + data[-5:]
            if not data or key.data.endswith(b"0\r\n\r\n"):  # the last chunk of the body
                selector.unregister(key.fileobj)
                key.fileobj.close()
    return events


def cpu_seconds(pid: int) -> float:
    """A process's time on a CPU so far: POSIX's clock of another process, whose number Linux makes so."""
    return time.clock_gettime((~pid << 3) | 2)


@contextmanager
def front_end(kind: Kind, streams: int, tokens: int) -> Iterator[tuple[int, int, BenchEngine]]:
    """A front end that serves answers of a kind: its process ID, its port and its engine."""
    settings = Settings(max_num_seqs=streams, executor="simulated", reasoning_parser=kind.reasoning_parser)
    settings = find_model(settings)
    answer = kind.tokens(load_tokenizer(open_model_files(Path(settings.model))), tokens)
    with tempfile.TemporaryDirectory() as folder, open_listener("127.0.0.1", 0) as listener:
        address = engine_address(folder, 0, 0)
        engine = BenchEngine(address, streams, answer, kind.logprobs)
        thread = threading.Thread(target=engine.run)
        thread.start()
        page = ProgressPage.create()
        boot = Boot(settings.to_dict(), 0, 0, address, page.fd, listener.fileno())
        child = Child.start("front end", "servelite.frontend", boot, (page.fd, listener.fileno()))
        try:
            while not isinstance(told := child.lifeline.recv(), ChildReady):
                if told is None:
                    raise SystemExit("the front end has died; its own words are above")
            yield child.pid, listener.getsockname()[1], engine
        finally:
            child.send(Stop())
            child.reap()
            engine.ended = True
            thread.join()


def measure(kind: Kind, streams: int, tokens: int, rounds: int) -> tuple[list[float], list[float], float]:
    """Microseconds a token and milliseconds a request in each round, and events a token."""
    a_token, a_request, begun = [], [], [0.0]
    with front_end(kind, streams, tokens) as (pid, port, engine):
        engine.begin = lambda: begun.append(cpu_seconds(pid))
        for _ in range(rounds + 1):
            before = cpu_seconds(pid)
            events = stream_all(port, kind, streams, tokens)
            a_token.append((cpu_seconds(pid) - begun[-1]) / (streams * tokens) * 1e6)
            a_request.append((begun[-1] - before) / streams * 1e3)
    return a_token[1:], a_request[1:], events / (streams * tokens)  # the first round warms up


def main() -> None:
    """Print each kind's figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for name in options.kinds:
        a_token, a_request, events = measure(KINDS[name], options.streams, options.tokens, options.rounds)
        print(
            f"{name:18} median {statistics.median(a_token):5.1f}, least {min(a_token):5.1f} us of CPU a token"
            f" ({events:.2f} events a token); {statistics.median(a_request):4.2f} ms a request",
            flush=True,
        )


if __name__ == "__main__":
    main()
