"""Threads: conversations that the server keeps, so that a client sends its new messages alone.

A thread is kept under the id of its last answer. Its KV is in the tree, which finds it by content. A client whose
thread is gone gets an error by which it knows that it must send all messages again.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from runtime.errors import InvalidRequest
from runtime.frontend.async_engine import AsyncEngine
from runtime.frontend.stream import InTurn
from server.anthropic.content import ContentPiece, joined
from server.anthropic.types import AnthropicMessage, AnyTool, MessagesPrompt, TextBlocks
from server.errors import BodyTooLarge, NotFound
from server.generation.store import ResponseStore, StoredResponse
from server.http.limits import check_body

P = TypeVar("P", bound=MessagesPrompt)


class _Thread(BaseModel):
    """What a thread keeps. Breakpoints of messages are left out: each was for the turn that sent it first."""

    model_config = ConfigDict(hide_input_in_errors=True)

    messages: list[AnthropicMessage]
    system: TextBlocks | None
    tools: list[AnyTool] | None


async def continued(body: P, threads: ResponseStore, account: str, engine: AsyncEngine) -> P:
    """The request with all messages of its thread, and with its system prompt and tools; read in a thread, in turn.

    Raises NotFound, Overloaded and RateLimited.
    """
    if body.previous is None:
        return body
    try:
        stored = threads.get(account, body.previous, "thread")
    except NotFound as error:
        raise NotFound(error.message, param="thread.previous_message_id", code=error.code) from None

    def read() -> P:
        thread = _Thread.model_validate_json(stored.body)
        given = {name: getattr(body, name) or getattr(thread, name) for name in ("system", "tools")}
        return body.model_copy(update={"messages": [*thread.messages, *body.messages], **given})

    return await engine.in_turn(account, len(stored.body), read)


async def keep(
    body: MessagesPrompt,
    pieces: Sequence[ContentPiece],
    name: str,
    threads: ResponseStore,
    account: str,
    in_turn: InTurn,
) -> None:
    """Keep the conversation of an answered request under the answer's id `name`; written by `in_turn`.

    A conversation that no body may hold is not kept: else small bodies would cost the time of all that they continue.
    """

    def work() -> None:
        threads.add(account, name, StoredResponse(check_body(_write(body, answer_of(pieces))), b"", {}))

    with suppress(BodyTooLarge, InvalidRequest):
        await in_turn(work)


def _write(body: MessagesPrompt, answer: AnthropicMessage) -> bytes:
    thread = _Thread.model_construct(messages=[*body.messages, answer], system=body.system, tools=body.tools)
    plain = thread.model_dump_json(
        by_alias=True, exclude={"messages": {"__all__": {"content": {"__all__": {"cache_control"}}}}}
    )
    return plain.encode()


def answer_of(pieces: Sequence[ContentPiece]) -> AnthropicMessage:
    """The message of an answer, as a client sends it back."""
    blocks = [piece.block() for piece in joined(pieces)]
    return AnthropicMessage.model_validate({"role": "assistant", "content": blocks})
