"""Fields of other servers: the table, and the rule for each kind; bodies alone, without a server."""

from pathlib import Path

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from runtime.errors import InvalidRequest
from runtime.frontend.output import new_rid
from server.anthropic.types import MessageBlock
from server.errors import _first_problem
from server.fields import BODIES, fields_page
from server.http import unknown_fields
from server.http.body import Body
from server.http.fields import ANSWERED, EMPTY, SAMPLERS
from server.openai.tools import Tool
from server.openai.types import ChatRequest, CompletionRequest
from server.responses.types import ResponseRequest
from server.sglang.generate import GenerateRequest

ASK = {"messages": [{"role": "user", "content": "x"}]}
CALL = {"type": "function", "function": {"name": "f"}}


def chat(**fields) -> ChatRequest:
    return ChatRequest.model_validate({**ASK, **fields})


def test_the_page_is_up_to_date():
    """`make docs` writes it."""
    page = Path(__file__).parents[2] / "server/FIELDS.md"
    assert page.read_text(encoding="utf-8") == fields_page() + "\n"


def every_body(kind: type[Body] = Body) -> set[type[Body]]:
    return {kind}.union(*(every_body(one) for one in kind.__subclasses__()))


def test_every_body_with_fields_of_others_is_in_the_table():
    described = set(BODIES.values())
    bodies = {body for body in every_body() if not body.__module__.startswith("server.admin")}  # of vLLM's own routes
    small = {body for body in bodies if body.IGNORED - ANSWERED or body.ALIASES or body.NEUTRAL} - described
    named = {base for body in described for base in body.__mro__}
    assert {body.__name__ for body in small - named} <= {
        "ItemTool",
        "ItemCustom",
        "Function",
        "ItemMessage",
        "NamedTool",
        "ItemReasoning",
        "ItemResult",
        "ToolCall",
        "MessageBlock",
        *(kind.__name__ for kind in every_body(MessageBlock)),
    }


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_no_field_has_two_meanings(body):
    kinds = (body.KNOWN, body.IGNORED, body.ALIASES.keys(), body.NEUTRAL.keys())
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    assert set(body.ALIASES.values()) <= body.KNOWN


@pytest.mark.parametrize(
    ("kind", "given"),
    [(ChatRequest, ASK), (CompletionRequest, {"prompt": "x"}), (ResponseRequest, {"input": "x"}),
     (GenerateRequest, {"text": "x"})],
)  # fmt: skip
def test_the_three_kinds_of_fields(kind, given):
    def read(**more):
        return kind.model_validate({**given, **more}).model_dump()  # without the time of arrival

    for name in kind.IGNORED:
        assert read(**{name: {"any": 1}}) == read()
    for name, values in kind.NEUTRAL.items():
        for value in (*values, None):
            assert read(**{name: value}) == read()
        if name in SAMPLERS:
            assert kind.model_validate({**given, name: 0.123}).left_out == [name]
            continue
        with pytest.raises(InvalidRequest) as error:
            kind.model_validate({**given, name: 0.123})
        assert (error.value.param, name in error.value.message) == (name, True)
    for value in (1, False, "", []):
        assert kind.model_validate({**given, "colour": value}).left_out == ["colour"]
    assert kind.model_validate({**given, "preset": ""}).left_out == [], "a field of others that asks for nothing"
    assert kind.model_validate({**given, "preset": "x", "options": {"num_ctx": 1}}).left_out == ["preset", "options"]
    for name in ("temprature", "Temperature", "modle"):
        near = {"sampling_params": {name: 1}} if kind is GenerateRequest and name != "modle" else {name: 1}
        with pytest.raises(ValidationError, match=r"did you mean (temperature|model)"):
            kind.model_validate({**given, **near})
    assert read(colour=None) == read()


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"include_stop_str_in_output": True}, {"no_stop_trim": True}),
        ({"guided_json": {"type": "object"}}, {"json_schema": '{"type": "object"}'}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"rid": "mine"}, {"request_id": "mine"}),
        ({"extra_key": "salt"}, {"cache_salt": "salt"}),
        ({"max_new_tokens": 5, "stopping_strings": ["a"], "ban_eos_token": False}, {"max_tokens": 5, "stop": ["a"]}),
        ({"num_predict": 5}, {"max_tokens": 5}),
        ({"lora_path": "poems"}, {"model": "poems"}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}),
        ({"think": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": "high", "exclude": True}}, {"reasoning_effort": "high", "include_reasoning": False}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"stream": True, "usage": {"include": True}}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"usage": {"include": True}}, {}),
        ({"seed": -1}, {}),
        ({"max_tokens": 5.0, "n": 2.0, "seed": 7.0}, {"max_tokens": 5, "n": 2, "seed": 7}),
        ({"stop": ""}, {"stop": None}),
        ({"stop": []}, {"stop": None}),
    ],
)
def test_other_names_and_forms_mean_the_same(given, own):
    named, same = chat(**given), chat(**own)
    assert named.model_dump(exclude={"lora_path"}) == same.model_dump(exclude={"lora_path"})
    assert named.left_out == []


