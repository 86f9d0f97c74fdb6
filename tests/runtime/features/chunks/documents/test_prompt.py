"""Prompts with documents: their tokens, and documents in chat templates."""

from array import array
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import TemplateProcessing

from runtime.errors import InvalidRequest
from runtime.features.chunks.documents.prompt import MAX_DOCUMENTS, Document, Segments, in_messages
from runtime.models.marks import cut, new_mark
from runtime.models.tokenizer import Tokenizer
from tests.runtime.features.chunks.schemas.test_roles import DROPS, LAST_TURN, SHOUTS, SYSTEM_LAST, TURNS, TWICE

ROME, OSLO = Document("Rome is old."), Document("Oslo lies in the north.", "Oslo")
ESCAPES = "{% for m in messages %}{{ m['content'] | tojson }}{% endfor %}"
LINES = "{% for m in messages %}{{ m['content'].split() | join(' ') }}{% endfor %}"


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    return Tokenizer(tokenizer._fast, {}, template)


def parts_of(tokenizer: Tokenizer, prompt: Segments) -> list[str]:
    """The texts between the documents' borders, of the prompt's tokens."""
    found = prompt.tokenize(tokenizer, add_special_tokens=False)
    borders = [0, *(border for span in found.documents for border in span), len(found.tokens)]
    pieces = [found.tokens[a:b].tolist() for a, b in pairwise(borders)]
    return [tokenizer.decode(piece, skip_special_tokens=False) for piece in pieces]


texts = st.text("ab \n", max_size=6)
documents = st.builds(Document, st.text("ab .", min_size=1, max_size=6), st.sampled_from(["", "b"]))


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(texts | documents, max_size=8))
def test_tokens_of_a_document_do_not_depend_on_what_stands_around_it(parts, tokenizer):
    prompt = Segments(parts).tokenize(tokenizer)
    held = [part for part in parts if isinstance(part, Document)]
    found = [prompt.tokens[start:stop].tolist() for start, stop in prompt.documents]
    assert found == [tokenizer.encode(document.content) for document in held]
    whole = "".join(part if isinstance(part, str) else part.content for part in parts)
    assert tokenizer.decode(prompt.tokens.tolist(), skip_special_tokens=False) == whole
    if not held:
        assert prompt.tokens.tolist() == tokenizer.encode(whole)


def test_known_tokens_are_taken_as_they_are(tokenizer):
    stored = Document("Rome is old.", tokens=array("i", [5, 6]))
    prompt = Segments(["Read: ", stored, ROME]).tokenize(tokenizer)
    (start, stop), (second, end) = prompt.documents
    assert prompt.tokens[start:stop].tolist() == [5, 6]
    assert (stop, end) == (second, len(prompt.tokens))
    assert prompt.names == [ROME.id, ROME.id]


def test_a_bos_stands_before_all_documents(tokenizer):
    fast = FastTokenizer.from_str(tokenizer.to_json())
    fast.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    own = Tokenizer(fast, {}, None)
    for add, before in ((True, [1]), (False, [])):
        prompt = Segments([ROME, " So?"]).tokenize(own, add)
        assert prompt.tokens.tolist() == before + own.encode("Rome is old.", False) + own.encode(" So?", False)
        assert prompt.documents[0][0] == len(before)


def test_a_title_is_the_first_line_and_the_id_is_that_of_the_content(tokenizer):
    (_, inner, _) = parts_of(tokenizer, Segments([OSLO]))
    assert inner == "Oslo\nOslo lies in the north."
    assert Segments([OSLO, ROME]).tokenize(tokenizer).names == ["Oslo", ROME.id]
    assert ROME.id == Document("Rome is old.").id
    assert len({ROME.id, OSLO.id, Document(OSLO.text).id, Document(OSLO.content).id}) == 4


def test_documents_are_bounded_and_not_empty(tokenizer):
    assert len(Segments([ROME] * MAX_DOCUMENTS).tokenize(tokenizer).documents) == MAX_DOCUMENTS
    with pytest.raises(InvalidRequest, match=f"the limit is {MAX_DOCUMENTS}"):
        Segments([ROME] * (MAX_DOCUMENTS + 1)).tokenize(tokenizer)
    with pytest.raises(InvalidRequest, match="the document '' has no tokens"):
        Segments([Document("")]).tokenize(tokenizer)


# -- chat


def test_messages_without_documents_are_plain_text(tokenizer):
    talk = [{"role": "user", "content": "Hello"}]
    assert in_messages(talk, tokenizer.apply_chat_template) == tokenizer.apply_chat_template(talk)


@pytest.mark.parametrize("template", [None, TURNS], ids=["chatml", "turns"])
def test_a_conversation_with_documents_reads_as_one_of_texts(template, tokenizer):
    own = with_template(tokenizer, template or tokenizer.chat_template)
    talk = [
        {"role": "system", "content": ["Be kind.", ROME]},
        {"role": "user", "content": [OSLO, ROME, "Which is old?"]},
    ]
    spoken = [
        {"role": "system", "content": f"Be kind.\n{ROME.text}"},
        {"role": "user", "content": f"{OSLO.content}\n{ROME.text}\nWhich is old?"},
    ]
    parts = parts_of(own, in_messages(talk, own.apply_chat_template))
    assert parts[1::2] == [ROME.text, OSLO.content, ROME.text]
    assert "".join(parts) == own.apply_chat_template(spoken)


@pytest.mark.parametrize("template", [TWICE, DROPS, SYSTEM_LAST, SHOUTS, ESCAPES, LINES])
def test_a_template_that_would_change_documents_is_refused(template, tokenizer):
    talk = [{"role": "system", "content": [ROME]}, {"role": "user", "content": [OSLO, "Which?"]}]
    with pytest.raises(InvalidRequest, match="chat template changes documents") as error:
        in_messages(talk, with_template(tokenizer, template).apply_chat_template)
    assert error.value.param == "prompt"


def test_a_template_may_write_messages_as_it_likes(tokenizer):
    own = with_template(tokenizer, LAST_TURN)
    parts = parts_of(own, in_messages([{"role": "user", "content": [ROME]}], own.apply_chat_template))
    assert parts == ["user*", ROME.text, ""]


def test_marks_cannot_be_guessed_and_each_is_there_once():
    one, two = new_mark(), new_mark()
    assert one != two
    assert cut(f"a{one}b{two}", [one, two]) == ["a", "b", ""]
    assert cut("a", []) == ["a"]
    for text in (one, two + one, one + two + one, one + two + two, f"{one}{two[:-1]}"):
        assert cut(text, [one, two]) is None
