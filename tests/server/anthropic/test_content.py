"""Blocks of an answer, however its text arrives."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.frontend.output import Output
from runtime.protocol import Finish
from server.anthropic.content import ContentPiece, pieces_of
from server.anthropic.messages import MessageWriter
from server.errors import Conflict
from server.openai.dialects.parameters import Parameters
from server.openai.reader import AnswerParts, AnswerReader, CallReader

CALL = '<tool_call>\n{"name": "plant", "arguments": {"n": 2}}\n</tool_call>'
ANSWERS = {
    "It is an oak.": [("text", "It is an oak.")],
    "<think>Hm.</think>\n\nAn oak.": [("thinking", "Hm."), ("text", "An oak.")],
    "\n<think>\nHm, < or </ think\n</think>An oak.": [("thinking", "Hm, < or </ think\n"), ("text", "An oak.")],
    "<think>\n\n</think>\n\nAn oak.": [("text", "An oak.")],
    "<think> Hm.\n\n  So\n</think>\n\n An oak.\n\n  So\n": [
        ("thinking", "Hm.\n\n  So\n"),
        ("text", " An oak.\n\n  So\n"),
    ],
    "<think>It never ends": [("thinking", "It never ends")],
    "<think>It ends here</thin": [("thinking", "It ends here</thin")],
    "<thin oak>": [("text", "<thin oak>")],
    "<thi": [("text", "<thi")],
    f"<think>Hm.</think>\n\nI plant.\n{CALL}\n{CALL}": [
        ("thinking", "Hm."),
        ("text", "I plant."),
        ("tool_use", {"n": 2}),
        ("tool_use", {"n": 2}),
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
@given(text=st.sampled_from(sorted(ANSWERS)), cuts=st.lists(st.integers(0, 60), max_size=8), stops=st.booleans())
def test_blocks_do_not_depend_on_how_the_text_arrives(text, cuts, stops):
    """`stops`: behind each part there is a token without text, such as the beginning of a character."""
    ends = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[start:stop] for start, stop in pairwise(ends)] or [""]
    if stops:
        parts = [one for part in parts for one in (part, "")]
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
    (piece,) = pieces_of(AnswerParts("", "", [{"function": {"name": "plant", "arguments": begun}}]), cut=True)
    assert piece.block()["input"] == {"arguments": begun}


TEXT, CALLED = ContentPiece("text", "x"), ContentPiece("tool_use", "{}", "toolu_1", "f")
# How a text ended, its blocks, tokens of prompt and answer (of 100 that fit), and what the client is told.
ENDS = [
    (Finish("stop"), [TEXT], 50, ("end_turn", None)),
    (Finish("stop"), [], 100, ("end_turn", None)),
    (Finish("stop", matched=7), [TEXT], 50, ("end_turn", None)),
    (Finish("stop", matched="6"), [TEXT], 50, ("stop_sequence", "6")),
    (Finish("stop"), [TEXT, CALLED], 50, ("tool_use", None)),
    (Finish("stop", matched="6"), [CALLED], 50, ("tool_use", None)),
    (Finish("length"), [TEXT], 99, ("max_tokens", None)),
    (Finish("length"), [TEXT], 100, ("model_context_window_exceeded", None)),
    (Finish("length"), [CALLED], 50, ("max_tokens", None)),
    (Finish("abort"), [TEXT], 50, Conflict),
]


@pytest.mark.parametrize(("finish", "pieces", "tokens", "told"), ENDS)
def test_why_an_answer_ended(finish, pieces, tokens, told):
    output = Output(0, 0, "r", prompt_tokens=40, completion_tokens=tokens - 40, finish=finish)
    writer = SimpleNamespace(_context_length=100)
    if told is Conflict:
        with pytest.raises(Conflict):
            MessageWriter._stop(writer, output, pieces)
    else:
        assert MessageWriter._stop(writer, output, pieces) == dict(
            zip(("stop_reason", "stop_sequence"), told, strict=True)
        )
