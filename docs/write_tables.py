"""Write the pages of this folder that are tables of what the code declares: `make docs`."""

from __future__ import annotations

from pathlib import Path

from servelite.config import flag_table
from servelite.frontend.endpoints import ENDPOINTS
from servelite.frontend.fields import field_table
from servelite.ipc import states

SETTINGS = """# Settings

Every setting of `servelite serve`. `LLM(...)` takes the same names with underscores. A flag's other
spelling is the environment variable `SERVELITE_` and its name in capitals (`SERVELITE_MAX_NUM_SEQS=32`);
a flag given wins over its variable. Written by `make docs`: edit `servelite/config.py`, not this page.

"""

REQUEST_STATES = """# The life of a request

*Waiting*: in the queue, without row or blocks. *Parked*: waits for something else than a row: choices
2 to `n` for the first one's prompt, any for its grammar to be compiled. *Running*: has a row and blocks.
*Preempted*: lost them to others, and
waits again. *Finishing*: over for its client, row and blocks still held by steps in flight. *Lost*: its
engine died.

Every state against every event, made from `servelite/ipc/states.py` (`make docs`) and run cell by cell by
`tests/engine/test_request_states.py`. An empty cell: the event changes nothing.

"""

API = """# The HTTP API

OpenAI's API, and vLLM's names where OpenAI has none; Anthropic's Messages. Written by `make docs`: edit
`servelite/frontend/protocol.py`, `servelite/frontend/sampling.py`, `servelite/frontend/responses/fields.py`,
`servelite/frontend/anthropic/fields.py`, or the text in `docs/write_tables.py`, not this page.

| route | what it does |
| --- | --- |
| `POST /v1/chat/completions` | answers a conversation; whole or, with `stream`, as server-sent events |
| `POST /v1/completions` | continues each prompt; choices come prompt by prompt, `n` of each |
| `POST /v1/embeddings` | a vector for each text ([below](#embeddings)) |
| `POST /v1/responses` | OpenAI's Responses API ([below](#the-responses-api)) |
| `POST /v1/messages` | Anthropic's Messages API ([below](#the-messages-api)) |
| `POST /v1/messages/count_tokens` | how many tokens the prompt of such a request has |
| `POST /v1/chat/completions/render` | a dry run: a chat's prompt as the template writes it, its token IDs |
| `GET /v1/models`, `GET /v1/models/{id}` | the names the model goes by, and its context's length |
| `POST /tokenize`, `POST /detokenize` | a prompt or a chat as token IDs, token IDs as text |
| `GET /health/live` | the process runs |
| `GET /health/ready`, `GET /health` | a token could be produced now; else 503 |
| `GET /metrics` | Prometheus |
| `GET /version` | the version |
| `GET /openapi.json` | all of this for machines: OpenAPI 3.2, made from the same declarations |

With `--api-key`, all but the health routes need `Authorization: Bearer KEY` or `X-Api-Key: KEY`.

Every answer has an `X-Request-Id`: the request's own, if it is at most 128 printable ASCII characters without
a space, else a new one. What a front end logs of a request names it.

A stream's chunks: for a chat one with the role for each choice, then text as it comes, a chunk with the
finish reason for each choice, with `stream_options.include_usage` one with the token counts and no
choices, then `[DONE]`. A stream that fails ends with a chunk that holds `error`, without `[DONE]`.
`stop_reason` beside `finish_reason` is the string of `stop` or the token of `stop_token_ids` that ended the
choice, else null.

## A chat's messages

The roles are `system`, `developer` (for the template `system`, unless it knows the newer name), `user`,
`assistant`, `tool`, and `function`, the older name of `tool`. Content is a text, or a list of text parts,
which are joined by line breaks. An assistant's message may have `tool_calls` (their `arguments` as a text or
an object) or the older `function_call`; `reasoning_content` or `reasoning`, which the template gets; and
`refusal`, which is content. What other servers and libraries leave on messages, parts, calls and tools is
accepted without effect: `cache_control`, `prompt_cache_breakpoint`, `provider_specific_fields`,
`extra_content`; on an assistant's message also `annotations`, `parsed`, `reasoning_details`,
`reasoning_items`, `thinking_blocks`. Any other field of a message is refused unless it is empty,
`audio` and `images` even with `--unknown-fields warn`.

## Embeddings

Any served model makes vectors; an encoder ([models](models.md#encoders)) makes nothing else. A vector is the
hidden state after the last norm: of the last token for a decoder, the mean over all tokens for an encoder,
or what the folder's `modules.json` and `1_Pooling` of sentence-transformers say; `--pooling` overrides both.
Its length is 1, unless the folder has a `modules.json` that does not normalise. `dimensions` takes the first
numbers of any model's vectors, and makes their length 1 again: only models that were trained for it keep
their quality. Nothing is cut unasked: a text of more tokens than the model takes is a 400. When
`truncate_prompt_tokens` cuts a text, the tokens that the model has before and after every text stay; where
they leave no room for one of the text's own, it is a 400.

The texts of a request run together, at most twice `--max-num-seqs` of them at a time, and come back in order,
by `index`. They wait, run, are aborted, and go on after an engine's death like other requests; the
deadline is that of the first one. The mean of a decoder takes no part of a prompt from the prefix cache.

## The Responses API

`/v1/responses` is a chat in other words: the same prompt, tokens and limits. Nothing is stored, so the whole
conversation comes with each request: `previous_response_id`, `conversation` and `background: true` are
refused, `store` is accepted and answered with `"store": false`. Input items are messages (text only; `phase`
is accepted), `function_call`, `custom_tool_call`, their outputs and `reasoning`; an assistant's reasoning,
text and calls up to their outputs are one message of the chat. What OpenAI's SDK adds to an answer's items
(`parsed`, `parsed_arguments`) may stay in them. A client that sends earlier items by their IDs unless told
otherwise has to be told, some for a call of one tool already: Vercel's AI SDK by
`providerOptions: { openai: { store: false } }`, semantic-kernel's OpenAIResponsesAgent by
`store_enabled=False`.

Tools are functions, custom tools, and namespaces of both. The model sees a custom tool as a function whose
only argument, `input`, is a text; a `grammar` for it is refused. It sees a namespace's tools as
`NAMESPACE__NAME`, the namespace's description before that of its first tool; a call has both names apart.
With `allowed_tools` it sees those only. `tool_choice` may give a tool's `namespace`, and has to where several
have its name and the tools outside of them do not. Hosted tools (`web_search`, `local_shell`, `tool_search`,
`mcp`, ...) are a 400; under `--unknown-fields warn` they are left out, and a custom tool's grammar is told to
the model, which is not held to it. With `truncation: "auto"` as with `disabled`, input that does not fit is
a 400. `text.verbosity` is a variable for the chat template, as `reasoning.effort` is; of the reasoning, which
comes as it is, no summary is written.

Codex works as it comes, but for its web search and its images; its own prompt has about 9,000 tokens. In
its config.toml:

```toml
model = "demo"
model_provider = "servelite"
model_context_window = 32768 # the server's
web_search = "disabled"

[features]
view_image = false

[model_providers.servelite]
name = "servelite"
base_url = "http://127.0.0.1:8000/v1"
wire_api = "responses"
```

The output's items are `reasoning` (as plain text, in `content`), `message`, `function_call` and
`custom_tool_call`; there is at least one, if only an empty message. `status` is `incomplete` where
`max_output_tokens` or the context ended the answer; that of a call where its arguments are no JSON object:
then they stand there as they came. A stream's events, numbered by `sequence_number`:

1. `response.created`, `response.in_progress`;
2. for each item `response.output_item.added`; for text `response.content_part.added`, then
   `response.output_text.delta` (`response.reasoning_text.delta`) for each piece, `.done` and
   `response.content_part.done`; for a call `response.function_call_arguments.delta` and `.done` or
   `response.custom_tool_call_input.delta` and `.done`; then `response.output_item.done`;
3. `response.completed`, `response.incomplete` or `response.failed`, with the whole object.

## The Messages API

`/v1/messages` is a chat as well. Messages have text, `tool_use`, `tool_result` and `thinking` blocks; a
`document` that is text, a `search_result` and a `tool_reference` become text; images, other documents,
citations and the blocks of Anthropic's own tools are refused. Turns of one role that follow each other
are one; a last message of the assistant is continued, but not together with an output format. Messages
of the system join the system prompt, since few templates have a place for them; those to be cleared at
the next message of the user do so until then. The result of a tool that has `is_error` begins with
`Error: `.

Tools are the client's own, at most 1,024; those that Anthropic defines or runs (`web_search_20250305`,
`bash_20250124`, ...) are a 400, and under `--unknown-fields warn` left out. Every tool is in the prompt
from the start, `defer_loading` or not. `context_management` may ask to clear thinking or tool uses,
which saves tokens and is not done; to compact is refused. `thinking` sets the chat template's
`enable_thinking`; what the model thinks comes in `thinking` blocks, without a signature, and with
`display: "omitted"` without their text.

`usage.input_tokens` are those that were not in the prefix cache, `cache_read_input_tokens` those that
were. A call whose arguments are no JSON object, or cut off, has the `input` `{"INVALID_JSON": "..."}`
with their text; in a stream they come as they are. `stop_reason` is `max_tokens` for an answer that was
cut off, else `tool_use` where there is a call. A stream has Anthropic's events, with a `ping` in a
silence. Errors below this path have Anthropic's body: `type` `error`, in `error` its `type` and
`message`, and the `request_id`, which is also in the header `Request-Id`. A prompt that is too long for
the context is told in the words in which Anthropic's API does.

Claude Code works as it comes, but for its web search and its images; its own prompt has about 20,000 tokens.
`--served-model-name` may be the names that it asks for; or it is told the server's:

```sh
export ANTHROPIC_BASE_URL=http://127.0.0.1:8000
export ANTHROPIC_AUTH_TOKEN=KEY # of --api-key, or any word
export ANTHROPIC_MODEL=demo ANTHROPIC_DEFAULT_HAIKU_MODEL=demo
export CLAUDE_CODE_MAX_OUTPUT_TOKENS=8192 # for a short context, in which it would ask again for less
claude
```

The line about billing that begins its system prompt is left out of the model's: it is another one in each
request, and would keep every prompt out of the prefix cache.

Where one of these two APIs has no name for something, the chat's name works: `top_k`, `min_p`, `seed`,
`chat_template_kwargs`, ...

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
side (a half-closed connection) is taken for gone, and its request is aborted. Of requests sent without
waiting for answers, 16 may stand behind the one that is being answered: with more, the connection ends. A
request to go on in another protocol (an Upgrade header) is served as if it did not ask for that. To a client
of HTTP/1.0 a stream comes in chunks as well.

A field that is null is absent, at any depth. Any field that is not in its route's table, or that an object
inside does not have, is refused; with `--unknown-fields warn` it is ignored, and named in the log once.

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
