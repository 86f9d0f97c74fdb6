"""Threads: conversations that the server keeps, so that a client sends its new messages alone.

A thread is kept under the id of its last answer. Its KV is in the tree, which finds it by content. A client whose
thread is gone gets an error by which it knows that it must send all messages again.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from runtime.errors import InvalidRequest
from server.anthropic.content import Piece, joined
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


def continued(body: P, threads: ResponseStore, account: str) -> P:
    """The request with all messages of its thread, and with its system prompt and tools. Raises NotFound."""
    if body.previous is None:
        return body
    try:
        stored = threads.get(account, body.previous, "thread")
    except NotFound as error:
        raise NotFound(error.message, param="thread.previous_message_id", code=error.code) from None
    thread = _Thread.model_validate_json(stored.body)
    given = {name: getattr(body, name) or getattr(thread, name) for name in ("system", "tools")}
    return body.model_copy(update={"messages": [*thread.messages, *body.messages], **given})


def keep(body: MessagesPrompt, answer: AnthropicMessage, name: str, threads: ResponseStore, account: str) -> None:
    """Keep the conversation of an answered request under the answer's id `name`.

    A conversation that no body may hold is not kept: else small bodies would cost the time of all that they continue.
    """
    thread = _Thread.model_construct(messages=[*body.messages, answer], system=body.system, tools=body.tools)
    plain = thread.model_dump_json(
        by_alias=True, exclude={"messages": {"__all__": {"content": {"__all__": {"cache_control"}}}}}
    )
    with suppress(BodyTooLarge, InvalidRequest):
        threads.add(account, name, StoredResponse(check_body(plain.encode()), b"", {}))


def answer_of(pieces: Sequence[Piece]) -> AnthropicMessage:
    """The message of an answer, as a client sends it back."""
    blocks = [piece.block() for piece in joined(pieces)]
    return AnthropicMessage.model_validate({"role": "assistant", "content": blocks})
