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


def test_prompt_and_answer_count_and_so_does_a_short_response(monkeypatch):
    monkeypatch.setattr(room, "MOST_BYTES", 1000)
    monkeypatch.setattr(room, "MOST", 10)
    store = ResponseStore()
    store.add("alice", "a", stored(b"x" * 500))
    store.add("alice", "b", stored(b"", b"x" * 500))
    assert kept(store, "alice", "ab") == "b"
    for name in "cdefghijklmno":
        store.add("alice", name, stored(b""))
    assert kept(store, "alice", "bcdefghijklmno") == "fghijklmno"


NAMES = {"response": "resp_1", "thread": "msg_1"}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("asked", NAMES)
def test_what_is_of_another_kind_or_account_is_not_there(kind, asked):
    store = ResponseStore()
    store.add("alice", NAMES[kind], stored(b""))
    for account in ("alice", "bob"):
        if (account, kind) == ("alice", asked):
            assert store.get(account, NAMES[kind], asked)
            continue
        with pytest.raises(NotFound) as error:
            store.get(account, NAMES[kind], asked)
        assert (error.value.param, error.value.code) == (asked, f"{asked}_not_found")


def test_a_response_is_removed_by_its_account_alone():
    store = ResponseStore()
    for name in NAMES.values():
        store.add("alice", name, stored(b""))
    for account, name in (("bob", "resp_1"), ("alice", "msg_1")):
        with pytest.raises(NotFound):
            store.remove(account, name)
    store.remove("alice", "resp_1")
    with pytest.raises(NotFound):
        store.get("alice", "resp_1")
    assert store.get("alice", "msg_1", "thread")


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
