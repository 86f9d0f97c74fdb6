"""Conversations in the form that chat templates take: system messages, calls, and what a template refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.models.tokenizer import Tokenizer
from server.openai.history import fitted, mended, place_systems
from server.openai.messages import Message
from server.openai.tools import render_chat

WRITE = "[{{ m.role }}]{{ m.content | trim }}"
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    + WRITE
    + "{% endfor %}"
)
TEMPLATES = {
    "anywhere": "{% for m in messages %}" + WRITE + "{% endfor %}",
    "first": FIRST,
    # Moved to the beginning, or dropped: what it says may not be lost.
    "first, moved": "{% for m in messages if m.role == 'system' %}" + WRITE + "{% endfor %}"
    "{% for m in messages if m.role != 'system' %}" + WRITE + "{% endfor %}",
    "first, dropped": "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    + WRITE
    + "{% endif %}{% endfor %}",
    "nowhere": FIRST.replace(" and not loop.first", ""),
}
TURNS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text("ab", min_size=1)), min_size=1)


@pytest.fixture(scope="module")
def tokenizers(tiny_dir) -> dict[str, Tokenizer]:
    plain = Tokenizer.load(tiny_dir)
    return {name: Tokenizer(plain._fast, plain._config, template) for name, template in TEMPLATES.items()}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_template_is_probed(tokenizers, kind):
    assert tokenizers[kind].system_turns == kind.split(",")[0]


@pytest.mark.parametrize("kind", TEMPLATES)
@given(said=TURNS)
def test_all_is_written_in_its_place(tokenizers, kind, said):
    tokenizer = tokenizers[kind]
    turns = [{"role": role, "content": f"{i}.{text}"} for i, (role, text) in enumerate(said)]
    text = tokenizer.apply_chat_template(place_systems(turns, tokenizer.system_turns))
    places = [text.index(turn["content"]) for turn in turns]
    assert places == sorted(places)


def test_a_conversation_that_grows_keeps_its_prompt():
    turns = [{"role": role, "content": str(i)} for i, role in enumerate(["system", "system", "user", "system"])]
    before = place_systems(turns, "first")
    assert [turn["content"] for turn in before] == ["0\n\n1", "2\n\n<system>\n3\n</system>"]
    after = place_systems([*turns, {"role": "assistant", "content": "4"}, {"role": "system", "content": "5"}], "first")
    assert after[:2] == before
    assert after[3] == {"role": "user", "content": "<system>\n5\n</system>"}


CALLED = {"name": "f", "arguments": {}}
STRICT = """{% for m in messages %}{% if m.role == 'tool' %}[{{ m.tool_call_id | length }}]{{ m.content }}
{% elif m.tool_calls %}{% for c in m.tool_calls %}({{ c.id | length }})
{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}
{% else %}{% if not m.content %}{{ raise_exception('empty') }}{% endif %}
{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}{{ raise_exception('alternate') }}{% endif %}
{% if m.role == 'user' and loop.index0 and messages[loop.index0 - 1].role == 'tool' %}{{ raise_exception('alternate') }}
{% endif %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"""


def call(arguments: str, id: str | None = "abc") -> Message:
    function = {"name": "f", "arguments": arguments}
    return Message.model_validate({"role": "assistant", "tool_calls": [{"id": id, "function": function}]})


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([call("null")], "<user>x(3)"),
        ([call('{"a": "b')], '<user>x(3)arguments={"a": "b;'),
        ([call("[1]", None), Message(role="tool", content="y")], "<user>x(8)arguments=[1];[8]y"),
        ([Message(role="user", content="y"), Message(role="assistant", content="")], "<user>x\n\ny<assistant> "),
        (
            [call("{}"), Message(role="tool", content="y"), Message(role="user", content="z")],
            "(3)[3]y<assistant> <user>z",
        ),
    ],
)
def test_a_history_that_a_template_refuses_is_mended(tokenizer, messages, text):
    strict = Tokenizer(tokenizer._fast, {}, STRICT.replace("\n", "") + "{# tools tool_calls #}")
    turns = [Message(role="user", content="x").plain(), *(message.plain() for message in messages)]
    assert render_chat(strict, turns, []).endswith(text)
    assert mended(mended(turns)) == mended(turns)


def test_nothing_is_lost_of_turns_that_are_joined():
    thought = {"role": "assistant", "content": "x", "reasoning_content": "Hm."}
    (joined,) = mended([thought, {**thought, "content": "y"}])
    assert joined == {"role": "assistant", "content": "x\n\ny", "reasoning_content": "Hm.\n\nHm."}
    calling = [thought, {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": CALLED}]}]
    assert mended(calling) == calling


def test_ids_that_are_missing_follow_the_order(tokenizer):
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [m] %}{{ c.id or m.tool_call_id }}.{% endfor %}{% endfor %}"
    )
    turns = [{"role": "assistant", "content": "", "tool_calls": [{"id": None, "function": CALLED}] * 2}]
    turns += [{"role": "tool", "content": "y"}] * 2
    own = Tokenizer(tokenizer._fast, {}, template + "{# tools tool_calls [TOOL_CALLS] #}")
    first, second, *results = render_chat(own, turns, [])[:-1].split(".")
    assert results == [first, second]
    assert first != second
    assert len(first) == 9


def test_lfm2s_calls_are_written_as_it_writes_them(tokenizer):
    template = (
        "{% if tools %}<|tool_call_start|>{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    own = Tokenizer(tokenizer._fast, {}, template + '{# "tool" #}')
    turns = [call('{"q": "a", "most": 3, "all": null}').plain(), Message(role="tool", content="y").plain()]
    written = '<|tool_call_start|>[f(q="a", most=3, all=None)]<|tool_call_end|>'
    assert render_chat(own, turns, []) == f"[assistant]{written}[tool]y"


HARMONY = "<|channel|>{% if tools %}{{ tools }}{% endif %}{% for m in messages %}{{ m.tool_calls }}{% endfor %}"


@pytest.mark.parametrize("calls", [[], [{"id": "c", "function": {"name": "f", "arguments": {}}}]])
@pytest.mark.parametrize("thinking", ["", "Hm."])
@pytest.mark.parametrize("content", ["", "So."])
def test_of_calls_thoughts_and_a_text_a_template_gets_two_at_most(tiny_dir, calls, thinking, content):
    """gpt-oss's template refuses all three; nothing else changes."""
    plain = Tokenizer.load(tiny_dir)
    turn = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
    turn |= {"thinking": thinking, "reasoning_content": thinking} if thinking else {}
    both = {"thinking": "Hm.\nSo.", "content": ""} if calls and thinking and content else {}
    assert fitted(Tokenizer(plain._fast, plain._config, HARMONY), [turn]) == [turn | both]
