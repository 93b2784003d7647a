"""Write the pages of this folder that are tables of what the code declares: `make docs`."""

from __future__ import annotations

from pathlib import Path

from servelite.config import flag_table
from servelite.frontend.fields import field_table
from servelite.frontend.protocol import ENDPOINTS
from servelite.ipc import states

SETTINGS = """# Settings

Every setting of `servelite serve`. `LLM(...)` takes the same names with underscores. A flag's other
spelling is the environment variable `SERVELITE_` and its name in capitals (`SERVELITE_MAX_NUM_SEQS=32`);
a flag given wins over its variable. Written by `make docs`: edit `servelite/config.py`, not this page.

"""

REQUEST_STATES = """# The life of a request

*Waiting*: in the queue, without row or blocks. *Parked*: waits for something else than a row, as choices
2 to `n` do for the first one's prompt. *Running*: has a row and blocks. *Preempted*: lost them to others, and
waits again. *Finishing*: over for its client, row and blocks still held by steps in flight. *Lost*: its
engine died.

Every state against every event, made from `servelite/ipc/states.py` (`make docs`) and run cell by cell by
`tests/engine/test_request_states.py`. An empty cell: the event changes nothing.

"""

API = """# The HTTP API

OpenAI's API, and vLLM's names where OpenAI has none. Written by `make docs`: edit
`servelite/frontend/protocol.py` and `servelite/frontend/sampling.py`, or the text in `docs/write_tables.py`,
not this page.

| route | what it does |
| --- | --- |
| `POST /v1/chat/completions` | answers a conversation; whole or, with `stream`, as server-sent events |
| `POST /v1/completions` | continues each prompt; choices come prompt by prompt, `n` of each |
| `GET /v1/models`, `GET /v1/models/{id}` | the names the model goes by, and its context's length |
| `POST /tokenize`, `POST /detokenize` | a prompt or a chat as token IDs, token IDs as text |
| `GET /health/live` | the process runs |
| `GET /health/ready`, `GET /health` | a token could be produced now; else 503 |
| `GET /metrics` | Prometheus |
| `GET /version` | the version |

With `--api-key`, all but the health routes need `Authorization: Bearer KEY`.

A stream's chunks: for a chat one with the role for each choice, then text as it comes, a chunk with the
finish reason for each choice, with `stream_options.include_usage` one with the token counts and no
choices, then `[DONE]`. A stream that fails ends with a chunk that holds `error`, without `[DONE]`.

## Errors

Every error has OpenAI's body: `error` with `message`, `type`, `param` (the field) and `code`.

| status | code | when |
| --- | --- | --- |
| 400 | none | a value of the wrong type or out of its bounds; `param` names the field |
| 400 | `invalid_json` | malformed, not UTF-8, or nested too deeply |
| 400 | `unknown_field` | a field that is not declared below (`--unknown-fields warn` passes over it) |
| 400 | `missing_field` | a required field is not there |
| 400 | `unsupported_value` | a field or value of OpenAI's that is not supported |
| 400 | `context_length_exceeded` | prompt and answer do not fit the model's context, or the whole cache |
| 400 | `too_many_prompt_tokens` | a list of prompts with more tokens than may ever wait at once |
| 400 | `invalid_http` | the bytes are no HTTP request |
| 400 | `too_many_answers` | prompts times `n` are more than the server ever takes at once |
| 401 | `invalid_api_key` | no key, or a wrong one |
| 404 | `model_not_found` | the server does not go by that name |
| 408 | `request_timeout` | the body did not arrive in time |
| 413 | `body_too_large` | the body is larger than `--max-body-bytes` |
| 415 | `unsupported_media_type` | a body that is no plain JSON in UTF-8, by its headers |
| 431 | `headers_too_large` | request line and headers are larger than 64 KiB |
| 500 | `engine_error`, `step_failed` | the engine gave the request up |
| 500 | `non_finite_logits` | the model's output for this request was not finite |
| 500 | `engine_killed_by_request` | the engine died twice under this request ([faults](faults.md)) |
| 503 | `queue_full` | as many requests as may run and wait are there; `Retry-After` says when to come back |
| 503 | `deadline_exceeded` | the request had not begun to run by its `deadline_ms` |
| 503 | `engine_not_ready` | the model is loading, or its engine is being restarted |
| 503 | `engine_dead` | the engine has died for good |
| 503 | `server_shutting_down` | the server drains |

A client keeps its side of the connection open until it has the answer: one that only closes its sending
side (a half-closed connection) is taken for gone, and its request is aborted.

A field that is null is absent. Any field that is not in its route's table is refused.

"""


def pages() -> dict[str, str]:
    """File name to text, of every page that is written by this script."""
    tables = [f"## `{path}`\n\n{field_table(fields)}" for path, fields in ENDPOINTS.items()]
    return {
        "settings.md": SETTINGS + flag_table(),
        "request-states.md": REQUEST_STATES + states.markdown(),
        "api.md": API + "\n".join(tables),
    }


if __name__ == "__main__":
    for name, text in pages().items():
        Path(__file__).with_name(name).write_text(text)
