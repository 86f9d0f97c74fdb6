"""The writer of responses alone: what a client sees of an answer that does not reach its end."""

from types import SimpleNamespace

import pytest

from runtime.errors import DeadlineExceeded
from runtime.frontend.output import Output
from runtime.protocol import Finish
from server.openai.types import ChatRequest
from server.responses.types import ResponseRequest
from server.responses.writer import ResponseWriter


@pytest.fixture
def begun(tokenizer) -> ResponseWriter:
    """A response of which a part was written."""
    context = SimpleNamespace(engine=SimpleNamespace(tokenizer=tokenizer), check_model=str)
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    writer = ResponseWriter(ResponseRequest(model="m", input="x"), ChatRequest(**asked), "resp_1", context)
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
