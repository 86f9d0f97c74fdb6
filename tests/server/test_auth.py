"""API keys: every route wants one, tenants share nothing, over a live server."""

from __future__ import annotations

import httpx
import pytest

from server.auth import ADMIN_PATHS, OWN_PATHS, BadKeys, Tenant, read_keys
from tests.server.conftest import start, stop

KEYS = {"alice": "alice-secret-key", "bob": "bob-secret-key", "root": "root-secret-key"}
PROMPT = {"input_ids": list(range(100, 213)), "sampling_params": {"max_new_tokens": 1}}


@pytest.fixture(scope="module")
def guarded(tiny_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("auth")
    (directory / "keys").write_text(
        f"# tenants\nalice {KEYS['alice']} public\nbob {KEYS['bob']} quota=10\n\nroot {KEYS['root']} admin public\n"
    )
    options = ["--model", str(tiny_dir), "--pool-tokens", "4096", "--api-keys", str(directory / "keys")]
    server = start(directory / "log", *options)
    yield server
    assert stop(server) == 0
    log = (directory / "log").read_text()
    assert not any(key in log for key in KEYS.values())


@pytest.fixture
def ask(guarded):
    def ask(who: str | None, method: str = "POST", path: str = "/generate", **body) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEYS.get(who, who)}"} if who else {}
        return httpx.request(method, guarded.url + path, json=body or None, headers=headers, timeout=60)

    return ask


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return answer.json()["meta_info"]["cached_tokens"]


def test_every_route_but_the_probes_wants_a_key(ask):
    routes = ask("root", "GET", "/openapi.json").json()["paths"]
    assert len(routes) > 15
    for path, methods in routes.items():
        for method in methods:
            answer = ask(None, method.upper(), path)
            if path in ("/health", "/ready"):
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401, path
            assert answer.json()["error"]["type"] == "authentication_error"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert ask("wrong-key-of-some-length", method.upper(), path).status_code == 401
    for path in ("/docs", "/openapi.json", "/no/such/route"):
        assert ask(None, "GET", path).status_code == 401


def test_admin_routes_want_an_admin(ask):
    routes = ask("root", "GET", "/openapi.json").json()["paths"]
    admin = [(m.upper(), p) for p, methods in routes.items() for m in methods if p.startswith(ADMIN_PATHS)]
    assert {"/cache/pin", "/flush_cache", "/abort_request", "/server_info", "/metrics"} <= {path for _, path in admin}
    for method, path in [(m, p) for m, p in admin if p not in OWN_PATHS]:
        answer = ask("alice", method, path)
        assert answer.status_code == 403, path
        assert answer.json()["error"]["type"] == "permission_error"
    assert ask("root", "GET", "/server_info").status_code == 200


def test_both_ways_to_show_a_key(guarded):
    for headers in ({"authorization": f"bearer {KEYS['bob']}"}, {"x-api-key": KEYS["bob"]}):
        assert httpx.get(f"{guarded.url}/v1/models", headers=headers).status_code == 200


def test_tenants_share_nothing(ask):
    ask("root", path="/flush_cache")

    def computed() -> int:
        return ask("root", "GET", "/server_info").json()["state"]["prefill_tokens"]

    assert cached(ask("alice", **PROMPT)) == 0
    before = computed()
    assert cached(ask("bob", **PROMPT)) == 0
    assert computed() - before == 113, "what the other tenant has cached saves no work, so it cannot be timed"
    assert cached(ask("alice", **PROMPT)) == cached(ask("bob", **PROMPT)) == 112
    assert cached(ask("alice", **PROMPT, cache_salt="project")) == 0


def test_public_prefixes_are_for_marked_keys(ask):
    ask("root", path="/flush_cache")
    assert cached(ask("alice", **PROMPT, cache_scope="public")) == 0
    assert cached(ask("root", **PROMPT, cache_scope="public")) == 112
    assert cached(ask("alice", **PROMPT)) == 0
    answer = ask("bob", **PROMPT, cache_scope="public")
    assert answer.status_code == 403
    assert answer.json()["error"]["param"] == "cache_scope"


