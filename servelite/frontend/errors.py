"""What a client is told when something is wrong: OpenAI's error body, and the few ways to raise it."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from servelite.ipc.messages import RequestError
from servelite.observability.logs import REQUEST_ID

QUEUE_FULL: Final = "queue_full"
ANTHROPIC_PATH: Final = "/v1/messages"  # and what lies below it: the errors there are Anthropic's
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class APIError(Exception):
    """An answer that is an error: HTTP status, OpenAI's error object, extra headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        in_anthropics_words: str | None = None,
    ) -> None:
        """`in_anthropics_words`: the message where clients of that API read its words."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers
        self._in_anthropics_words = in_anthropics_words

    @property
    def type(self) -> str:
        """OpenAI's name for the kind of error."""
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> bytes:
        """The JSON body, and what an error event in an open stream carries."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def anthropic_body(self) -> bytes:
        """The same as Anthropic's API writes it. Its SDKs look at the status, `type` and `error_code`."""
        kind = "api_error" if self.status >= 500 else "invalid_request_error"
        message = self._in_anthropics_words or self.message
        error: dict[str, Any] = {"type": _ANTHROPIC_TYPES.get(self.status, kind), "message": message}
        if self.code is not None:
            error["details"] = {"error_code": self.code}
        return msgspec.json.encode({"type": "error", "error": error, "request_id": REQUEST_ID.get() or None})

    def body_for(self, path: str) -> bytes:
        """The body in the words of the API that the path of the request belongs to."""
        return self.anthropic_body() if is_anthropic(path) else self.body()


def is_anthropic(path: str) -> bool:
    """Whether a route is of Anthropic's API."""
    return path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """A 400 that names the field `param`."""
    return APIError(400, message, param=param, code=code)


def context_too_long(prompt_tokens: int, max_tokens: int, limit: int, param: str) -> APIError:
    """The 400 for a prompt and an answer that do not fit the model's context together."""
    return APIError(
        400,
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, {max_tokens} for the answer).",
        param=param,
        code="context_length_exceeded",
        # Claude Code reads the numbers, and asks again for a shorter answer, or shortens the conversation.
        in_anthropics_words=f"prompt is too long: {prompt_tokens} tokens > {limit} maximum"
        if prompt_tokens >= limit
        else f"input length and `max_tokens` exceed context limit: {prompt_tokens} + {max_tokens} > {limit}, "
        "decrease input length or `max_tokens` and try again",
    )


def text_too_long(size: int, limit: int, max_model_len: int, param: str) -> APIError:
    """The 400 for a text that exceeds the context however few tokens it has."""
    text = (
        f"This model's maximum context length is {max_model_len} tokens, at most {limit} bytes of text. "
        f"However, {param} has {size} bytes (how many tokens that is was not looked at)."
    )
    return APIError(
        400,
        text,
        param=param,
        code="context_length_exceeded",
        in_anthropics_words=f"prompt is too long. {text}",
    )


def shutting_down() -> APIError:
    """The 503 of a server that drains; the connection ends, so that the next one finds another server."""
    return APIError(
        503,
        "The server is shutting down.",
        code="server_shutting_down",
        headers=(("connection", "close"),),
    )


def body_timeout(seconds: float) -> APIError:
    """The 408 for a body that does not come."""
    return APIError(
        408,
        f"The request body did not arrive within {seconds:g} s.",
        code="request_timeout",
        headers=(("connection", "close"),),
    )


def not_ready() -> APIError:
    """The 503 of a server whose engine is not there yet."""
    return APIError(
        503, "The model is still loading.", code="engine_not_ready", headers=(("retry-after", "1"),)
    )


def recovering() -> APIError:
    """The 503 of a server whose engine has died and is being started again."""
    return APIError(
        503, "The engine is being restarted.", code="engine_not_ready", headers=(("retry-after", "1"),)
    )


def quarantined(cause: str) -> APIError:
    """The 500 for the request under which the engine died twice, the second time with nobody beside it."""
    return APIError(
        500,
        f"The engine died twice while it worked on this request, the second time on it alone: {cause}",
        code="engine_killed_by_request",
    )


def engine_dead(cause: str) -> APIError:
    """The 503 of a server whose engine has died."""
    return APIError(503, f"The engine has died: {cause}", code="engine_dead")


def deadline_exceeded(deadline_ms: int) -> APIError:
    """The 503 for a request whose time was over before it began to run."""
    return APIError(503, f"The request did not begin within its {deadline_ms} ms.", code="deadline_exceeded")


def unauthorized() -> APIError:
    """The 401 for a missing or wrong API key."""
    return APIError(
        401,
        "Incorrect API key provided; send it as `Authorization: Bearer KEY`.",
        code="invalid_api_key",
        headers=(("www-authenticate", "Bearer"),),
    )


def from_engine(error: RequestError, retry_after: int) -> APIError:
    """The engine's refusal, as the client sees it; `retry_after` (seconds) is told if its queue is full."""
    headers = (("retry-after", str(retry_after)),) if error.code == QUEUE_FULL else ()
    return APIError(error.status, error.message, code=error.code, headers=headers)
