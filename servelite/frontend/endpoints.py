"""Every route that takes a body, and its fields: for the docs, and for tests of each field."""

from __future__ import annotations

from typing import Final

from servelite.frontend.anthropic.fields import COUNT_FIELDS, MESSAGES_FIELDS
from servelite.frontend.embeddings import EMBEDDING_FIELDS, EMBEDDINGS_PATH
from servelite.frontend.protocol import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    RENDER_PATH,
    TOKENIZE_FIELDS,
)
from servelite.frontend.responses.fields import RESPONSES_FIELDS

ENDPOINTS: Final = {
    "/v1/chat/completions": CHAT_FIELDS,
    RENDER_PATH: CHAT_FIELDS,
    "/v1/completions": COMPLETION_FIELDS,
    EMBEDDINGS_PATH: EMBEDDING_FIELDS,
    "/v1/responses": RESPONSES_FIELDS,
    "/v1/messages": MESSAGES_FIELDS,
    "/v1/messages/count_tokens": COUNT_FIELDS,
    "/tokenize": TOKENIZE_FIELDS,
    "/detokenize": DETOKENIZE_FIELDS,
}
