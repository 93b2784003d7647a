"""`python -m servelite.frontend --lifeline FD`: started by the launcher only."""

from __future__ import annotations

import argparse
import signal
import sys
import traceback

from servelite.ipc.lifeline import Lifeline, clip
from servelite.ipc.messages import Boot, ChildFailed
from servelite.ipc.process import ExitCode, die_with_parent, set_title
from servelite.tokenizer.chat_template import InvalidTemplate
from servelite.tokenizer.model_files import ModelFileError


def main() -> int:
    """Run a front end; its own account of a failure goes to the launcher."""
    # The launcher decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="servelite.frontend")
    parser.add_argument("--lifeline", type=int, required=True)
    lifeline = Lifeline.from_fd(parser.parse_args().lifeline)
    die_with_parent()
    # The launcher may have died before this process could ask to die with it, its boot message sent.
    if lifeline.other_end_gone or not isinstance(boot := lifeline.recv(), Boot):
        return ExitCode.OK
    set_title(f"servelite: front end {boot.index}")
    try:
        from servelite.frontend.process import serve

        serve(lifeline, boot)
    except Exception as error:
        unusable = isinstance(error, (ModelFileError, InvalidTemplate))
        code = ExitCode.MODEL if unusable else ExitCode.INTERNAL
        lifeline.send(
            ChildFailed(
                kind=type(error).__name__,
                message=clip(str(error)),
                exit_code=code,
                traceback=clip(traceback.format_exc()),
            )
        )
        return code
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
