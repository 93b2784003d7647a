"""The ring: nothing lost, repeated or reordered, whatever the sizes and however slow a reader is."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servelite.ipc import ring
from servelite.ipc.messages import RingFds
from servelite.ipc.ring import RingError, RingReader, RingWriter, create_ring

READER = """
import hashlib, sys, time
import msgspec
from servelite.ipc.messages import RingFds
from servelite.ipc.ring import RingReader
reader = RingReader(msgspec.json.decode(sys.argv[1], type=RingFds), int(sys.argv[2]))
total = hashlib.sha256()
print("ready", flush=True)
for _ in range(int(sys.argv[3])):
    message = reader.recv()
    total.update(len(message).to_bytes(8, "little") + message)
    time.sleep(float(sys.argv[4]))
print(total.hexdigest())
"""


@contextmanager
def a_ring(readers: int, capacity: int = ring.CAPACITY) -> Iterator[RingFds]:
    fds = create_ring(readers, capacity)
    try:
        yield fds
    finally:
        for fd in (fds.memory, *fds.readers, fds.space):
            os.close(fd)


@contextmanager
def reading_process(
    fds: RingFds, index: int, messages: int, pause: float = 0.0
) -> Iterator[subprocess.Popen[str]]:
    """A process that reads so many messages, with a pause behind each, and prints their digest."""
    arguments = (msgspec.json.encode(fds).decode(), str(index), str(messages), str(pause))
    process = subprocess.Popen(
        [sys.executable, "-c", READER, *arguments],
        pass_fds=(fds.memory, *fds.readers, fds.space),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def digest(messages: list[bytes]) -> str:
    total = hashlib.sha256()
    for message in messages:
        total.update(len(message).to_bytes(8, "little") + message)
    return total.hexdigest()


@given(
    capacity=st.sampled_from([64, 96, 128, 1024]),
    sizes=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 3000)), max_size=30),
    pauses=st.lists(st.sampled_from([0.0, 0.0, 1e-5, 2e-4]), min_size=1, max_size=4),
)
def test_every_reader_gets_every_message(capacity: int, sizes: list[int], pauses: list[float]) -> None:
    messages = [random.Random(size).randbytes(size) for size in sizes]

    def read(index: int, pause: float) -> list[bytes]:
        reader, got = RingReader(fds, index), []
        for _ in messages:
            got.append(reader.recv())
            time.sleep(pause)
        reader.close()
        return got

    with a_ring(len(pauses), capacity) as fds, ThreadPoolExecutor(4) as pool:
        results = [pool.submit(read, index, pause) for index, pause in enumerate(pauses)]
        writer = RingWriter(fds)
        for message in messages:
            writer.send(message)
        assert all(result.result(60) == messages for result in results)
        writer.close()


def test_a_frame_may_lie_across_the_end_at_any_place() -> None:
    for offset in range(0, 128, 8):
        for length in range(128 // 4):
            with a_ring(1, 128) as fds:
                writer, reader = RingWriter(fds), RingReader(fds, 0)
                for _ in range(offset // 8):
                    writer.send(b"")
                    assert reader.recv() == b""
                message = bytes(range(1, length + 1))
                writer.send(message)
                assert reader.recv() == message
                writer.close()
                reader.close()


@pytest.mark.parametrize("pauses", [[0.0], [0.0, 0.001, 0.0, 0.003]])
def test_between_processes(pauses: list[float]) -> None:
    draw = random.Random(len(pauses))
    messages = [draw.randbytes(draw.choice([0, 7, 1000, 100_000])) for _ in range(150)]
    messages[50] = draw.randbytes(3 * ring.CAPACITY + 5)
    with a_ring(len(pauses)) as fds, ExitStack() as stack:
        readers = [
            stack.enter_context(reading_process(fds, index, len(messages), pause))
            for index, pause in enumerate(pauses)
        ]
        writer = RingWriter(fds)
        for message in messages:
            writer.send(message)
        for reader in readers:
            assert reader.communicate(timeout=60)[0].strip() == digest(messages)
        writer.close()


def test_a_stopped_reader_holds_the_writer_who_sleeps_and_nothing_is_lost() -> None:
    messages = [bytes([number % 256]) * 9000 for number in range(400)]
    count = len(messages)
    with (
        a_ring(2) as fds,
        reading_process(fds, 0, count) as slow,
        reading_process(fds, 1, count) as quick,
    ):
        slow.send_signal(signal.SIGSTOP)
        used: list[float] = []

        def write() -> None:
            writer = RingWriter(fds)
            for message in messages:
                writer.send(message)
            used.append(time.thread_time())
            writer.close()

        thread = threading.Thread(target=write)
        thread.start()
        time.sleep(1.0)
        assert thread.is_alive(), "3.6 MB do not fit into a ring of 1 MiB"
        slow.send_signal(signal.SIGCONT)
        thread.join(60)
        assert slow.communicate(timeout=60)[0].strip() == digest(messages)
        assert quick.communicate(timeout=60)[0].strip() == digest(messages)
        assert used[0] < 0.3, "of CPU, in a second of waiting"


def test_a_reader_with_nothing_to_read_sleeps() -> None:
    with a_ring(1) as fds:
        used: list[float] = []

        def read() -> None:
            reader = RingReader(fds, 0)
            assert reader.recv() == b"at last"
            used.append(time.thread_time())
            reader.close()

        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(0.5)
        writer = RingWriter(fds)
        writer.send(b"at last")
        thread.join(60)
        assert used and used[0] < 0.1
        writer.close()


def test_two_that_write_to_each_other_at_once_both_get_through() -> None:
    large = os.urandom(5 * ring.CAPACITY)
    with a_ring(1) as there, a_ring(1) as back, ThreadPoolExecutor(1) as pool:

        def other() -> bytes:
            reader, writer = RingReader(there, 0), RingWriter(back)
            writer.send(large)  # hears nothing while it writes
            got = reader.recv()
            reader.close()
            writer.close()
            return got

        result = pool.submit(other)
        writer, reader = RingWriter(there), RingReader(back, 0)
        writer.send(large, [reader])
        assert reader.recv() == large
        assert result.result(60) == large
        writer.close()
        reader.close()


def test_what_no_writer_of_ours_wrote_is_refused() -> None:
    for header in (ring.CAPACITY, 1 << 33, (1 << 64) - 1, ring.CAPACITY // 4):
        with a_ring(1) as fds:
            memory = mmap.mmap(fds.memory, 0)
            memory[128:136] = header.to_bytes(8, "little")
            memory.close()
            os.eventfd_write(fds.readers[0], 1)
            with pytest.raises(RingError, match="a frame of"):
                RingReader(fds, 0).recv()


def test_a_messages_size_is_bounded_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_ring(1) as fds:
        writer = RingWriter(fds)
        writer.send(bytes(300_000))
        monkeypatch.setattr(ring, "MAX_MESSAGE", 299_999)
        with pytest.raises(ValueError, match="a message of 300000 bytes; a ring's limit is 299999"):
            writer.send(bytes(300_000))
        with pytest.raises(RingError, match="beyond 299999"):
            RingReader(fds, 0).recv()
        writer.close()


def test_descriptors_that_hold_no_such_ring_are_refused() -> None:
    with a_ring(2, 64) as fds:
        with pytest.raises(ValueError, match="holds no ring of 4 readers"):
            RingWriter(RingFds(fds.memory, fds.readers * 2, fds.space))
        with pytest.raises(ValueError, match="holds no ring"):
            RingReader(RingFds(fds.readers[0], fds.readers, fds.space), 0)


def test_ends_that_were_closed_hold_no_descriptors() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with a_ring(3) as fds:
        for end in (RingWriter(fds), *(RingReader(fds, index) for index in range(3))):
            end.close()
        assert not any(os.get_inheritable(fd) for fd in (fds.memory, *fds.readers, fds.space))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
