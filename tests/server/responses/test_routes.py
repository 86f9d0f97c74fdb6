"""`/v1/responses` through the real `openai` client, whose types are checked strictly; over a live server."""

import json

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

MODEL = "smollm2"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
GREEDY = {"model": MODEL, "temperature": 0}
EVENTS: TypeAdapter = TypeAdapter(ResponseStreamEvent)


def typed(answer: Response) -> Response:
    """The answer, which fits the client's types: the client itself takes whatever it gets."""
    return Response.model_validate(answer.model_dump(mode="json", exclude_unset=True, by_alias=True))


def stream(api: openai.OpenAI, **asked) -> tuple[list, Response]:
    """The events, each of which fits its type, and the response of the last one."""
    events = list(api.responses.create(**asked, stream=True))
    for event in events:
        EVENTS.validate_python(event.model_dump(mode="json", exclude_unset=True, by_alias=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events, events[-1].response


def test_an_answer_and_its_events(api):
    asked = {**GREEDY, "input": "Name a tree.", "max_output_tokens": 12, "instructions": "Be brief."}
    whole = typed(api.responses.create(**asked, metadata={"a": "b"}))
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.output_text
    assert whole.metadata == {"a": "b"}
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    events, last = stream(api, **asked)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert last.output_text == whole.output_text
    assert last.usage.input_tokens_details.cached_tokens > 0
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert {*kinds[4:-4]} == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert (events[-2].item.status, last.output[0].status, whole.output[0].status) == ("incomplete",) * 3
    events, last = stream(api, **asked, extra_body={"stop": whole.output_text[5:9]})
    assert (events[-2].item.status, last.output[0].status, last.status) == ("completed",) * 3
    assert last.incomplete_details is None


def test_items_are_the_conversation_that_a_chat_has(api):
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Name a tree."}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Which one?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Oak."}], "id": "msg_1"},
        {"role": "user", "content": "Another one."},
    ]
    answer = typed(api.responses.create(**GREEDY, input=items, max_output_tokens=8, instructions="You know trees."))
    turns = [
        {"role": "system", "content": "You know trees."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a tree."},
        {"role": "assistant", "content": "Oak."},
        items[-1],
    ]
    chat = api.chat.completions.create(**GREEDY, messages=turns, max_tokens=8)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    counted = api.responses.input_tokens.count(model=MODEL, input=items, instructions="You know trees.")
    assert counted.input_tokens == answer.usage.input_tokens


def test_a_response_goes_on(api):
    first = api.responses.create(**GREEDY, input="Name a tree.", max_output_tokens=8, instructions="Be brief.")
    asked = {**GREEDY, "input": "Another one.", "previous_response_id": first.id, "max_output_tokens": 4}
    second = typed(api.responses.create(**asked))
    said = [{"role": "user", "content": "Name a tree."}, {"role": "assistant", "content": first.output_text}]
    turns = [*said, {"role": "user", "content": "Another one."}]
    chat = api.chat.completions.create(**GREEDY, messages=turns, max_tokens=4)
    assert second.usage.input_tokens == chat.usage.prompt_tokens, "instructions are of one request alone"
    assert second.output_text == chat.choices[0].message.content
    by_item = [said[0], {"type": "item_reference", "id": first.output[0].id}, turns[-1]]
    third = typed(api.responses.create(**GREEDY, input=by_item, max_output_tokens=4, store=False))
    assert (third.output_text, third.usage.input_tokens) == (second.output_text, second.usage.input_tokens)
    assert api.responses.retrieve(first.id) == first
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(third.id)
    api.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as error:
        api.responses.create(**asked)
    assert error.value.body["param"] == "response"
    assert api.responses.retrieve(second.id).previous_response_id == first.id


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "name": "get_weather"},
               {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}],
    ids=["required", "named", "allowed"],
)  # fmt: skip
def test_a_call_and_its_result(api, choice):
    tools = [WEATHER, {"type": "function", "name": "stop", "parameters": None, "strict": None}]
    if choice == "required":
        tools = [WEATHER]
    asked = {**GREEDY, "input": "The weather in Rome?", "tools": tools, "tool_choice": choice, "max_output_tokens": 60}
    answer = typed(api.responses.create(**asked))
    (call,) = answer.output
    assert (call.type, call.name, answer.status) == ("function_call", "get_weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Rome", "Paris")
    events, last = stream(api, **asked)
    kinds = [event.type.removeprefix("response.") for event in events]
    arguments = [f"function_call_arguments.{word}" for word in ("delta", "done")]
    assert kinds[2:] == ["output_item.added", *arguments, "output_item.done", "completed"]
    assert last.output[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "15 C"}
    after = {**GREEDY, "tools": tools, "max_output_tokens": 4}
    stored = api.responses.create(**after, input=[result], previous_response_id=answer.id)
    sent = [{"role": "user", "content": "The weather in Rome?"}, call.model_dump(exclude_none=True), result]
    assert api.responses.create(**after, input=sent, store=False).output_text == stored.output_text
    assert stored.usage.input_tokens_details.cached_tokens > 0


