"""Threads: the request that a turn of one becomes, compared as a whole; over the store, without a model."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from server.anthropic.content import ContentPiece
from server.anthropic.threads import continued, keep
from server.anthropic.types import MessagesRequest
from server.errors import NotFound
from server.generation.store import ResponseStore

OLD, NEW = ({"name": name, "input_schema": {"type": "object"}} for name in ("old", "new"))
FIRST = {
    "model": "x",
    "max_tokens": 9,
    "system": "Old.",
    "tools": [OLD],
    "thread": {"type": "create"},
    "messages": [{"role": "user", "content": [{"type": "text", "text": "A?", "cache_control": {"type": "ephemeral"}}]}],
}
NEXT = {
    "model": "y",
    "max_tokens": 4,
    "thread": {"type": "continue", "previous_message_id": "msg_1"},
    "messages": [{"role": "user", "content": "B?"}],
}
WHOLE = [
    {"role": "user", "content": "A?"},  # its breakpoint was for its own turn
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "A."}]},
    {"role": "user", "content": "B?"},
]


async def _at_once(work: Callable[[], Any]) -> Any:
    return work()


ENGINE: Any = SimpleNamespace(in_turn=lambda account, size, work: _at_once(work))


@pytest.fixture
def threads() -> ResponseStore:
    store, pieces = (
        ResponseStore(),
        [ContentPiece("thinking", "H"), ContentPiece("thinking", "m."), ContentPiece("text", "A.")],
    )
    asyncio.run(keep(MessagesRequest.model_validate(FIRST), pieces, "msg_1", store, "alice", _at_once))
    return store


@pytest.mark.parametrize("own", [{}, {"system": "New."}, {"tools": [NEW]}, {"system": "New.", "tools": [NEW]}])
def test_a_turn_has_all_messages_and_what_it_does_not_say_anew(threads, own):
    whole = asyncio.run(continued(MessagesRequest.model_validate(NEXT | own), threads, "alice", ENGINE))
    same = {"system": "Old.", "tools": [OLD], **NEXT, **own, "messages": WHOLE}
    assert whole.model_dump() == MessagesRequest.model_validate(same).model_dump()


def test_a_thread_is_its_accounts_own(threads):
    body = MessagesRequest.model_validate(NEXT)
    with pytest.raises(NotFound) as error:
        asyncio.run(continued(body, threads, "bob", ENGINE))
    assert (error.value.param, error.value.code) == ("thread.previous_message_id", "thread_not_found")
    alone = MessagesRequest.model_validate({**NEXT, "thread": {"type": "create"}})
    assert asyncio.run(continued(alone, threads, "alice", ENGINE)) is alone