def test_the_rule_for_unknown_fields_holds_within_a_request():
    function = {"name": "t", "arguments": "{}", "parsed_arguments": {}, "extra": 1}
    call = {"id": "a", "type": "function", "function": function, "index": 0, "extra_content": {"google": {}}}
    said = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": [call]}
    more = {"reasoning_details": [{}], "reasoning_opaque": "x", "context": {"a": 1}}
    asked = chat(messages=[*ASK["messages"], {**said, **more}, {"role": "tool", "content": "5", "tool_name": "t"}])
    assert asked.left_out == ["reasoning_details", "reasoning_opaque", "context", "extra_content", "extra", "tool_name"]
    asked = chat(tools=[{**CALL, "cache_control": {"type": "ephemeral"}, "colour": 1}])
    assert asked.left_out == ["cache_control", "colour"]
    assert chat(messages=[{**ASK["messages"][0], "stranger": 1, "reasoning": "Hm."}]).turns()[0]["thinking"] == "Hm."
    for body in ({"messages": [{**ASK["messages"][0], "contents": "x"}]}, {"tools": [{**CALL, "typ": "function"}]}):
        with pytest.raises(ValidationError, match=r"did you mean (content|type)"):
            chat(**body)
    with pytest.raises(InvalidRequest, match="more than 32 unknown"):
        chat(**{f"stranger{i}": 1 for i in range(33)})


def test_other_options_of_thinking_are_left_out():
    asked = chat(thinking={"type": "enabled", "budget_tokens": 9}, reasoning={"max_tokens": 5}, usage={"a": 1})
    assert asked.left_out == ["thinking.budget_tokens", "reasoning.max_tokens", "usage"]
    assert chat(thinking={"type": "enabled"}, enable_thinking=False).enable_thinking is False


def test_calls_in_the_older_form():
    asked = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    turns = chat(messages=[*ASK["messages"], asked, {"role": "function", "name": "f", "content": "5"}]).turns()
    assert turns[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert turns[2] == {"role": "tool", "content": "5"}


def test_the_model_sees_letters_of_its_own_in_names_of_tools():
    names = ["mcp:files/read", "mcp files read", "wetter_für", "plain.name"]
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    seen = ["mcp_files_read", "mcp_files_read_2", "wetter_f_r", "plain.name"]
    called = {"role": "assistant", "tool_calls": [{"function": {"name": name}} for name in names]}
    choice = {"type": "function", "function": {"name": names[1]}}
    asked = chat(messages=[*ASK["messages"], called], tools=tools, tool_choice=choice)
    assert [tool.function.name for tool in asked.offered] == seen
    assert [call["function"]["name"] for call in asked.turns()[1]["tool_calls"]] == seen
    assert [tool.function.name for tool in asked.callable_tools()] == seen[1:2]
    assert asked.given_names == dict(zip(seen[:3], names, strict=False))


def test_one_field_by_two_names_has_one_value():
    assert chat(repeat_penalty=1.1, repetition_penalty=1.1).repetition_penalty == 1.1
    with pytest.raises(InvalidRequest, match="the same field"):
        chat(repeat_penalty=1.1, repetition_penalty=1.2)


@pytest.mark.parametrize("value", [5.5, "5", True, float("inf"), 1e30])
def test_no_other_number_is_an_integer(value):
    with pytest.raises(ValidationError):
        chat(max_tokens=value)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"choice": ["a b", 'q"']}, {"grammar": 'start: "a b" | "q\\""'}),
        ({"structured_outputs": {"json": {"a": 1}}}, {"json_schema": '{"a": 1}'}),
        ({"structured_outputs": {"choice": ["a"]}}, {"grammar": 'start: "a"'}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": '{"type": "object"}'}),
        ({"response_format": {"type": "json_object", "schema": {"a": 1}}}, {"json_schema": '{"a": 1}'}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            {"json_schema": '{"a": 1}'},
        ),
        ({"response_format": {"type": "json_schema", "schema": {"a": 1}}}, {"json_schema": '{"a": 1}'}),
        ({"response_format": {"type": "regex", "pattern": "a"}}, {"regex": "a"}),
        ({"response_format": {"type": "grammar", "grammar": "g"}}, {"grammar": "g"}),
        ({"response_format": {"type": "text"}}, {}),
    ],
)
def test_forms_of_formats(given, wanted):
    assert chat(**given).constraint() == wanted


