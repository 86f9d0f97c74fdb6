"""Conversations as prompts, in the model's own template and in published forms of others; places of breakpoints."""

import json
from types import SimpleNamespace

import pytest

from runtime.errors import InvalidRequest
from runtime.frontend.output import MarkedText
from runtime.models.marks import find_place
from runtime.models.tokenizer import Tokenizer
from server.anthropic.prompt import chat_of
from server.anthropic.types import MessagesPrompt
from server.auth.keys import Tenant
from server.features.parts import Stores
from server.openai.prompt import ChatPrompts

FIVE, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
# Tools in the system message as JSON lines; contents are trimmed.
LINES = """{%- if tools %}<|system|>{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}
{% endif %}<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|end|>
{% elif messages[0].role == 'system' %}<|system|>{{ messages[0].content | trim }}<|end|>
{% endif %}{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content | trim }}{% if m.tool_calls %}\
{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endif %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is false %}<think></think>{% endif %}\
{% endif %}"""
# One JSON list of tools before the conversation; contents are JSON.
A_LIST = """{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}{% for m in messages %}[{{ m.role }}]\
{{ m.content | tojson }}{% if m.tool_calls %}{{ m.tool_calls | map(attribute='function') | list | tojson }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.fixture(scope="module", params=["own", "lines", "list"])
def tokenizer(request, default_model_dir, tmp_path_factory) -> Tokenizer:
    if request.param == "own":
        return Tokenizer.load(default_model_dir)
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text({"lines": LINES, "list": A_LIST}[request.param])
    return Tokenizer.load(default_model_dir, path)


def text(said: str, control=None) -> dict:
    return {"type": "text", "text": said} | ({"cache_control": control} if control else {})


def tool(name: str, control=None) -> dict:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    made = {"name": name, "description": f"To {name} <trees> & more", "input_schema": schema}
    return made | ({"cache_control": control} if control else {})


def conversation(**fields) -> MessagesPrompt:
    return MessagesPrompt.model_validate({"model": "m", "messages": [{"role": "user", "content": "Hello."}], **fields})


def render(tokenizer: Tokenizer, **fields) -> str | MarkedText:
    engine = SimpleNamespace(tokenizer=tokenizer)
    return ChatPrompts(SimpleNamespace(engine=engine), Stores(()))._render(
        chat_of(conversation(**fields)), Tenant("a", b"")
    )


def kept(tokenizer: Tokenizer, **fields) -> tuple[str, list[str]]:
    """The prompt, and its parts that end at the breakpoints."""
    prompt = render(tokenizer, **fields)
    assert isinstance(prompt, MarkedText)
    return prompt.text, [prompt.text[:place] for place, _ in prompt.breakpoints]


CALL = {"type": "tool_use", "id": "toolu_1", "name": "plant", "input": {"n": 2}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
TURNS = [
    {"role": "user", "content": [text("Plant two."), text("Soon, please.  ", FIVE)]},
    {"role": "assistant", "content": [text("I plant."), {**CALL, "cache_control": FIVE}]},
    {"role": "user", "content": [{**RESULT, "content": [text("Two <oaks> grow.", HOUR)]}, text("And now?")]},
]


def test_breakpoints_stand_where_their_blocks_end(tokenizer):
    whole, (asked, called, result) = kept(tokenizer, messages=TURNS)
    assert asked.endswith("Soon, please.") or asked.endswith("Soon, please.  ")
    assert "plant" in called.removeprefix(asked)
    assert "I plant." in called
    assert result.endswith("Two <oaks> grow.")
    assert "And now?" not in result
    assert "And now?" in whole
    assert whole.startswith(result)
    assert result.startswith(called)


def test_tools_and_system_are_kept_up_to_their_ends(tokenizer):
    tools = [tool("plant"), tool("water", HOUR)]
    whole, places = kept(tokenizer, tools=tools, system=[text("Be brief."), text("Be kind.", FIVE)])
    of_tools, of_system = sorted(places, key=lambda place: "water" not in place)
    assert '"To water <trees> & more"' in of_tools
    assert of_tools.rstrip("\n")[-1] in "}]"
    assert of_system.endswith("Be kind.")
    assert "Hello." not in of_tools
    assert whole.startswith(of_tools)
    first, _ = kept(tokenizer, tools=[tool("plant", HOUR), tool("water")])[1], None
    assert "plant" in first[0]
    assert '"water' not in first[0]


def test_breakpoints_never_change_the_prompt(tokenizer):
    controlled = {"tools": [tool("plant", FIVE)], "system": [text(" Be brief.\n", HOUR)], "messages": TURNS[:2]}
    plain = json.loads(json.dumps(controlled).replace(f', "cache_control": {json.dumps(FIVE)}', "").replace(
        f', "cache_control": {json.dumps(HOUR)}', ""))  # fmt: skip
    assert "cache_control" not in json.dumps(plain)
    assert render(tokenizer, **plain) == kept(tokenizer, **controlled)[0]


def test_the_automatic_breakpoint_is_at_the_end_of_the_last_block(tokenizer):
    _, (place,) = kept(tokenizer, cache_control=FIVE)
    assert place.endswith("Hello.")
    messages = [*TURNS[:1], {"role": "assistant", "content": "Yes."}, {"role": "user", "content": [text("Now.", HOUR)]}]
    prompt = render(tokenizer, cache_control=FIVE, messages=messages)
    assert [seconds for _, seconds in prompt.breakpoints] == [300.0, 3600.0], "its own comes first"
    assert prompt.text[: prompt.breakpoints[-1][0]].endswith("Now.")


def test_an_answer_that_has_begun_is_continued(tokenizer):
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": [text("1, 2,", FIVE)]}]
    if "m.content | tojson" in (tokenizer.chat_template or ""):  # it closes the text, whatever follows
        with pytest.raises(InvalidRequest, match="changes the last message"):
            render(tokenizer, messages=messages)
        return
    whole, (place,) = kept(tokenizer, messages=messages)
    assert whole == place
    assert whole.endswith("1, 2,")


def test_results_are_turns_and_hidden_thoughts_are_left_out(tokenizer):
    thought = [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "redacted_thinking", "data": "x"}]
    messages = [
        {"role": "user", "content": [text("Plant.")]},
        {"role": "assistant", "content": [*thought, CALL, {**CALL, "id": "toolu_2"}]},
        {
            "role": "user",
            "content": [{**RESULT, "content": "Done."}, {**RESULT, "tool_use_id": "toolu_2"}, text("So?")],
        },
    ]
    prompt = render(tokenizer, messages=messages)
    assert prompt.index("Plant.") < prompt.index("Done.") < prompt.index("So?")
    assert "Hm." not in prompt, "these templates repeat no reasoning"
    document = {"type": "document", "title": "Oaks", "source": {"type": "text", "data": "An oak is a tree."}}
    prompt = render(tokenizer, messages=[{"role": "user", "content": [document, text("So?")]}])
    assert prompt.index("Oaks") < prompt.index("An oak is a tree.") < prompt.index("So?")


def test_thinking_is_a_variable_of_the_template(default_model_dir, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(LINES)
    tokenizer = Tokenizer.load(default_model_dir, path)
    shown = {
        kind: "<think></think>" in render(tokenizer, thinking={"type": kind, "budget_tokens": 1024})
        for kind in ("enabled", "adaptive", "disabled")
    }
    assert shown == {"enabled": False, "adaptive": False, "disabled": True}


def test_more_than_four_breakpoints_are_refused():
    body = conversation(system=[text("x", FIVE)] * 3, messages=[{"role": "user", "content": [text("x", FIVE)] * 2}])
    with pytest.raises(InvalidRequest, match="4 blocks may have cache_control, not 5"):
        chat_of(body)
    chat_of(conversation(system=[text("x", FIVE)] * 3, cache_control=FIVE))


def test_a_place_is_found_where_both_texts_still_agree():
    assert find_place("one two three", "one two MARK three", "MARK") == 8
    assert find_place("one two", "one two  MARK", "MARK") == 7
    assert find_place("One two", "one two MARK", "MARK") == 0
    assert find_place("one two", "one two", "MARK") == 0
