"""The store of responses: all that is kept is counted, for one account and for all."""

import httpx
import pytest

from server.errors import NotFound
from server.generation import store as room
from server.generation.store import ResponseStore, StoredResponse

ALICE = {"Authorization": "Bearer alice-secret-key"}


def stored(text: bytes, items: bytes = b"[]") -> StoredResponse:
    return StoredResponse(b'{"output":[],"user":"' + text + b'"}', items, {})


def kept(store: ResponseStore, account: str, names: str) -> str:
    """Those of the names that are still there."""

    def is_kept(name: str) -> bool:
        try:
            return bool(store.get(account, name).body)
        except NotFound:
            return False

    return "".join(filter(is_kept, names))


def test_an_account_keeps_what_was_used_last(monkeypatch):
    monkeypatch.setattr(room, "MOST_BYTES", 1000)
    monkeypatch.setattr(room, "MOST", 10)
    store = ResponseStore()
    for name, new in (("a", stored(b"x" * 300)), ("b", stored(b"", b"x" * 300)), ("c", stored(b"x" * 200))):
        store.add("alice", name, new)
    assert store.get("alice", "a")
    store.add("alice", "d", stored(b"x" * 250))
    assert kept(store, "alice", "abcd") == "acd"
    store.add("alice", "e", stored(b"x" * 1000))
    assert kept(store, "alice", "acde") == "acd", "no account keeps what is larger than its share"
    for name in "fghijklmno":
        store.add("alice", name, stored(b""))
    assert kept(store, "alice", "acdfghijklmno") == "fghijklmno"


def test_the_account_with_the_most_gives_way(monkeypatch):
    monkeypatch.setattr(room, "MOST_BYTES", 1000)
    monkeypatch.setattr(room, "MOST_BYTES_IN_ALL", 1500)
    store = ResponseStore()
    for name in "ab":
        store.add("alice", name, stored(b"x" * 400))
    store.add("bob", "a", stored(b"x" * 400))
    store.add("carol", "a", stored(b"x" * 400))
    assert [kept(store, account, "ab") for account in ("alice", "bob", "carol")] == ["b", "a", "a"]


def test_time_ends_a_response():
    now = [0.0]
    store = ResponseStore(lambda: now[0])
    store.add("alice", "a", stored(b""))
    now[0] = room.TTL_S - 1
    assert kept(store, "alice", "a")
    now[0] += 1
    assert not kept(store, "alice", "a")


def test_what_a_request_brings_is_counted(guarded):
    def ask(**more) -> httpx.Response:
        asked = {"input": "x", "max_output_tokens": 1, "tool_choice": "none", **more}
        return httpx.post(f"{guarded.url}/v1/responses", json=asked, headers=ALICE)

    def has(response: httpx.Response) -> bool:
        return httpx.get(f"{guarded.url}/v1/responses/{response.json()['id']}", headers=ALICE).status_code == 200

    tools = [{"type": "function", "name": "f", "description": "x" * 7_900_000}]
    thoughts = [{"type": "reasoning", "summary": [{"text": "x" * 7_900_000}]}, {"role": "user", "content": "x"}]
    several = [ask(tools=tools), ask(input=thoughts), ask(tools=tools), ask(input=thoughts)]
    assert all(map(has, several))
    several.append(ask(tools=tools))
    assert [has(response) for response in several] == [False, True, True, True, True]


@pytest.mark.parametrize(
    ("field", "most", "too_much"),
    [
        ("user", "x" * 64, "x" * 65),
        ("prompt_cache_key", "x" * 64, "x" * 65),
        ("metadata", {f"{i:064}": "x" * 512 for i in range(16)}, {str(i): "" for i in range(17)}),
        ("metadata", {"a": ""}, {"a": "x" * 513}),
        ("metadata", {}, {"x" * 65: ""}),
        ("metadata", {}, {"a": {"b": "c"}}),
    ],
)
def test_labels_are_short(guarded, field, most, too_much):
    def ask(value) -> httpx.Response:
        asked = {"input": "x", "max_output_tokens": 1, field: value}
        return httpx.post(f"{guarded.url}/v1/responses", json=asked, headers=ALICE)

    assert ask(most).json()[field] == most
    refused = ask(too_much)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert "64" in refused.json()["error"]["message"]