def test_formats_exclude_each_other():
    for given in ({"regex": "a", "choice": ["b"]}, {"regex": "a", "response_format": {"type": "json_object"}}):
        with pytest.raises(InvalidRequest, match="only one format"):
            chat(**given).constraint()
    with pytest.raises(InvalidRequest, match="exclude each other"):
        chat(regex="a", tools=[CALL]).refuse_unsupported()


def test_what_senders_mean_by_limits():
    assert [chat(max_tokens=count).sampling(count, {}).max_new_tokens for count in (-1, 0, 5)] == [None, 0, 5]
    assert chat(max_tokens=5, max_completion_tokens=0).most_tokens == 0


def test_parts_of_messages():
    said = [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "output_text", "text": "Yes."}]
    turn = chat(messages=[{"role": "assistant", "content": said}]).turns()
    assert turn == [{"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.", "thinking": "Hm."}]
    refused = chat(messages=[{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}]).turns()
    assert refused[0]["content"] == "No."
    call = {"id": "a", "function": {"name": "f", "arguments": {"city": "Köln"}}}
    turns = chat(
        messages=[{"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "I call."},
                  {"role": "tool", "tool_call_id": "a", "content": None}]
    ).turns()  # fmt: skip
    assert turns[0]["tool_calls"][0]["function"]["arguments"] == {"city": "Köln"}
    assert turns[0]["reasoning_content"] == "I call."
    assert turns[1]["content"] == ""
    picture = chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    assert picture.turns()[0]["content"] == "[image_url: left out, because this model reads text alone]"
    assert picture.left_out == ["content image_url"]


def test_variables_of_the_chat_template():
    asked = chat(enable_thinking=True, reasoning_effort="low", chat_template_kwargs={"enable_thinking": False, "a": 1})
    assert asked.template_variables() == {"enable_thinking": False, "reasoning_effort": "low", "a": 1}
    assert chat(reasoning_effort="none").template_variables() == {"reasoning_effort": "none", "enable_thinking": False}


def test_allowed_tools():
    tools = [CALL, {"type": "function", "function": {"name": "g"}}]
    allowed = {"mode": "required", "tools": [CALL]}
    asked = chat(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert [tool.function.name for tool in asked.offered] == ["f", "g"], "the prompt stays that of all tools"
    assert asked.callable_tools() == [Tool.model_validate(CALL)]
    assert asked.must_call
    assert '"g"' not in asked.constraint()["json_schema"]
    allowed = {"mode": "auto", "tools": [CALL]}
    assert chat(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}).constraint() == {}


def test_the_empty_values():
    assert EMPTY == ([], {}, "", False)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"txt": "x"}, ("unknown field txt; did you mean text?", "txt")),
        (
            {"text": "x", "sampling_params": {"max_new_token": 3}},
            (
                "unknown field sampling_params.max_new_token; did you mean max_new_tokens?",
                "sampling_params.max_new_token",
            ),
        ),
        (
            {"text": "x", "max_new_tokens": 3},
            ("unknown field max_new_tokens; did you mean sampling_params.max_new_tokens?", "max_new_tokens"),
        ),
        (
            {"text": "x", "max_tokens": 3},
            ("unknown field max_tokens; did you mean sampling_params.max_new_tokens?", "max_tokens"),
        ),
    ],
)
def test_an_unknown_field_is_told_what_was_meant(body, told):
    with pytest.raises(ValidationError) as found:
        GenerateRequest.model_validate(body)
    problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in found.value.errors()]
    assert _first_problem(RequestValidationError(problems)) == told


def test_long_names_of_unknown_fields_are_not_kept():
    name = f"{new_rid()}{'x' * unknown_fields._MOST_COMPARED}{new_rid()}"
    assert chat(**{name: 1}).left_out == [name[: unknown_fields.MOST_CHARACTERS]]
    hits = unknown_fields._meant.cache_info().hits
    unknown_fields.meant(f"{name}y", ChatRequest.KNOWN)
    assert unknown_fields._meant.cache_info().hits == hits + 1, "the cache holds the beginning of a name alone"
