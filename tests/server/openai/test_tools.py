"""Tools in prompts, in answers and in streams, against a live server."""

import json

import openai
import pytest

from server.openai.tools import Tool, render_chat
from tests.server.openai.test_openai import MODEL

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"City": {"type": "string", "maxLength": 20}},
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_must_be_made_is_made(api, choice):
    options = {"model": MODEL, "messages": ASK, "tools": [WEATHER], "tool_choice": choice, "temperature": 0}
    answer = api.chat.completions.create(**options, max_tokens=80).choices[0]
    (call,) = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert (call.type, call.function.name, answer.finish_reason) == ("function", "get_weather", "tool_calls")
    assert arguments.keys() == {"city", "unit"}
    assert arguments["unit"] in ("C", "F")
    assert answer.message.content is None
    chunks = [chunk.choices[0] for chunk in api.chat.completions.create(**options, max_tokens=80, n=2, stream=True)]
    for index in range(2):  # each choice has calls of its own
        (told,) = [part for choice in chunks if choice.index == index for part in choice.delta.tool_calls or []]
        assert (told.index, told.function.name, told.function.arguments) == (0, "get_weather", call.function.arguments)
    assert [choice.finish_reason for choice in chunks if choice.finish_reason] == ["tool_calls"] * 2
    turns = [*ASK, answer.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "15 C, rain"}]
    after = api.chat.completions.create(model=MODEL, messages=turns, tools=[WEATHER], max_tokens=8)
    assert after.usage.prompt_tokens > 100


def test_tools_that_are_not_to_be_called_cost_nothing(api):
    plain = api.chat.completions.create(model=MODEL, messages=ASK, max_tokens=4, temperature=0)
    none = api.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=4, temperature=0, tools=[WEATHER], tool_choice="none"
    )
    assert none.choices[0].message == plain.choices[0].message
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens


def test_tools_whose_schemas_no_grammar_can_follow_are_offered(api):
    odd = {"type": "function", "function": {"name": "f", "parameters": {"type": "colour"}}}
    options = {"model": MODEL, "messages": ASK, "max_tokens": 4, "temperature": 0, "n": 2}
    for _ in range(2):
        answer = api.chat.completions.create(**options, tools=[odd])
        assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]


ODD = {
    "type": "colour",
    "required": None,
    "enum": None,
    "$ref": "https://a.example/x",
    "properties": {"a": {"type": "string", "pattern": "^(?!x)", "maxLength": 9007199254740991}, "b": False},
}


@pytest.mark.parametrize("odd", [ODD, {**ODD, "required": ["b"], "type": "object"}], ids=["followed", "contradictory"])
def test_one_tool_that_no_grammar_can_follow_leaves_the_others_be(api, odd):
    tools = [{"type": "function", "function": {"name": "f", "parameters": odd}}, WEATHER]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        answer = api.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=60, temperature=0, tools=tools, tool_choice=choice
        )
        assert answer.choices[0].message.tool_calls[0].function.name in {"f", "get_weather"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "mcp:a/wetter für"}}])
