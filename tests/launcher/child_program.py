"""A child for the tests: does what its boot message's settings say."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

from servelite.ipc.lifeline import Lifeline
from servelite.ipc.messages import Boot, ChildFailed, ChildReady, Stop


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lifeline", type=int, required=True)
    lifeline = Lifeline.from_fd(parser.parse_args().lifeline)
    boot = lifeline.recv()
    assert isinstance(boot, Boot)
    match boot.settings["do"]:
        case "fail":
            lifeline.send(ChildFailed("SomeError", "it broke", hint="mend it", exit_code=3))
            return 3
        case "exit":
            return 7
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "path":
            os.fstat(int(str(boot.settings["fd"])))  # raises unless it was inherited
            own_group = os.getpgid(0) == os.getpid()
            lifeline.send(ChildReady((("own group", float(own_group)), ("folder", float("" in sys.path)))))
        case "load":
            time.sleep(60)  # deaf to Stop, as imports are
        case "serve":
            lifeline.send(ChildReady())
            while not isinstance(lifeline.recv(), Stop | None):
                pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
