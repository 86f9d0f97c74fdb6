"""Items as the turns of a chat."""

from itertools import product

import pytest
from pydantic import TypeAdapter

from server.errors import NotFound
from server.responses.items import page_of, turns_of
from server.responses.types import Item

ITEM: TypeAdapter = TypeAdapter(Item)


def test_reasoning_belongs_to_the_next_message_of_the_assistant_alone():
    def thought(text: str) -> dict:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    asked, said = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [asked, thought("1"), thought("2"), said, asked, said, asked, thought("3"), call]
    turns = turns_of([ITEM.validate_python(item) for item in items])
    assert [(turn.role, turn.reasoning_content) for turn in turns] == [
        ("user", None),
        ("assistant", "1\n2"),
        ("user", None),
        ("assistant", None),
        ("user", None),
        ("assistant", "3"),
    ]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_one_behind_the_other_are_all_items(order):
    """Of any number and any length: no page but that of no items is empty, and each is described by its ends."""
    for count, limit in product(range(6), range(1, 7)):
        items = [{"id": f"{i}"} for i in range(count)]
        found, after, more = [], None, True
        while more:
            page = page_of(items, order, after, limit)
            ids, more = [item["id"] for item in page["data"]], page["has_more"]
            assert len(ids) == limit if more else len(ids) == (count % limit or limit if count else 0)
            ends = (ids[0], ids[-1]) if ids else (None, None)
            assert page == {"object": "list", "data": page["data"], "has_more": more} | dict(
                zip(("first_id", "last_id"), ends, strict=True)
            )
            found, after = found + page["data"], page["last_id"]
        assert found == (items if order == "asc" else items[::-1])
    with pytest.raises(NotFound, match="no item 'x'"):
        page_of(items, order, "x", 1)
