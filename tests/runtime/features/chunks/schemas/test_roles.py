"""Roles of schemas and prompts in chat templates: the same tokens as an ordinary conversation, or an error."""

from array import array
from xml.sax.saxutils import escape

import pytest

from runtime.features.chunks.ask import ModuleAsk
from runtime.features.chunks.schemas.markup import PmlError
from runtime.features.chunks.schemas.schema import Schema
from runtime.models.marks import new_mark
from runtime.models.tokenizer import Tokenizer

# Templates in the manner of Llama 2 and Mistral: turns alternate, and Llama's system text stands in the first turn.
TURNS = """{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>' + messages[0]['content'] + '<</SYS>>' %}
{%- set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{% for message in messages %}
{%- set user = message['role'] == 'user' %}
{%- if user != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}
{%- if user %}{{ '[INST] ' + (system if loop.first else '') + message['content'] | trim + ' [/INST]' }}
{%- else %}{{ ' ' + message['content'] | trim + ' </s>' }}{% endif %}{% endfor %}"""
LAST_TURN = "{% for m in messages %}{{ m['role'] + ('*' if loop.last else ':') + m['content'] }}{% endfor %}"
END = "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% if loop.last %}.{% endif %}{% endfor %}"
TWICE = "{% for m in messages %}{{ m['content'] + m['content'] }}{% endfor %}"
DROPS = "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}{% endfor %}"
SYSTEM_LAST = "{% for m in messages[1:] %}{{ m['content'] }}{% endfor %}{{ messages[0]['content'] }}"
SHOUTS = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"

SCHEMA = """<schema name="s">
  <system>
    Be kind.
  </system>
  <user>Read <module name="a">this &lt;b&gt;</module> and <module name="c">that.</module>
  </user>
  <assistant>I have.</assistant>
</schema>"""
SPOKEN = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Read this <b> and that."},
    {"role": "assistant", "content": "I have."},
]
QUESTION = {"role": "user", "content": "And now?"}


def with_template(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    return Tokenizer(tokenizer._fast, {}, template)


def text_of(schema: Schema, prompt) -> str:
    """The text of a prompt that imports everything, by position."""
    rows = []
    for entry in [*prompt.ask.modules, ModuleAsk(array("i", prompt.tokens).tobytes(), prompt.ask.anchors)]:
        tokens = array("i")
        tokens.frombytes(entry.tokens)
        for index, token in enumerate(tokens):
            at, position = max(anchor for anchor in entry.anchors if anchor[0] <= index)
            rows.append((position + index - at, token))
    assert [position for position, _ in sorted(rows)] == list(range(len(rows)))
    return schema.tokenizer.decode([token for _, token in sorted(rows)], skip_special_tokens=False)


@pytest.mark.parametrize("template", [None, TURNS], ids=["chatml", "turns"])
def test_a_schema_with_roles_reads_as_the_conversation(template, tokenizer):
    own = with_template(tokenizer, template or tokenizer.chat_template)
    schema = Schema.read(SCHEMA, own, 8192)
    expected = own.apply_chat_template([*SPOKEN, QUESTION])
    for tail in ("And now?", "\n  <user>\n And now?</user>\n"):
        prompt = schema.compile(f"<prompt schema='s'><a/><c/>{tail}</prompt>")
        assert text_of(schema, prompt) == expected


def test_without_modules_the_tokens_are_those_of_the_chat_route(tokenizer):
    pml = "<schema name='s'><system>Be kind.</system><user>Read that.</user></schema>"
    schema = Schema.read(pml, tokenizer, 8192)
    talk = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Read that."}]
    expected = tokenizer.encode(tokenizer.apply_chat_template(talk), add_special_tokens=False)
    prompt = schema.compile("<prompt schema='s'/>")
    (entry,) = prompt.ask.modules
    assert list(array("i", entry.tokens)) + prompt.tokens == expected


def test_later_turns_follow_the_schema(tokenizer):
    schema = Schema.read(SCHEMA, tokenizer, 8192)
    turns = "<user>One</user><assistant>Two</assistant><user>Three</user>"
    prompt = schema.compile(f"<prompt schema='s'><a/><c/>{turns}</prompt>")
    later = [
        {"role": role, "content": text} for role, text in (("user", "One"), ("assistant", "Two"), ("user", "Three"))
    ]
    assert text_of(schema, prompt) == tokenizer.apply_chat_template([*SPOKEN, *later])


@pytest.mark.parametrize("template", [LAST_TURN, END, TWICE, DROPS, SYSTEM_LAST, SHOUTS])
def test_a_template_that_would_change_what_is_cached_is_refused(template, tokenizer):
    with pytest.raises(PmlError, match="/: this model's chat template"):
        Schema.read(SCHEMA, with_template(tokenizer, template), 8192)


def test_a_model_without_a_template_takes_no_roles(tokenizer):
    with pytest.raises(PmlError, match="no chat template"):
        Schema.read(SCHEMA, with_template(tokenizer, None), 8192)


def test_a_template_that_refuses_turns_is_an_error_of_the_prompt(tokenizer):
    schema = Schema.read(SCHEMA, with_template(tokenizer, TURNS), 8192)
    with pytest.raises(PmlError, match="turns must alternate"):
        schema.compile("<prompt schema='s'><user>One</user><user>Two</user></prompt>")


def test_a_template_whose_beginning_changes_with_the_day_serves_on(tokenizer):
    own = with_template(tokenizer, "day 1:" + tokenizer.chat_template)
    schema = Schema.read(SCHEMA, own, 8192)
    own.chat_template = "day {{ range(99999) | random }}:" + tokenizer.chat_template
    first, second = (own.apply_chat_template([QUESTION]) for _ in range(2))
    assert first != second
    assert schema.compile("<prompt schema='s'><a/>And now?</prompt>").tokens


def test_marks_cannot_be_guessed(tokenizer):
    """Texts that quote the marks of an earlier rendering are only text."""
    seen: list[str] = []
    own = with_template(tokenizer, tokenizer.chat_template)
    render = own.apply_chat_template
    own.apply_chat_template = lambda messages, *rest: (
        seen.extend(m["content"] for m in messages) or render(messages, *rest)
    )
    schema = Schema.read(SCHEMA, own, 8192)
    marks = [text for text in seen if len(text) == len(new_mark())]
    assert len(set(marks)) == len(marks) == 9
    quoted = " ".join(marks)
    prompt = schema.compile(f"<prompt schema='s'><a/><c/>{escape(quoted)}</prompt>")
    assert text_of(schema, prompt) == render([*SPOKEN, {"role": "user", "content": quoted}])
