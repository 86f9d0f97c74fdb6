"""System messages in templates that take them anywhere, first, or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.models.tokenizer import Tokenizer
from server.openai.roles import place_systems

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
