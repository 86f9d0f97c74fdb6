"""Computes the block hashes of a request's prompt by running the server's routes without an engine."""

import asyncio
from array import array
from functools import partial

from starlette.types import ASGIApp, Message, Scope

from radix.hashes import block_hashes
from radix.node import TOKEN_BYTES
from runtime.config import Config
from runtime.errors import RametError
from runtime.frontend.async_engine import AsyncEngine
from runtime.frontend.deadline import NO_DEADLINE, Deadline
from runtime.frontend.input_processor import InputProcessor
from runtime.frontend.output import MarkedText, Submission
from runtime.frontend.processor import Frontend
from runtime.frontend.stream import OutputStream
from runtime.protocol import ModelInfo
from server.app import create_app
from server.auth.keys import read_keys

# Routes whose prompts are looked up in the tree. Other requests go to any replica.
PATHS = frozenset(("/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"))


class _Found(BaseException):
    """Carries the hashes out of the routes. A BaseException, because error handlers catch every `Exception`."""

    def __init__(self, hashes: bytes):
        self.hashes = hashes


class _NoEngine(AsyncEngine):
    """An engine that tokenizes like the server's, but computes nothing."""

    def __init__(self, config: Config, info: ModelInfo):
        super().__init__(config)
        self.info = info

    async def start(self) -> None:
        await self._load()
        self._frontend = Frontend(InputProcessor(self.info, self.tokenizer, self.config.scheduler), lambda _: None)

    async def open(self, submissions: list[Submission], deadline: Deadline = NO_DEADLINE) -> OutputStream:
        """Raise `_Found` with the first prompt's hashes."""
        first = submissions[0]
        tokens = await self._work.run(first.account, partial(self._running().inputs.encode, first))
        key = array("i", tokens).tobytes() if isinstance(first.prompt, str | MarkedText | list) else b""
        found = block_hashes(key, self.info.page_size * TOKEN_BYTES, None, first.namespace)
        raise _Found(array("Q", found).tobytes())


class PromptHasher:
    """Runs requests through the server's application up to the engine.

    Args:
        config: the replicas' configuration, for the same keys and chat template.
        info: the replicas' model.
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
        """The uint64 hashes of the prompt's whole blocks; empty for refused requests and for documents or modules."""
        pending = [body]

        async def receive() -> Message:
            if not pending:
                await asyncio.Event().wait()  # forever: this client does not disconnect
            return {"type": "http.request", "body": pending.pop(), "more_body": False}

        async def send(message: Message) -> None:
            """Drop the error response. The replica will refuse the request again."""

        if scope["method"] != "POST" or scope["path"] not in PATHS or self._app is None:
            return b""
        try:
            await self._app({**scope, "state": {}}, receive, send)
        except _Found as found:
            return found.hashes
        except RametError:
            pass
        return b""
