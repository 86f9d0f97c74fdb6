"""The writer of responses alone: what a client sees of an answer that does not reach its end."""

from types import SimpleNamespace

import pytest

from runtime.errors import DeadlineExceeded
from runtime.frontend.output import Encoded, Output
from runtime.protocol import Finish
from server.openai.types import ChatRequest
from server.responses.items import chat_of, read_input
from server.responses.types import ResponseRequest
from server.responses.writer import ResponseWriter


@pytest.fixture
def begun(tokenizer) -> ResponseWriter:
    """A response of which a part was written."""
    context = SimpleNamespace(engine=SimpleNamespace(tokenizer=tokenizer), check_model=str)
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    body = ResponseRequest(model="m", input="x", stream=True)
    writer = ResponseWriter(body, ChatRequest(**asked), Encoded("x"), "resp_1", context)
    list(writer.begin())
    writer.write(Output(0, 0, "r", delta="An oak"), None)
    return writer


def test_of_an_answer_that_fails_the_item_is_incomplete(begun):
    event = begun.fail(DeadlineExceeded("too late"))
    assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
    (item,) = event["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "An oak")


@pytest.mark.parametrize(("end", "details"), [("length", "max_output_tokens"), ("abort", None)])
def test_why_an_answer_is_incomplete(begun, end, details):
    *_, item, event = begun.write(Output(0, 0, "r", delta=" tree", finish=Finish(end)), None)
    response = event["response"]
    assert (response["status"], response["incomplete_details"]["reason"]) == ("incomplete", details)
    assert (item["item"]["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")


TOOL = {"type": "function", "name": "find", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
# Fields of the request, the text and how it ends; status and reason of the response, and kinds and statuses of items.
ENDS = [
    ({}, "An oak", "stop", "completed", None, [("message", "completed")]),
    ({}, "", "stop", "completed", None, [("message", "completed")]),
    ({}, "", "length", "incomplete", "max_output_tokens", [("message", "incomplete")]),
    ({}, "", "abort", "incomplete", None, [("message", "incomplete")]),
    ({}, "<think>Hm.", "length", "incomplete", "max_output_tokens", [("reasoning", "incomplete")]),
    ({}, "<think>Hm.</think>", "stop", "completed", None, [("reasoning", "completed")]),
    ({"tools": [TOOL]}, CALL, "stop", "completed", None, [("function_call", "completed")]),
    (
        {"tools": [TOOL]},
        f"So.{CALL}",
        "stop",
        "completed",
        None,
        [("message", "completed"), ("function_call", "completed")],
    ),
    ({"tools": [TOOL]}, CALL, "length", "incomplete", "max_output_tokens", [("function_call", "incomplete")]),
    ({"prompt_cache_options": {"prewarm": True}}, "", "length", "completed", None, []),
]


@pytest.mark.parametrize(("asked", "text", "end", "status", "reason", "items"), ENDS)
def test_ends_of_answers(tokenizer, asked, text, end, status, reason, items):
    context = SimpleNamespace(engine=SimpleNamespace(tokenizer=tokenizer), check_model=str)
    body = ResponseRequest(model="m", input="x", **asked)
    writer = ResponseWriter(body, chat_of(body, read_input("x", {})), Encoded("x"), "resp_1", context)
    *_, last = writer.write(Output(0, 0, "r", delta=text, finish=Finish(end)), None)
    assert (last["type"], last["response"]["status"]) == (f"response.{status}", status)
    assert last["response"]["incomplete_details"] == ({"reason": reason} if status == "incomplete" else None)
    assert [(item["type"], item["status"]) for item in last["response"]["output"]] == items


def test_reasoning_is_an_item_of_its_own(tokenizer):
    context = SimpleNamespace(engine=SimpleNamespace(tokenizer=tokenizer), check_model=str)
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    body = ResponseRequest(model="m", input="x")
    writer = ResponseWriter(body, ChatRequest(**asked), Encoded("x<think>"), "resp_1", context)
    events = [*writer.begin()]
    for part in ("Hm", ".</th", "ink>\n\nAn oak"):
        events += writer.write(Output(0, 0, "r", delta=part), None)
    events += writer.write(Output(0, 0, "r", delta=".", finish=Finish("stop")), None)
    thought, message = writer.response["output"]
    assert (thought["type"], thought["status"], thought["content"]) == (
        "reasoning",
        "completed",
        [{"type": "reasoning_text", "text": "Hm."}],
    )
    assert (message["type"], message["content"][0]["text"]) == ("message", "An oak.")
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["output_index"] for event in events if "output_index" in event] == [0] * 7 + [1] * 7
    assert writer.response["usage"]["output_tokens_details"]["reasoning_tokens"] == len(tokenizer.encode("Hm."))
    ResponseRequest(model="m", input=[*writer.response["output"], {"role": "user", "content": "And?"}])
