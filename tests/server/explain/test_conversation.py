"""The parts of rendered conversations, by the templates of several models."""

import pytest

from runtime.models.tokenizer import Tokenizer
from server.explain.conversation import Conversation, PromptSection, section_at
from server.openai.tools import Tool, render_chat

# As Qwen's: tools behind the system message, calls behind a content.
WITH_TOOLS = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- "# Tools\\n\\nYou may call these:\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role != 'system' %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# As Mistral's: contents are trimmed, and there are no lines.
TRIMMING = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
SHOUTING = "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}\n{% endfor %}"

CALL = {"id": "c", "type": "function", "function": {"name": "get", "arguments": {"city": "Oslo"}}}
TALK = [
    {"role": "system", "content": "You help with trips.\nBe short."},
    {"role": "user", "content": "  Where is Rome?  "},
    {"role": "assistant", "content": "In Italy."},
    {"role": "user", "content": "And the weather in Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "It rains.", "tool_call_id": "c"},
    {"role": "user", "content": "Thanks!"},
]


def tool(name: str) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "description": "Gives something."}})


def conversation(tokenizer, template, turns, tools=()) -> tuple[Conversation, str]:
    own = Tokenizer(tokenizer._fast, {}, template or tokenizer.chat_template)
    made = Conversation(lambda turns, tools: render_chat(own, turns, tools), turns, [*tools], tool("example"))
    return made, made.render(made.turns, made.tools)


def named(parts: list[PromptSection], text: str, found: str, more: int = 0) -> tuple[str, int | None]:
    """Kind and index of the part in which a text, so many characters on, lies."""
    assert text.count(found) == 1
    part = section_at(parts, text.index(found) + more)
    return part.kind, part.index


@pytest.mark.parametrize("template", [None, WITH_TOOLS], ids=["without tools", "with tools"])
@pytest.mark.parametrize("tools", [(), ("get", "put")], ids=["none offered", "offered"])
def test_every_character_of_a_content_belongs_to_its_message(tokenizer, template, tools):
    made, text = conversation(tokenizer, template, TALK, map(tool, tools))
    parts = made.sections(text)
    assert [part.start for part in parts] == sorted(part.start for part in parts)
    for index, turn in enumerate(TALK):
        expected = ("message", index) if index else ("system", None)
        for more in (0, 1, len(turn["content"]) - 1) if turn["content"] else ():
            assert named(parts, text, turn["content"], more) == expected, turn
        if turn["content"] and not (index == 0 and tools):  # where it ends, another one might go on
            assert named(parts, text, turn["content"], len(turn["content"])) == expected, turn
    assert named(parts, text, '"arguments": {"city"') == ("message", 4)
    assert section_at(parts, 0).kind == "system"
    assert section_at(parts, len(text)) == parts[-1]
    for name in tools:
        assert named(parts, text, f'"name": "{name}", "descr') == ("tools", None)
    offsets = [text.index(turn["content"]) for turn in TALK if turn["content"]]
    assert {*offsets} <= {part.start for part in parts}, "offsets count from a content's beginning"


def test_tools_without_a_system_message(tokenizer):
    made, text = conversation(tokenizer, None, TALK[1:], [tool("get")])
    parts = made.sections(text)
    assert named(parts, text, '"name": "get", "descr') == ("tools", None)
    assert named(parts, text, "Where is Rome?") == ("message", 0)
    assert named(parts, text, "Thanks!") == ("message", 5)


def test_a_template_that_trims_or_adds_text_is_followed(tokenizer):
    made, text = conversation(tokenizer, TRIMMING, TALK[1:4])
    parts = made.sections(text)
    assert text.startswith("[INST] Where is Rome? [/INST] In")
    for index, content in enumerate(("Where is Rome?", "In Italy.", "And the weather in Oslo?")):
        assert named(parts, text, content) == ("message", index)
        assert named(parts, text, content, len(content) - 1) == ("message", index)
    assert section_at(parts, text.index("[INST] And") + 2).index == 2


@pytest.mark.parametrize("template", [SHOUTING, "{{ raise_exception('no') }}", "{{ messages[0].content }}"])
def test_a_template_that_cannot_be_followed_has_no_parts(tokenizer, template):
    own = Tokenizer(tokenizer._fast, {}, template)
    made = Conversation(lambda turns, tools: render_chat(own, turns, tools), TALK[:3], [], tool("example"))
    assert made.sections("whatever it made") == []
    assert section_at([], 7) == PromptSection("prompt")
    assert not made.describes_tools("You may call these functions")


def test_another_text_ends_the_parts_where_it_is_other(tokenizer):
    made, text = conversation(tokenizer, None, TALK)
    whole, half = made.sections(text), made.sections(text[: text.index("Where is Rome?") + 20])
    assert half == whole[: len(half)]
    assert 0 < len(half) < len(whole)


@pytest.mark.parametrize("template", [None, WITH_TOOLS], ids=["without tools", "with tools"])
@pytest.mark.parametrize("turns", [TALK, TALK[1:]], ids=["system", "no system"])
def test_tools_of_another_prompt_are_recognised(tokenizer, template, turns):
    bare, text = conversation(tokenizer, template, turns)
    _, offered = conversation(tokenizer, template, turns, [tool("get"), tool("put")])
    at = next(i for i, (mine, theirs) in enumerate(zip(text, offered, strict=False)) if mine != theirs)
    assert bare.describes_tools(offered[at : at + 40])
    assert not bare.describes_tools(text[at : at + 40])
    assert not bare.describes_tools(offered[at : at + 4]), "too few characters to tell"
    made, _ = conversation(tokenizer, template, turns, [tool("get")])
    assert not made.describes_tools(offered[at : at + 40]), "it has tools there itself"


def test_parts_have_names():
    names = [str(PromptSection(kind)) for kind in ("tools", "system", "prompt")]
    assert [*names, str(PromptSection("message", index=0))] == [
        "the tools",
        "the system prompt",
        "the prompt",
        "message 1",
    ]