CUSTOM = {"type": "custom", "name": "run", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}}
SPACE = {
    "type": "namespace", "name": "sky", "description": "About the sky.",
    "tools": [{"type": "function", "name": "look", "parameters": WEATHER["parameters"]}, {**CUSTOM, "name": "say"}],
}  # fmt: skip


def test_custom_tools_and_namespaces(api):
    asked = {**GREEDY, "input": "Go.", "tools": [CUSTOM], "tool_choice": {"type": "custom", "name": "run"}}
    answer = typed(api.responses.create(**asked, max_output_tokens=400))
    (call,) = answer.output
    assert (call.type, call.name, type(call.input), answer.status) == ("custom_tool_call", "run", str, "completed")
    assert answer.tools[0].model_dump(exclude_none=True) == CUSTOM
    events, last = stream(api, **asked, max_output_tokens=400)
    kinds = [event.type.removeprefix("response.") for event in events]
    told = [f"custom_tool_call_input.{word}" for word in ("delta", "done")]
    assert kinds[2:] == ["output_item.added", *told, "output_item.done", "completed"]
    assert (events[3].delta, events[4].input, last.output[0].input) == (call.input,) * 3
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "15 C"}
    after = {**GREEDY, "tools": [CUSTOM], "max_output_tokens": 4}
    stored = api.responses.create(**after, input=[result], previous_response_id=answer.id)
    sent = [{"role": "user", "content": "Go."}, call.model_dump(exclude_none=True), result]
    assert api.responses.create(**after, input=sent, store=False).output_text == stored.output_text
    looked = api.responses.create(**GREEDY, input="Go.", tools=[SPACE], tool_choice="required", max_output_tokens=400)
    (call,) = typed(looked).output
    assert (call.namespace, call.name) in [("sky", "look"), ("sky", "say")]


def test_tools_of_openais_servers_are_not_offered(api):
    asked = {**GREEDY, "input": "Go.", "max_output_tokens": 4}
    answer = typed(api.responses.create(**asked, tools=[{"type": "web_search"}, WEATHER, {"type": "local_shell"}]))
    assert answer.left_out == ["tool web_search", "tool local_shell"]
    assert [tool.name for tool in answer.tools] == ["get_weather"]
    plain = api.responses.create(**asked, tools=[WEATHER])
    assert plain.usage.input_tokens == answer.usage.input_tokens
    assert not hasattr(plain, "left_out")


