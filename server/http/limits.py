"""Limits on request bodies, checked before and while they are read, and before they are parsed.

With `Body`, they bound the cost of a body by its length (tests/server/http/test_budget.py).
"""

import asyncio

from starlette.types import Receive, Scope

from runtime.errors import DeadlineExceeded, InvalidRequest
from runtime.json_text import check_shape, mend_surrogates
from server.errors import BodyTooLarge, UnsupportedMediaType
from server.json_requests import pause

JSON = b"application/json"
# The most bytes of a body.
MOST_BYTES = 8 << 20


class BodyLimit:
    """Refuses bodies that are too large (413), too slow (408), not JSON (415), too deep or of unclear length (400).

    Args:
        patience_s: seconds for a body to arrive.
    """

    def __init__(self, patience_s: float):
        self.patience_s = patience_s

    def check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Check the length that the headers announce. Raises BodyTooLarge or InvalidRequest."""
        if b"transfer-encoding" in headers and b"content-length" in headers:
            # A proxy that trusts the other header would find the next request at another place.
            raise InvalidRequest("Content-Length and Transfer-Encoding exclude each other")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and (len(length) > 18 or int(length) > MOST_BYTES):
            raise _too_large()

    async def read(self, receive: Receive) -> bytes | None:
        """The body; None if the client has disconnected. Raises BodyTooLarge or DeadlineExceeded."""
        chunks, size = [], 0
        try:
            async with asyncio.timeout(self.patience_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > MOST_BYTES:
                        raise _too_large()
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise DeadlineExceeded("the body did not arrive in time") from None
        return b"".join(chunks)

    async def checked(self, body: bytes, headers: dict[bytes, bytes]) -> bytes:
        """The body without lone surrogates, if it may be parsed. Raises UnsupportedMediaType or InvalidRequest."""
        kind = headers.get(b"content-type", JSON).split(b";")[0].strip().lower()
        if body and kind != JSON and not kind.endswith(b"+json"):
            raise UnsupportedMediaType("the body must be JSON: send the header Content-Type: application/json")
        if body and headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise UnsupportedMediaType("the body must not be compressed")
        _check(body)
        await pause(body)
        return mend_surrogates(body)


def check_body(body: bytes) -> bytes:
    """Check the size and the shape of a body, or of JSON in its place; see `BodyLimit.checked`.

    Raises:
        BodyTooLarge, InvalidRequest: if it may not be parsed.
    """
    _check(body)
    return mend_surrogates(body)


def _check(body: bytes) -> None:
    if len(body) > MOST_BYTES:
        raise _too_large()
    try:
        check_shape(body)
    except ValueError as error:
        raise InvalidRequest(f"the body has {error}") from None


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {MOST_BYTES} bytes")
