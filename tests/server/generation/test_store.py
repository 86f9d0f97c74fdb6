"""The store of responses: all that is kept is counted, for one account and for all."""

from contextlib import nullcontext

import httpx
import pytest

from server.errors import Conflict, NotFound
from server.generation import store as room
from server.generation.store import ResponseStore, StoredResponse
from server.responses import conversations

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


NAMES = {"response": "resp_1", "conversation": "conv_1", "thread": "msg_1"}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("asked", NAMES)
def test_what_is_of_another_kind_or_account_is_not_there(kind, asked):
    store = ResponseStore()
    store.add("alice", NAMES[kind], stored(b""))
    for account in ("alice", "bob"):
        for use in (store.get, store.remove):
            if (account, kind) == ("alice", asked):
                use(account, NAMES[kind], asked)
                continue
            with pytest.raises(NotFound) as error:
                use(account, NAMES[kind], asked)
            assert (error.value.param, error.value.code) == (asked, f"{asked}_not_found")
    with nullcontext() if kind != asked else pytest.raises(NotFound):  # it was removed
        store.get("alice", NAMES[kind], kind)


def test_time_ends_a_response():
    now = [0.0]
    store = ResponseStore(lambda: now[0])
    store.add("alice", "a", stored(b""))
    now[0] = room.TTL_S - 1
    assert kept(store, "alice", "a")
    now[0] += 1
    assert not kept(store, "alice", "a")


def test_a_conversation_has_bounded_room(monkeypatch):
    monkeypatch.setattr(conversations, "_MOST_BYTES", 100)
    store = ResponseStore()
    store.add("alice", "conv_1", stored(b"x" * 30))
    conversations.check_room(store, "alice", "conv_1", b"y" * 40)
    for name, items in (("conv_1", b"y" * 60), (None, b"y" * 101)):
        with pytest.raises(Conflict, match="at most 100 bytes"):
            conversations.check_room(store, "alice", name, items)


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


def test_responses_at_once_do_not_fill_a_conversation_beyond_its_room(monkeypatch):
    monkeypatch.setattr(conversations, "_MOST_BYTES", 500)
    store = ResponseStore()
    store.add("alice", "conv_1", StoredResponse(b'{"id":"conv_1","output":[]}', b"[]", {}))
    item = {"id": "a", "content": "y" * 200}
    conversations.extend(store, "alice", "conv_1", [item])
    assert store.with_items("alice", {"a"})[0].answered == {"a": 223}
    with pytest.raises(Conflict, match="at most 500 bytes"):
        conversations.extend(store, "alice", "conv_1", [item] * 2)
    assert len(conversations.read_conversation(store, "alice", "conv_1")["output"]) == 1
