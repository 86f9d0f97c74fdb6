"""The store of documents: ids, sizes and bounds; what all stores share is tested with schemas."""

import pytest

from runtime.errors import InvalidRequest
from server.errors import Conflict
from server.features.chunks.documents import ChunkedKv, DocumentRequest, DocumentStore


@pytest.fixture(scope="module")
def stored(tokenizer):

    def stored(text: str, title: str = ""):
        return DocumentRequest(text=text, title=title or None).read(tokenizer, 64)

    return stored


def test_a_stored_document_has_the_tokens_that_prompts_read(stored):
    one = stored("one two three four " * 12, "Numbers")
    assert one.document.tokens == one.alone.tokens
    ask = one.encoding(ChunkedKv(chunk_tokens=16)).ask
    assert (ask.documents, ask.chunk_tokens) == ([(0, one.num_tokens)], 16)
    one.pins = ["one", "two"]
    shown = one.describe(0, {"two"})
    assert (shown["id"], shown["title"], shown["pins"]) == (one.id, "Numbers", ["two"])


def test_a_document_is_encoded_as_it_was_stored_or_as_the_server_reads(stored):
    one = stored("one two three four " * 12)
    led = []
    for named, default in ((None, "passages"), (None, "auto"), ("pie", "passages"), (None, "passages")):
        kv = ChunkedKv(method=named)
        one.is_for(kv, default)
        led.append([bool(one.encoding(asked).ask.lead) for asked in (kv, ChunkedKv(), ChunkedKv(method="passages"))])
    assert led == [[True, True, True], [True, True, True], [False, False, True], [False, False, True]]


def test_a_document_fits_into_the_context(stored):
    most = stored("a" + " b" * 62)
    assert most.num_tokens == 63
    for text, words in (("a" + " b" * 63, "has 64 tokens"), ("a" * 100_000, "has 100001 characters")):
        with pytest.raises(InvalidRequest, match=words) as error:
            stored(text)
        assert (error.value.param, error.value.code) == ("text", "context_length_exceeded")


def test_the_texts_and_tokens_of_an_account_are_bounded(stored, monkeypatch):
    store, long = DocumentStore(), stored("one " * 40)
    assert long.size >= 4 * (160 + 40)
    monkeypatch.setattr(DocumentStore, "most_size", 2 * long.size)
    store.put("carol", long, None)
    with pytest.raises(Conflict) as error:
        store.put("carol", stored("two " * 41), None)
    assert (error.value.status, error.value.code) == (409, "too_many_documents")
