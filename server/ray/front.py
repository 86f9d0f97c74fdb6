"""The ingress: hashes a request's prompt, calls the replica that the router chooses, and returns its answer."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from runtime.config import make_config
from runtime.errors import EngineDead
from runtime.protocol import ModelInfo
from server.anthropic.messages import MessageStream
from server.app import admit
from server.auth.keys import read_keys
from server.errors import error_response
from server.http.sse import EventStream, TypedEventStream
from server.ray.hasher import PromptHasher

log = logging.getLogger("ramet.ray")

# Most replicas that a request is sent to. The next one is tried if a replica dies before its answer begins.
_TRIES = 4
_FIELDS = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client")
_STREAMS = {"/v1/messages": MessageStream, "/v1/responses": TypedEventStream}


class Front:
    """Serve's ingress deployment.

    Args:
        options: the replicas' options of `ramet serve`.
        replicas: the handle of the deployment of `Replica`.
    """

    def __init__(self, options: dict[str, Any], replicas: DeploymentHandle):
        self._config = make_config(**options)
        self._admit = admit(self._pass_on, self._config, read_keys(self._config.server.api_keys))
        self._replicas = replicas
        self._streaming = replicas.options(stream=True)
        self._hasher = asyncio.get_running_loop().create_task(self._make_hasher())

    async def _make_hasher(self) -> PromptHasher:
        info = msgspec.convert(await self._replicas.info.remote(), ModelInfo)
        hasher = PromptHasher(self._config, info)
        await hasher.start()
        return hasher

    async def check_health(self) -> None:
        """Called by Serve. Raises if the tokenizer could not be loaded."""
        if self._hasher.done():
            self._hasher.result()

    async def __call__(self, request: Request) -> Response:
        """The answer of a replica."""
        return _Passage(self)

    async def pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whose body is read if a replica would read it."""
        await self._admit({name: scope[name] for name in _FIELDS if name in scope}, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an admitted request. If the replica dies during the answer, an error event ends it."""
        body = (await receive())["body"]
        call = {name: scope[name] for name in _FIELDS if name in scope}
        # Shielded: a client that disconnects must not cancel the loading of the tokenizer, which all requests need.
        hasher, tenant = await asyncio.shield(self._hasher), scope["state"]["tenant"]
        hashes = await hasher.hashes(scope["method"], scope["path"], body, tenant)
        for _ in range(_TRIES):
            head: Message | None = None  # sent with the first piece of the body
            is_begun = is_whole = False
            try:
                async for message in self._streaming.forward.remote(call, body, hashes=hashes):
                    if message["type"] == "http.response.start":
                        head = message
                        continue
                    if head is not None and not is_begun:
                        await send(head)
                        is_begun = True
                    await send(message)
                    is_whole = not message.get("more_body", False)
            except RayActorError as error:
                log.warning("a replica died while it answered %s: %s", scope["path"], type(error).__name__)
            if is_whole:  # the answer is complete, even if the replica died right after it
                return
            if head is not None and is_begun:
                await _break_off(head, scope["path"], send)
                return
        await error_response(EngineDead(f"{_TRIES} replicas died"), scope["path"])(scope, receive, send)


class _Passage(Response):
    """A response that passes a replica's ASGI messages to Serve."""

    def __init__(self, front: Front):
        super().__init__()
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._front.pass_on(scope, receive, send)


async def _break_off(head: Message, path: str, send: Send) -> None:
    """End a stream with an error event. Raises EngineDead for other answers, which closes the connection."""
    error = EngineDead("the replica died; this request is lost")
    if not dict(head["headers"]).get(b"content-type", b"").startswith(EventStream.media_type.encode()):
        raise error
    stream = _STREAMS.get(path, EventStream)(_nothing(), lambda: None)
    event = stream.write(stream.describe(error)) + stream.end
    await send({"type": "http.response.body", "body": event, "more_body": False})


async def _nothing() -> AsyncGenerator[dict[str, Any], None]:
    return
    yield {}
