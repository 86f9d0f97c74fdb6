"""The store of schemas: names, accounts, times to live and bounds."""

import pytest

from runtime.features.chunks.schemas.markup import PmlError
from server.errors import Conflict, NotFound
from server.features.chunks.schemas import SchemaRequest, SchemaStore


@pytest.fixture
def schema(tokenizer):
    def schema(name: str, text: str = "Some text.", mode: str = "independent"):
        asked = SchemaRequest(pml=f"<schema name='{name}'>{text}</schema>", mode=mode)
        return asked.read(tokenizer, 8192)

    return schema


def test_a_schema_of_another_account_does_not_exist(schema):
    store = SchemaStore()
    store.put("alice", schema("a"), None)
    store.put("bob", schema("a", "Other text."), None)
    store.put("alice", schema("b"), None)
    errors = []
    for account, name in (("bob", "b"), ("bob", "never")):
        for act in (store.get, store.remove):
            with pytest.raises(NotFound) as error:
                act(account, name)
            errors.append(error.value.message.replace(name, "?"))
    assert len(set(errors)) == 1
    with pytest.raises(NotFound):
        store.compile("bob", "<prompt schema='b'>x</prompt>")
    assert store.compile("alice", "<prompt schema='b'>x</prompt>").rows == [3]
    with pytest.raises(PmlError):
        store.compile("alice", "<prompt schema='b'><c/>x</prompt>")
    assert [stored.schema.name for stored in store.of("alice")] == ["a", "b"]


def test_only_the_very_schema_is_dropped(schema):
    store = SchemaStore()
    old, _ = store.put("alice", schema("a"), None)
    store.remove("alice", "a")
    store.drop("alice", old)
    new, _ = store.put("alice", schema("a", "Other text."), None)
    store.drop("alice", old)
    assert store.of("alice") == [new]
    store.drop("alice", new)
    assert store.of("alice") == []


def test_a_schema_expires_and_the_same_one_again_renews_it(schema):
    now = 0.0
    store = SchemaStore(lambda: now)
    store.put("", schema("a"), 10)
    store.put("", schema("b"), 10)
    now = 9.0
    assert store.get("", "a").describe(now, ())["expires_in_s"] == 1
    store.put("", schema("b"), 10)
    now = 10.0
    with pytest.raises(NotFound):
        store.get("", "a")
    assert [stored.schema.name for stored in store.of("")] == ["b"]
    _, is_new = store.put("", schema("a", "Other text."), None)
    assert is_new
    now = 1e9
    assert [stored.schema.name for stored in store.of("")] == ["a"]


def test_an_account_is_bounded(schema, monkeypatch):
    monkeypatch.setattr(SchemaStore, "most", 2)
    store = SchemaStore()
    store.put("alice", schema("a"), None)
    store.put("alice", schema("b"), None)
    with pytest.raises(Conflict) as error:
        store.put("alice", schema("c"), None)
    assert error.value.code == "too_many_schemas"
    store.put("alice", schema("b"), None)
    monkeypatch.setattr(SchemaStore, "most_size", schema("c").size)
    store.put("bob", schema("c"), None)
    monkeypatch.undo()
    monkeypatch.setattr(SchemaStore, "most", 2)
    store.remove("alice", "a")
    store.put("alice", schema("c"), None)
    monkeypatch.setattr(SchemaStore, "most_size", 500)
    with pytest.raises(Conflict):
        store.put("bob", schema("d"), None)
    # A parameter of one token takes more memory than a token.
    monkeypatch.setattr(SchemaStore, "most_size", 2000)
    store.put("carol", schema("a", "<module name='b'>c</module>"), None)
    parameters = "".join(f"<param name='p{i}' len='1'/>" for i in range(20))
    with pytest.raises(Conflict):
        store.put("carol", schema("d", f"<module name='b'>{parameters}</module>"), None)
