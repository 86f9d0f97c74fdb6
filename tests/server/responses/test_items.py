"""Items as the turns of a chat."""

from pydantic import TypeAdapter

from server.responses.items import turns_of
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
        *[("user", None), ("assistant", "1\n2"), ("user", None), ("assistant", None)],
        *[("user", None), ("assistant", "3")],
    ]