def test_items_of_the_input(api):
    first = api.responses.create(**GREEDY, input="Name a tree.", max_output_tokens=4, instructions="Be brief.")
    calls = [
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "15 C"},
    ]
    asked = {**GREEDY, "input": [{"role": "user", "content": "And?"}, *calls], "max_output_tokens": 4}
    second = api.responses.create(**asked, previous_response_id=first.id)
    items = list(api.responses.input_items.list(second.id, order="asc"))
    shown = [(item.type, getattr(item, "role", None)) for item in items]
    assert shown == [("message", "user"), ("message", "assistant"), ("message", "user"),
                     ("function_call", None), ("function_call_output", None)]  # fmt: skip
    assert [part.text for item in items[:3] for part in item.content] == ["Name a tree.", first.output_text, "And?"]
    assert (items[3].name, items[3].arguments, items[4].output) == ("get_weather", "{}", "15 C")
    assert list(api.responses.input_items.list(second.id)) == items[::-1]
    page = api.responses.input_items.list(second.id)
    assert (page.first_id, page.last_id, page.has_more) == (items[-1].id, items[0].id, False)
    again = api.responses.create(**GREEDY, input=[item.model_dump(exclude_none=True) for item in items],
                                 max_output_tokens=4, store=False)  # fmt: skip
    assert (again.output_text, again.usage.input_tokens) == (second.output_text, second.usage.input_tokens)
    with pytest.raises(openai.NotFoundError):
        api.responses.input_items.list("resp_none")


def test_an_aborted_response_is_not_complete(client, server):
    with server.waiting("/v1/responses", {"model": MODEL, "input": "x"}) as asked:
        client.post("/abort_request", json={"abort_all": True})
        answer = asked.result()
    assert answer.status_code != 200 or answer.json()["status"] in ("incomplete", "cancelled", "failed")


def test_log_probabilities(api):
    asked = {**GREEDY, "input": "x", "max_output_tokens": 3, "include": ["message.output_text.logprobs"]}
    events, last = stream(api, **asked, top_logprobs=2)
    (part,) = last.output[0].content
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2] * last.usage.output_tokens
    told = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in told] == [entry.token for entry in part.logprobs]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": 7}]}]}, None),
        ({"input": [{"type": "computer_call_output", "call_id": "x", "output": {}}]}, "input"),
        ({"tools": [{"type": 7}]}, None),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"previous_response_id": "resp_none"}, "response"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "colour"}}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ],
)
def test_what_is_refused(api, options, param):
    options = {"model": MODEL, "input": "x"} | options
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as error:
        api.responses.create(**options)
    assert error.value.body["message"]
    if param:
        assert error.value.body["param"] == param


def test_what_only_openais_servers_do_is_refused_with_advice(api):
    with pytest.raises(openai.APIStatusError, match="ask the model for a summary") as error:
        api.responses.compact(model=MODEL, input="x")
    assert error.value.status_code == 501
    whole = api.responses.create(**GREEDY, input="Name a tree.", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="in the background"):
        api.responses.cancel(whole.id)


def test_a_stored_response_is_told_again(api):
    whole = api.responses.create(**GREEDY, input="Name a tree.", max_output_tokens=4)
    events = list(api.responses.retrieve(whole.id, stream=True))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "output_item.done",
        whole.status,
    ]
    assert events[-1].response.output == whole.output
    assert list(api.responses.retrieve(whole.id, stream=True, starting_after=3)) == events[4:]


def test_calls_beside_a_format(api):
    """The answer is a call, or it follows the schema."""
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {"a": {"enum": [1]}},
            "required": ["a"], "additionalProperties": False}}  # fmt: skip
    asked = {"input": "Answer 1.", "max_output_tokens": 60, "tools": [WEATHER], "text": {"format": form}}
    answer = api.responses.create(**GREEDY, **asked)
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls or json.loads(answer.output_text) == {"a": 1}


def test_stored_items_count_before_they_are_written_out(api):
    """A small body that names one stored item of some kilobytes many times."""
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
    first = api.responses.create(**GREEDY, input="Name a tree.", max_output_tokens=4, **logprobs)
    references = [{"type": "item_reference", "id": first.output[0].id}] * 4000
    with pytest.raises(openai.APIStatusError, match="the stored items of this request have") as error:
        api.responses.create(**GREEDY, input=references, max_output_tokens=1, store=False)
    assert error.value.status_code == 413
    assert api.responses.create(**GREEDY, input=references[:5], max_output_tokens=1).output_text
