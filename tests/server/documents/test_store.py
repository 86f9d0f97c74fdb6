"""The store of documents: ids, sizes and bounds; what all stores share is tested with schemas."""

from __future__ import annotations

import pytest

from runtime.errors import InvalidRequest
from runtime.models.tokenizer import Tokenizer
from runtime.reuse.fusion.prompt import Document
from server.documents.store import DocumentStore, make
from server.store import Conflict


@pytest.fixture(scope="module")
def stored(default_model_dir):
    tokenizer = Tokenizer.load(default_model_dir)

    def stored(text: str, title: str = ""):
        return make(Document(text, title), tokenizer, 64)

    return stored


def test_the_same_content_is_kept_once(stored):
    store = DocumentStore()
    first, is_new = store.put("alice", stored("Rome is old."), None)
    again, is_new_again = store.put("alice", stored("Rome is old."), None)
    assert (again is first, is_new, is_new_again) == (True, True, False)
    other, is_new = store.put("alice", stored("Rome is old.", "Rome"), None)
    assert is_new
    assert store.of("alice") == [first, other]


def test_a_stored_document_has_the_tokens_that_prompts_read(stored):
    one = stored("one two three four", "Numbers")
    assert one.document.tokens == one.alone.tokens
    message = one.encoding(128).reuse
    assert (message["documents"], message["chunk_tokens"]) == ([[0, one.num_tokens]], 128)
    one.lease.pins = ["one", "two"]
    shown = one.describe(0, {"two"})
    assert (shown["id"], shown["title"], shown["pins"]) == (one.id, "Numbers", ["two"])


def test_a_document_fits_into_the_context(stored):
    most = stored("a" + " b" * 62)
    assert most.num_tokens == 63
    for text, words in (("a" + " b" * 63, "has 64 tokens"), ("a" * 100_000, "has 100001 characters")):
        with pytest.raises(InvalidRequest, match=words) as error:
            stored(text)
        assert (error.value.param, error.value.code) == ("text", "context_length_exceeded")


def test_an_account_is_bounded(stored, monkeypatch):
    store = DocumentStore()
    monkeypatch.setattr(DocumentStore, "most", 2)
    store.put("alice", stored("one"), None)
    store.put("alice", stored("two"), None)
    with pytest.raises(Conflict) as error:
        store.put("alice", stored("three"), None)
    assert (error.value.status, error.value.code) == (409, "too_many_documents")
    store.put("alice", stored("two"), None)
    store.put("bob", stored("three"), None)
    long = stored("one " * 40)
    assert long.size >= 4 * (160 + 40)
    monkeypatch.setattr(DocumentStore, "most_size", 2 * long.size)
    store.put("carol", long, None)
    with pytest.raises(Conflict):
        store.put("carol", stored("two " * 41), None)
