"""An engine that does what a test says: the contract's other end, over a real socket."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from servelite.config import Settings
from servelite.frontend.model_metadata import ModelMetadata, read_metadata
from servelite.frontend.service import Service
from servelite.ipc.messages import (
    CONTRACT_VERSION,
    FLAG,
    NUMBER,
    Abort,
    Add,
    FinishReason,
    Hello,
    Load,
    Outputs,
    Ready,
    ToEngine,
    pack,
    unpack,
)
from servelite.ipc.sockets import EngineSocket, decode_to_engine, encode

EPOCH = 3
NONE, STOP, LENGTH, ERROR = FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR


class FakeEngine:
    """Bound to `address`. Waits poll, since the socket is the engine loop's blocking one."""

    def __init__(self, address: str, epoch: int = EPOCH) -> None:
        self.epoch = epoch
        self._sock = EngineSocket(address)
        self._peer = b""
        self.steps = 0

    async def receive(self) -> ToEngine:
        """The next message from the front end."""
        while (got := self._sock.recv()) is None:
            await asyncio.sleep(0.001)
        self._peer = got[0]
        return decode_to_engine(got[1])

    async def receive_add(self) -> Add:
        message = await self.receive()
        assert isinstance(message, Add), message
        return message

    async def receive_abort(self) -> list[int]:
        message = await self.receive()
        assert isinstance(message, Abort), message
        return unpack(message.requests, NUMBER).tolist()

    async def nothing_comes(self, seconds: float = 0.05) -> bool:
        await asyncio.sleep(seconds)
        return self._sock.recv() is None

    async def greet(
        self,
        *,
        max_model_len: int = 512,
        contract: int = CONTRACT_VERSION,
        vocab_size: int = 49152,
        **more: Any,
    ) -> None:
        """Take the Hello and answer Ready."""
        assert isinstance(await self.receive(), Hello)
        self.send(
            Ready(
                0,
                self.epoch,
                contract,
                num_blocks=100,
                block_size=16,
                max_model_len=max_model_len,
                max_num_seqs=4,
                max_num_batched_tokens=64,
                vocab_size=vocab_size,
                dtype="float32",
                device="none",
                executor="fake",
                features=more.pop("features", ("logprobs",)),
                **more,
            )
        )

    def send(self, message: Ready | Outputs) -> None:
        self._sock.send(self._peer, encode(message))

    def step(
        self, *rows: tuple[int, int, list[int], FinishReason], epoch: int | None = None, **more: Any
    ) -> None:
        """One step's outputs: (request, first index, tokens, finish) a row."""
        self.steps += 1
        self.send(
            Outputs(
                0,
                self.epoch if epoch is None else epoch,
                self.steps,
                Load(running=len(rows), free_blocks=90, steps=self.steps),
                requests=pack([row[0] for row in rows], NUMBER),
                first_index=pack([row[1] for row in rows]),
                counts=pack([len(row[2]) for row in rows]),
                finish=pack([row[3] for row in rows], FLAG),
                tokens=pack([token for row in rows for token in row[2]]),
                **more,
            )
        )

    def close(self) -> None:
        self._sock.close()


@functools.cache
def opened(model: Path) -> ModelMetadata:
    """A model's metadata, read once for all tests: it does not change."""
    return read_metadata(Settings(model=str(model)))


@asynccontextmanager
async def service_and_engine(
    model: Path, folder: Path, *, greet: bool = True, facts: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Service, FakeEngine]]:
    """A service on a fake engine that has greeted it, with `facts` of its own."""
    address = f"ipc://{folder}/e.sock"
    engine = FakeEngine(address)
    service = Service(
        Settings(executor="simulated", **settings), 0, np.zeros((2, 64), np.int64), opened(model), threads=1
    )
    reader = asyncio.create_task(service.engine.run(address, EPOCH))
    try:
        if greet:
            await engine.greet(**(facts or {}))
            await service.engine.ready()
            service.lifecycle.serve()
        yield service, engine
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        service.close()
        engine.close()
