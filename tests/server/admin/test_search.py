"""The search for text in the tree: over borders of nodes, in namespaces that the key may see, in bounds."""

from array import array

import httpx
import pytest

from runtime.calls import TreeRun
from server.admin import search
from server.admin.search import _Finder
from tests.server.admin.test_dashboard import blocks

SAYING = "Eleven weavers sold one carpet twice before the market woke, and the buyers met each other at noon. " * 3


def generate(url, text, key=None, **more):
    body = {"text": text, "sampling_params": {"max_new_tokens": 1, "temperature": 0}, **more}
    httpx.post(f"{url}/generate", json=body, headers=headers_of(key), timeout=120).raise_for_status()


def headers_of(key):
    return {"Authorization": f"Bearer {key}"} if key else {}


def find(url, text, key=None, **more):
    return httpx.post(f"{url}/cache/search", json={"text": text, **more}, headers=headers_of(key), timeout=120)


def test_nodes_are_found_by_their_text_and_by_that_of_their_border(client, server):
    client.post("/flush_cache")
    for end in ("They left by boat, all nine of them, with the carpet. " * 2, "Nobody left by mule at all. " * 3):
        generate(server.url, SAYING + end)
    answer = find(server.url, "LEFT BY").json()
    assert answer["complete"]
    first, second = sorted(answer["nodes"], key=lambda node: "mule" in node["text"])
    assert ("They left by boat" in first["text"], "left by mule" in second["text"]) == (True, True)
    (top,) = find(server.url, "Eleven weavers").json()["nodes"]
    assert (top["start"], top["above"], top["hits"]) == (0, [], 1)
    assert first["above"] == second["above"] == [top["id"]]
    told, _ = blocks(server.url, lambda block: block["id"] == first["id"])
    assert {block["id"] for block in told} >= {top["id"], second["id"]}
    # The words around the place where both prompts part are in no node alone.
    path = f"/cache/nodes/{first['id']}?start={first['start']}&from=0"
    whole = client.get(path).json()["text"]
    assert whole.startswith(SAYING)
    border = client.get(path.replace("from=0", f"from={first['start']}")).json()["text"]
    place = len(whole) - len(border)
    assert first["id"] in [node["id"] for node in find(server.url, whole[place - 9 : place + 5]).json()["nodes"]]
    assert find(server.url, "no such words").json()["nodes"] == []
    assert len(find(server.url, "e", limit=1).json()["nodes"]) == 1
    assert not find(server.url, "e", limit=1).json()["complete"]
    for bad in ({"text": ""}, {"text": "x" * 257}, {"text": 1}, {"text": "a", "limit": 0}, {"text": "a", "what": 1}):
        assert client.post("/cache/search", json=bad).status_code == 400
    client.post("/flush_cache")


def test_a_key_finds_what_its_own_users_may_see(guarded):
    boss, alice = "boss-secret-key", "alice-secret-key"
    generate(guarded.url, SAYING, alice)
    generate(guarded.url, SAYING, alice, cache_salt="quiet")
    generate(guarded.url, SAYING, boss)

    def found(key, **more):
        return sorted(node["tenant"] for node in find(guarded.url, "carpet twice", key, **more).json()["nodes"])

    assert found(alice) == ["alice"]
    assert found(alice, cache_salt="quiet") == ["alice"]
    assert found(alice, cache_salt="other") == []
    assert found(boss) == ["alice", "alice", "boss"]
    assert found(boss, tenant="alice") == ["alice", "alice"]
    assert find(guarded.url, "carpet", alice, tenant="boss").status_code == 403
    assert find(guarded.url, "carpet", boss, tenant="eve").status_code == 404
    assert find(guarded.url, "carpet").status_code == 401


@pytest.fixture
def letters():
    """A tokenizer whose tokens are characters."""

    class Letters:
        def decode(self, ids, skip_special_tokens):
            return "".join(map(chr, ids))

    return Letters()


def run(page, parent, text):
    key = array("i", map(ord, text)).tobytes()
    return TreeRun(tenant="", id=page, parent=parent, start=0, key=key, hits=0, pinned=False)


def test_a_search_ends_at_its_bounds(letters, monkeypatch):
    monkeypatch.setattr(search, "_MOST_TOKENS", 8)
    finder = _Finder("ab", 9, letters)
    finder.look([run(1, None, "xxxa"), run(2, 1, "bbbb"), run(3, 2, "abab")])
    assert (finder.done, finder.tokens, [node.run.id for node in finder.found]) == (True, 8, [2])
    # A page that got another node while the walk went on makes no circle.
    finder = _Finder("ab", 9, letters)
    finder.look([run(1, 2, "a"), run(2, 1, "b")])
    assert finder.found[0].above == [2, 1]
