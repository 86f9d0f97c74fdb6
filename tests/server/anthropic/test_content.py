"""Blocks of an answer, however its text arrives."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.anthropic.content import pieces_of
from server.openai.dialects.parameters import Parameters
from server.openai.reader import AnswerReader, CallReader, Said

CALL = '<tool_call>\n{"name": "plant", "arguments": {"n": 2}}\n</tool_call>'
ANSWERS = {
    "It is an oak.": [("text", "It is an oak.")],
    "<think>Hm.</think>\n\nAn oak.": [("thinking", "Hm."), ("text", "An oak.")],
    "\n<think>\nHm, < or </ think\n</think>An oak.": [("thinking", "Hm, < or </ think\n"), ("text", "An oak.")],
    "<think>\n\n</think>\n\nAn oak.": [("text", "An oak.")],
    "<think>It never ends": [("thinking", "It never ends")],
    "<think>It ends here</thin": [("thinking", "It ends here</thin")],
    "<thin oak>": [("text", "<thin oak>")],
    "<thi": [("text", "<thi")],
    f"<think>Hm.</think>\n\nI plant.\n{CALL}\n{CALL}": [
        *(("thinking", "Hm."), ("text", "I plant."), ("tool_use", {"n": 2}), ("tool_use", {"n": 2}))
    ],
    "An oak. <think>No.</think>": [("text", "An oak. <think>No.</think>")],
    " \n": [("text", " \n")],
    "": [],
}


def read(parts: list[str], state="start") -> list:
    """Kinds and contents of the blocks."""
    reader = AnswerReader(CallReader({"plant": Parameters({})}), state)
    said = [reader.push(part, last=i == len(parts) - 1) for i, part in enumerate(parts)]
    pieces = [piece for one in said for piece in pieces_of(one, cut=False)]
    blocks: list = []
    for piece in pieces:
        if piece.type == "tool_use":
            block = piece.block()
            assert block["id"].startswith("toolu_")
            blocks.append((piece.type, block["input"]))
        elif blocks and blocks[-1][0] == piece.type:
            blocks[-1] = (piece.type, blocks[-1][1] + piece.text)
        else:
            blocks.append((piece.type, piece.text))
    return blocks


@settings(max_examples=150, deadline=None)
@given(text=st.sampled_from(sorted(ANSWERS)), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_blocks_do_not_depend_on_how_the_text_arrives(text, cuts):
    ends = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[start:stop] for start, stop in pairwise(ends)] or [""]
    assert read(parts) == ANSWERS[text]


def test_a_prompt_may_have_begun_the_reasoning():
    assert read(["Hm.</th", "ink>\nAn oak."], "thought") == [("thinking", "Hm."), ("text", "An oak.")]
    assert read(["<think>"], "text") == [("text", "<think>")]


@pytest.mark.parametrize(
    ("arguments", "given"),
    [("{}", {}), ("[1]", {"arguments": [1]}), ('"{"', {"arguments": "{"}), ("null", {"arguments": None})],
)
def test_the_input_of_a_call_is_an_object(arguments, given):
    text = f'<tool_call>{{"name": "plant", "arguments": {arguments}}}</tool_call>'
    assert read([text]) == [("tool_use", given)]


@pytest.mark.parametrize("begun", ["{'q': 1", '{"q": NaN', "x"])
def test_the_beginning_of_a_call_that_is_no_json(begun):
    (piece,) = pieces_of(Said("", "", [{"function": {"name": "plant", "arguments": begun}}]), cut=True)
    assert piece.block()["input"] == {"arguments": begun}
