"""Block hashes of a request's prompt, from the server's own routes without an engine."""

import asyncio
from array import array
from functools import partial

from starlette.types import ASGIApp, Message, Scope

from radix.hashes import block_hashes
from radix.node import TOKEN_BYTES
from runtime.config import Config
from runtime.errors import RametError
from runtime.frontend.async_engine import AsyncEngine
from runtime.frontend.input_processor import InputProcessor
from runtime.frontend.output import MarkedText, Submission
from runtime.frontend.processor import Frontend
from runtime.frontend.stream import OutputStream
from runtime.protocol import ModelInfo
from server.app import create_app
from server.auth.keys import read_keys

# Routes whose prompts are read from the tree; requests to other routes go to any replica.
PATHS = frozenset(("/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"))


class _Found(BaseException):
    """Carries a prompt's hashes out of the routes; error handlers catch `Exception` only."""

    def __init__(self, hashes: bytes):
        self.hashes = hashes


class _NoEngine(AsyncEngine):
    """Tokenizes as the server does, and does not compute."""

    def __init__(self, config: Config, info: ModelInfo):
        super().__init__(config)
        self.info = info

    async def start(self) -> None:
        await self._load()
        self._frontend = Frontend(InputProcessor(self.info, self.tokenizer, self.config.scheduler), lambda _: None)

    async def open(self, submissions: list[Submission], timeout_s: float | None = None) -> OutputStream:
        """Raise `_Found` for the first prompt."""
        first = submissions[0]
        tokens = await self._work.run(first.account, partial(self._running().inputs.encode, first))
        key = array("i", tokens).tobytes() if isinstance(first.prompt, str | MarkedText | list) else b""
        found = block_hashes(key, self.info.page_size * TOKEN_BYTES, None, first.namespace)
        raise _Found(array("Q", found).tobytes())


class PromptHasher:
    """Runs requests up to the point where an engine would take them.

    Args:
        config: of the replicas, so that keys and templates are theirs.
        info: their model.
    """

    def __init__(self, config: Config, info: ModelInfo):
        self._config = config
        self._engine = _NoEngine(config, info)
        self._app: ASGIApp | None = None

    async def start(self) -> None:
        """Load the tokenizer. Raises ModelError."""
        await self._engine.start()
        self._app = create_app(self._engine, self._config, read_keys(self._config.server.api_keys))

    async def hashes(self, scope: Scope, body: bytes) -> bytes:
        """uint64 hashes of the prompt's whole blocks; none if the request is refused or reads documents or modules."""
        pending = [body]

        async def receive() -> Message:
            if not pending:
                await asyncio.Event().wait()  # this client never disconnects
            return {"type": "http.request", "body": pending.pop(), "more_body": False}

        async def send(message: Message) -> None:
            """Drop the refusal, which the replica will repeat."""

        if scope["method"] != "POST" or scope["path"] not in PATHS or self._app is None:
            return b""
        try:
            await self._app({**scope, "state": {}}, receive, send)
        except _Found as found:
            return found.hashes
        except RametError:
            pass
        return b""