def test_a_name_of_other_letters(client, choice):
    """The model sees another one."""
    name = "mcp:a/wetter für"
    tools = [{"type": "function", "function": {**WEATHER["function"], "name": name}}]
    body = {"model": MODEL, "messages": ASK, "tools": tools, "tool_choice": choice, "max_tokens": 60, "temperature": 0}
    (call,) = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == name
    turns = [*ASK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "Rain."}]
    prompt = client.post("/apply-template", json={**body, "messages": turns}).json()["prompt"]
    assert name not in prompt
    assert prompt.count("mcp_a_wetter_f_r") == 2


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
        ({"tools": [{"type": 7}]}, None),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "perhaps"}, None),
        ({"tools": [WEATHER], "response_format": {"type": "regex", "pattern": "a"}}, "response_format"),
        ({"tools": [STOP] * 129}, "tools"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_offered_are_refused(api, options, param):
    with pytest.raises(openai.BadRequestError) as error:
        api.chat.completions.create(model=MODEL, messages=ASK, **options)
    if param:
        assert error.value.body["param"] == param


class _Template:
    """A tokenizer as far as prompts go."""

    system_turns = "anywhere"

    def __init__(self, chat_template: str):
        self.chat_template = chat_template

    def apply_chat_template(self, messages, add_generation_prompt, tools, variables):
        return messages, tools


def test_a_template_gets_the_tools_that_it_knows():
    tool = Tool.model_validate(WEATHER)
    turns = [{"role": "user", "content": "x"}, {"role": "tool", "content": "y", "tool_call_id": "1"}]
    messages, tools = render_chat(_Template("{{ tools }} {{ tool_calls }}"), turns, [tool])
    assert messages == turns
    assert tools[0]["function"]["name"] == "get_weather"
    messages, tools = render_chat(_Template("{{ messages }}"), turns, [tool])
    assert tools is None
    assert "get_weather" in messages[0]["content"]
    assert [message["role"] for message in messages] == ["system", "user", "user"]


def test_messages_suit_the_templates_of_mistral_and_gpt_oss():
    call = {"id": "call_1", "type": "function", "function": {"name": "stop", "arguments": {}}}
    said = {"role": "assistant", "content": "I stop.", "thinking": "Hm.", "tool_calls": [call]}
    turns = [said, {"role": "tool", "content": "y", "tool_call_id": "call_1"}]
    (asked, answered), _ = render_chat(_Template("{{ tools }} {{ tool_calls }} [TOOL_CALLS]"), turns, [])
    assert len(answered["tool_call_id"]) == 9
    assert answered["tool_call_id"] == asked["tool_calls"][0]["id"]
    (asked, _), _ = render_chat(_Template("{{ tools }} {{ tool_calls }} <|channel|>"), turns, [])
    assert (asked["thinking"], asked["content"]) == ("Hm.\nI stop.", "")


def test_a_custom_tool_takes_a_text(api):
    tool = {"type": "custom", "custom": {"name": "patch", "description": "To change a file."}}
    options = {"model": MODEL, "temperature": 0, "max_tokens": 60}
    earlier = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "- a"}}
    turns = [
        *ASK,
        {"role": "assistant", "tool_calls": [earlier]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]
    choice = {"type": "custom", "custom": {"name": "patch"}}
    answer = api.chat.completions.create(**options, messages=turns, tools=[tool], tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.type, call.custom.name, type(call.custom.input)) == ("custom", "patch", str)


def test_what_is_left_out_is_listed(api):
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    asked = {"model": MODEL, "max_tokens": 2, "tools": [{"type": "retrieval"}]}
    search = {"web_search_options": {}}
    answer = api.chat.completions.create(**asked, messages=[{"role": "user", "content": parts}], extra_body=search)
    assert answer.left_out == ["content image_url", "tool retrieval", "web_search_options"]


def test_a_forced_call_that_is_cut_off_is_a_call(api, client):
    asked = {"model": MODEL, "max_tokens": 18, "temperature": 0}
    answer = api.chat.completions.create(**asked, messages=ASK, tools=[WEATHER], tool_choice="required")
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.name == "get_weather"
    assert choice.message.tool_calls[0].function.arguments.startswith("{")
    function = WEATHER["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    body = {**asked, "messages": ASK, "tools": [tool], "tool_choice": {"type": "any"}}
    message = client.post("/v1/messages", json=body).json()
    assert (message["stop_reason"], message["content"][0]["type"]) == ("max_tokens", "tool_use")
    response = api.responses.create(model=MODEL, input=ASK, max_output_tokens=18, temperature=0, tool_choice="required",
                                    tools=[{"type": "function", **function}])  # fmt: skip
    assert (response.status, response.output[0].type, response.output[0].status) == (
        "incomplete",
        "function_call",
        "incomplete",
    )
