"""Routes that speak another API's words over a chat: the body is translated into a chat request, the
chat's answer is made as ever, and written in the other API's words instead of OpenAI's.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from servelite.frontend.body import Receive, Scope, Send
from servelite.frontend.chunks import Translation
from servelite.frontend.errors import APIError
from servelite.frontend.generation import Generation, generating, read_request
from servelite.frontend.protocol import BodyRules
from servelite.frontend.service import Service


class TranslatedChat:
    """A raw ASGI endpoint, one for each request body that `read` can make a chat of."""

    def __init__(
        self,
        service: Service,
        read: Callable[[Any, BodyRules], Translation],
        names: Sequence[tuple[str, str]],
    ) -> None:
        """`read` takes a decoded JSON body and raises `APIError`; `names`: see `renamed`."""
        self._service = service
        self._read = read
        self._names = names
        self._generation = Generation(service, chat=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await generating(self._service, scope, send, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        translation = await read_request(
            service, scope, receive, lambda body: self._read(body, service.rules)
        )
        with renamed(self._names):
            await self._generation.answer(translation.chat, scope, receive, send, translation)


@contextlib.contextmanager
def renamed(names: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Errors raised inside name fields as the other API does: a path that begins with a first name, which
    is a regular expression, begins with the second. What follows may be the client's own.

    Only for errors about a translated chat: those about the client's own body name what it has sent.
    """
    try:
        yield
    except APIError as error:
        for ours, theirs in names if error.param else ():
            param, found = re.subn(rf"^{ours}(?!\w)", theirs, error.param or "")
            if found:
                error.message = error.message.replace(str(error.param), param, 1)
                error.param = param
                break
        raise
