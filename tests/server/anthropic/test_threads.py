"""Threads: the request that a turn of one becomes, compared as a whole; over the store, without a model."""

import pytest

from server.anthropic.content import Piece
from server.anthropic.threads import answer_of, continued, keep
from server.anthropic.types import MessagesRequest
from server.errors import NotFound
from server.generation.store import ResponseStore

OLD, NEW = ({"name": name, "input_schema": {"type": "object"}} for name in ("old", "new"))
FIRST = {
    **{"model": "x", "max_tokens": 9, "system": "Old.", "tools": [OLD], "thread": {"type": "create"}},
    "messages": [{"role": "user", "content": [{"type": "text", "text": "A?", "cache_control": {"type": "ephemeral"}}]}],
}
NEXT = {
    **{"model": "y", "max_tokens": 4, "thread": {"type": "continue", "previous_message_id": "msg_1"}},
    "messages": [{"role": "user", "content": "B?"}],
}
WHOLE = [
    {"role": "user", "content": "A?"},  # its breakpoint was for its own turn
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "A."}]},
    {"role": "user", "content": "B?"},
]


@pytest.fixture
def threads() -> ResponseStore:
    store, pieces = ResponseStore(), [Piece("thinking", "H"), Piece("thinking", "m."), Piece("text", "A.")]
    keep(MessagesRequest.model_validate(FIRST), answer_of(pieces), "msg_1", store, "alice")
    return store


@pytest.mark.parametrize("own", [{}, {"system": "New."}, {"tools": [NEW]}, {"system": "New.", "tools": [NEW]}])
def test_a_turn_has_all_messages_and_what_it_does_not_say_anew(threads, own):
    whole = continued(MessagesRequest.model_validate(NEXT | own), threads, "alice")
    same = {"system": "Old.", "tools": [OLD], **NEXT, **own, "messages": WHOLE}
    assert whole.model_dump() == MessagesRequest.model_validate(same).model_dump()


def test_a_thread_is_its_accounts_own(threads):
    body = MessagesRequest.model_validate(NEXT)
    with pytest.raises(NotFound) as error:
        continued(body, threads, "bob")
    assert (error.value.param, error.value.code) == ("thread.previous_message_id", "thread_not_found")
    alone = MessagesRequest.model_validate({**NEXT, "thread": {"type": "create"}})
    assert continued(alone, threads, "alice") is alone