def test_an_admin_pins_for_a_tenant(ask):
    ask("root", path="/flush_cache")
    body = {"input_ids": PROMPT["input_ids"], "tenant": "bob"}
    pin = ask("root", path="/cache/pin", **body).json()
    ask("root", path="/flush_cache")
    assert cached(ask("bob", **PROMPT)) == 112
    assert cached(ask("alice", **PROMPT)) == 0
    assert ask("root", "DELETE", f"/cache/pins/{pin['id']}").status_code == 200
    assert ask("root", path="/cache/pin", **{**body, "tenant": "nobody"}).status_code == 404


def test_a_quota_binds_its_tenant_alone(ask):
    ask("root", path="/flush_cache")
    prompts = [{**PROMPT, "input_ids": [200 + 200 * i + j for j in range(97)]} for i in range(4)]
    for prompt in prompts:
        for who in ("alice", "bob"):
            ask(who, **prompt)
    assert [cached(ask("alice", **prompt)) for prompt in prompts] == [96] * 4
    nodes = ask("bob", "GET", "/cache/tree").json()["nodes"]
    assert 6 < sum(node["pages"] for node in nodes) <= 10, "of 24 that it computed"
    assert cached(ask("bob", **prompts[3])) == 96
    causes = ask("root", "GET", "/cache/stats").json()["evicted_tokens_by_cause"]
    assert causes["quota"] >= 14 * 16


def test_everybody_sees_their_own_part_of_the_tree(ask):
    ask("root", path="/flush_cache")
    ask("alice", **PROMPT)
    ask("bob", **{**PROMPT, "input_ids": [5] * 50})
    (own,) = ask("bob", "GET", "/cache/tree").json()["nodes"]
    assert (own["tenant"], own["tokens"], own["parent"]) == ("bob", 48, None)
    assert "preview" not in own
    for query in ("?preview=8", "?tenant=alice"):
        assert ask("bob", "GET", "/cache/tree" + query).status_code == 403
    everything = ask("root", "GET", "/cache/tree?preview=4").json()
    assert {node["tenant"]: node["tokens"] for node in everything["nodes"]} == {"alice": 112, "bob": 48}
    assert all(node["preview"] for node in everything["nodes"])
    assert "/" not in str([node["tenant"] for node in everything["nodes"]])
    (alone,) = ask("root", "GET", "/cache/tree?tenant=alice").json()["nodes"]
    assert alone["tenant"] == "alice"
    page = ask("root", "GET", "/cache/tree?limit=1").json()
    assert (len(page["nodes"]), page["next_cursor"]) == (1, 1)
    assert ask("root", "GET", "/cache/tree?cursor=2").json() == {"nodes": [], "next_cursor": None}
    assert ask("root", "GET", "/cache/tree?limit=0").status_code == 400


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("alice short", "line"),
        ("alice", "line"),
        ("a 12345678 king", "line"),
        ("a 12345678 quota=0", "line"),
        ("a 12345678\na 87654321", "repeats"),
    ],
)
def test_key_files_that_cannot_be_meant(tmp_path, monkeypatch, text, word):
    monkeypatch.delenv("RAMET_API_KEYS", raising=False)
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(BadKeys, match=word):
        read_keys(path)
    path.write_text("# nothing\n")
    with pytest.raises(BadKeys, match="no key"):
        read_keys(path)
    with pytest.raises(BadKeys, match="cannot be read"):
        read_keys(tmp_path / "missing")


def test_keys_from_the_environment(monkeypatch):
    monkeypatch.setenv("RAMET_API_KEYS", "a 12345678 quota=64;b 87654321 admin")
    assert [(t.name, t.admin, t.quota) for t in read_keys(None)] == [("a", False, 64), ("b", True, None)]
    monkeypatch.delenv("RAMET_API_KEYS")
    assert read_keys(None) == []


def test_namespaces_cannot_be_forged():
    one, two = Tenant("one", b"1" * 32), Tenant("two", b"2" * 32)
    assert one.namespace("s", "private") != two.namespace("s", "private")
    assert one.namespace(f"../{'2' * 32}/s", "private") != two.namespace("s", "private")
