"""The engine's ends of its lines: front ends that die and are replaced while nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from servelite.engine.mailbox import ClientGone, SocketMailbox
from servelite.ipc.lifeline import Lifeline, lifeline_pair
from servelite.ipc.messages import CONTRACT_VERSION, FrontEndGone, Hello, Ready
from servelite.ipc.sockets import EngineSocket, connect_engine, encode

READY = Ready(0, 0, CONTRACT_VERSION, 8, 4, 16, 2, 16, 100, "none", "none", "simulated")


def test_the_death_of_a_front_end_is_not_its_successors(tmp_path: Path) -> None:
    """Both deaths are told before the engine reads anything, and the successors have said hello by then."""
    address = f"ipc://{tmp_path}/e"
    sock = EngineSocket(address)
    ours, fd = lifeline_pair()
    mailbox = SocketMailbox(sock, Lifeline.from_fd(fd), READY)
    say_hello = (
        "import sys; from servelite.ipc.sockets import connect_engine, encode;"
        "from servelite.ipc.messages import Hello, CONTRACT_VERSION;"
        "client = int(sys.argv[2]); s = connect_engine(sys.argv[1], client);"
        "s.send(encode(Hello(client, CONTRACT_VERSION)));"
        "s.recv(); print('ready', flush=True); sys.stdin.read()"
    )
    dead = [
        subprocess.Popen(
            [sys.executable, "-c", say_hello, address, str(client)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for client in (0, 1)
    ]
    successors = []
    try:
        _receive_until(mailbox, lambda: sorted(mailbox.clients()) == [0, 1])
        for process in dead:
            process.kill()
            process.wait()
        for client, process in enumerate(dead):
            successors.append(connect_engine(address, client))
            successors[-1].send(encode(Hello(client, CONTRACT_VERSION)))
            ours.send(FrontEndGone(client, process.pid))
        time.sleep(0.2)  # so that all of it waits
        events = _receive_until(mailbox, lambda: all(s.poll(0) for s in successors))
        events += [event for _ in range(4) for event in mailbox.receive(0.05)]
        assert sorted(client for client, event in events if isinstance(event, ClientGone)) == [0, 1]
        assert sorted(mailbox.clients()) == [0, 1]
        ours.send(FrontEndGone(1, os.getpid()))  # this one is the living one's own
        events = _receive_until(mailbox, lambda: mailbox.clients() == [0])
        assert events == [(1, ClientGone())]
    finally:
        for process in dead:
            process.kill()
            process.communicate()
        for successor in successors:
            successor.close(linger=0)
        ours.close()
        sock.close()


def _receive_until(mailbox: SocketMailbox, done: object) -> list:
    assert callable(done)
    events: list = []
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        events += mailbox.receive(0.05)
    return events
