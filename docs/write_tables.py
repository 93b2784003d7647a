"""Write the pages of this folder that are tables of what the code declares: `make docs`."""

from __future__ import annotations

from pathlib import Path

from servelite.config import flag_table
from servelite.frontend.fields import field_table
from servelite.frontend.protocol import CHAT_FIELDS, COMPLETION_FIELDS
from servelite.ipc import states

SETTINGS = """# Settings

Every setting of `servelite serve`. `LLM(...)` takes the same names with underscores. A flag's other
spelling is the environment variable `SERVELITE_` and its name in capitals (`SERVELITE_MAX_NUM_SEQS=32`);
a flag given wins over its variable. Written by `make docs`: edit `servelite/config.py`, not this page.

"""

REQUEST_STATES = """# The life of a request

Every state against every event, made from `servelite/ipc/states.py` (`make docs`) and run cell by cell by
`tests/engine/test_request_states.py`. An empty cell: the event changes nothing.

"""

REQUEST_FIELDS = """# The fields of a request

Any other field is refused with an error that names it. Written by `make docs`: edit
`servelite/frontend/protocol.py` and `servelite/frontend/sampling.py`, not this page.

"""


def pages() -> dict[str, str]:
    """File name to text, of every page that is written by this script."""
    chat = "## `/v1/chat/completions`\n\n" + field_table(CHAT_FIELDS)
    completions = "\n## `/v1/completions`\n\n" + field_table(COMPLETION_FIELDS)
    return {
        "settings.md": SETTINGS + flag_table(),
        "request-states.md": REQUEST_STATES + states.markdown(),
        "request-fields.md": REQUEST_FIELDS + chat + completions,
    }


if __name__ == "__main__":
    for name, text in pages().items():
        Path(__file__).with_name(name).write_text(text)
