"""API keys: every route wants one, tenants share nothing, over a live server."""

import http.client
import threading
import time
from types import SimpleNamespace

import httpx
import pytest

from runtime.config import Config
from server.app import create_app
from tests.server.conftest import start, stop

KEYS = {
    "alice": "alice-secret-key",
    "bob": "bob-secret-key",
    "carol": "carol-secret-key",
    "root": "root-secret-key",
    "scraper": "scraper-secret-key",
}
PROMPT = {"input_ids": list(range(100, 213)), "sampling_params": {"max_new_tokens": 1}}


@pytest.fixture(scope="module")
def guarded(tiny_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("auth")
    (directory / "keys").write_text(
        f"# tenants\nalice {KEYS['alice']} public\nbob {KEYS['bob']} quota=10 max_priority=5\n\n"
        f"carol {KEYS['carol']} public quota=10\nroot {KEYS['root']} admin public\nscraper {KEYS['scraper']} metrics\n"
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


# The keys that each route needs, for every route that there is.
OPEN = {"/health", "/v1/health", "/ping", "/ready", "/", "/dashboard", "/docs"}
ANY_KEY = {
    "/generate", "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{name:path}",
    "/v1/schemas", "/v1/schemas/{schema_id}", "/v1/documents", "/v1/documents/{document_id}",
    "/tokenize", "/detokenize", "/health_generate", "/model_info", "/get_model_info", "/cache/tree", "/cache/search",
    "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/tokenizer_info", "/version",
    "/models", "/props", "/apply-template",
    "/v1/responses", "/v1/responses/input_tokens", "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/input_items", "/v1/responses/{response_id}/cancel", "/v1/responses/compact",
    "/infill", "/openapi.json", "/cache/quota", "/dashboard/events",
}  # fmt: skip
ADMIN = {
    "/cache/pin", "/cache/pins", "/cache/pins/{pin_id}", "/cache/nodes/{page}", "/cache/nodes/{page}/pin",
    "/cache/stats", "/server_info", "/get_server_info", "/metrics",
    "/cache/tiers", "/cache/tenants/{name}", "/v1/loads", "/get_load",
    "/flush_cache", "/abort_request", "/pause", "/resume", "/shutdown",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
}  # fmt: skip


def test_every_route_has_its_guard(ask):
    engine = SimpleNamespace(info=SimpleNamespace(name="x"))
    routes = [(path, methods) for path, methods in flat(create_app(engine, Config(), []).routes)]
    assert {path for path, _ in routes} == OPEN | ANY_KEY | ADMIN
    for path, methods in routes:
        for method in methods:
            where = (method, path.replace("{page}", "1"))
            if path in OPEN:
                assert ask(None, *where).status_code in (200, 405), path
                continue
            for stranger in (None, "wrong-key-of-some-length"):
                answer = ask(stranger, *where)
                assert answer.status_code == 401, path
                assert answer.headers["www-authenticate"] == "Bearer"
                assert method == "HEAD" or answer.json()["error"]["type"] == "authentication_error"
            if path in ADMIN:
                answer = ask("alice", *where)
                assert answer.status_code == 403, path
                assert method == "HEAD" or answer.json()["error"]["type"] == "permission_error"
            if path != "/metrics":
                assert ask("scraper", *where).status_code == 403, path
    assert ask("scraper", "GET", "/no/such/route").status_code == 403
    assert "sglang:" in ask("scraper", "GET", "/metrics").text
    assert ask(None, "GET", "/no/such/route").status_code == 401
    assert ask("root", "GET", "/server_info").status_code == 200


DOCUMENT = {"text": "The market of Tor is held on Thursdays, and that of Sela on Fridays. " * 5}
SCHEMA = {"pml": "<schema name='own'>The market of Tor is held on Thursdays.</schema>", "encode": True}


@pytest.mark.parametrize(("kind", "made"), [("document", DOCUMENT), ("schema", SCHEMA)])
def test_an_object_of_another_key_does_not_exist_and_its_kv_is_not_read(ask, kind, made):
    first = ask("alice", path=f"/v1/{kind}s", **made).json()
    path, sampling = f"/v1/{kind}s/{first['id']}", {"max_new_tokens": 1}
    named = {"segments": [{"document": {"id": first["id"]}}, {"text": " When?"}], "reuse": {"method": "pie"}}
    chat = {"messages": [{"role": "user", "content": "When?"}], "documents": [{"id": first["id"]}]}
    if kind == "schema":
        named = {"pml": "<prompt schema='own'>When?</prompt>"}
        chat = {"messages": [{"role": "user", "content": "When?"}], "schema": "own"}
    chat["model"] = ask("bob", "GET", "/v1/models").json()["data"][0]["id"]
    for asked in (
        ("GET", path, {}),
        ("DELETE", path, {}),
        ("POST", "/generate", {**named, "sampling_params": sampling}),
        ("POST", "/v1/chat/completions", chat),
    ):
        answer = ask("bob", asked[0], asked[1], **asked[2])
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, f"{kind}_not_found"), asked
    assert ask("bob", "GET", f"/v1/{kind}s").json()["data"] == []
    given = made | {"encode": False}
    own = ask("bob", path=f"/v1/{kind}s", **given).json()
    assert own["id"] == first["id"]
    for who, nothing_computed in (("alice", True), ("bob", False)):
        reuse = ask(who, **named, sampling_params=sampling).json()["meta_info"]["reuse"]
        computed = reuse["computed_modules" if kind == "schema" else "computed_documents"]
        assert (computed == []) == nothing_computed
    assert ask("bob", path=f"/v1/{kind}s", **made, pin=True).status_code == 403
    assert ask("bob", path=f"/v1/{kind}s", **made, cache_scope="public").status_code == 403
    assert ask("bob", "DELETE", path).status_code == 200
    assert ask("alice", "GET", path).status_code == 200


def test_the_document_says_who_needs_a_key(ask):
    document = ask("alice", "GET", "/openapi.json").json()
    assert document["security"] == [{"bearer": []}, {"key": []}]
    assert document["components"]["securitySchemes"].keys() == {"bearer", "key"}
    free = {path for path, methods in document["paths"].items() for o in methods.values() if o.get("security") == []}
    assert free == {"/health", "/ready"}


def flat(routes):
    """Paths and methods of an application's routes, those of routers among them."""
    for route in routes:
        if (router := getattr(route, "original_router", None)) is not None:
            yield from flat(router.routes)
        else:
            yield route.path, route.methods


def test_no_other_spelling_of_a_path_gets_around_its_guard(guarded):
    def ask(path: str, **headers: str) -> int:
        connection = http.client.HTTPConnection(guarded.url.removeprefix("http://"), timeout=60)
        connection.request("POST", path, headers=headers)
        return connection.getresponse().status

    for path in (
        "/%66lush_cache",
        "/flush_cache%00",
        "/flush_cache/",
        "/flush_cache;x",
        "/cache/../flush_cache",
        "//flush_cache",
        "/FLUSH_CACHE",
        "/v1/../flush_cache",
        "http://x/flush_cache",
        "/health/../flush_cache",
        "/health/",
        "/dashboard/../flush_cache",
        "*",
    ):
        assert ask(path) == 401, path
        assert ask(path, Authorization=f"Bearer {KEYS['alice']}") in (403, 404), path


def test_a_request_id_is_of_its_key_alone(ask):
    """Whether another tenant's id is in use says something about it, and would keep it from being used."""
    found = []
    body = {"rid": "mine", "text": "x", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    ask("root", path="/pause")
    thread = threading.Thread(target=lambda: found.append(ask("alice", **body)))
    thread.start()
    while not ask("root", "GET", "/server_info").json()["state"]["waiting"]:
        time.sleep(0.02)
    taken = ask("alice", **body)
    assert (taken.status_code, taken.json()["error"]["param"]) == (400, "rid")
    other = threading.Thread(target=lambda: found.append(ask("bob", **body)))
    other.start()
    while ask("root", "GET", "/server_info").json()["state"]["waiting"] < 2:
        assert other.is_alive(), found
        time.sleep(0.02)
    ask("root", path="/abort_request", rid="mine")
    ask("root", path="/resume")
    for waiting in (thread, other):
        waiting.join(60)
    assert [answer.json()["meta_info"]["finish_reason"]["type"] for answer in found] == ["abort", "abort"]


def test_only_admins_learn_where_files_lie(ask, tiny_dir):
    assert ask("root", "GET", "/model_info").json()["model_path"] == str(tiny_dir)
    assert str(tiny_dir.parent) not in ask("alice", "GET", "/model_info").text


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
    other = {**PROMPT, "input_ids": [*range(100, 180), *range(7, 40)]}
    told = ask("root", **other, explain=True, cache_scope="public").json()["meta_info"]["explain"]
    assert told["parting"]["there"] is None, "what others asked in public is not shown"
    answer = ask("bob", **PROMPT, cache_scope="public")
    assert answer.status_code == 403
    assert answer.json()["error"]["param"] == "cache_scope"


CHAT = {"model": "{}", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", PROMPT),
        ("/v1/completions", {"model": "{}", "prompt": "x", "max_tokens": 1}),
        ("/v1/chat/completions", CHAT),
    ],
)
def test_nobody_overtakes_others_unless_the_key_may(ask, path, body):
    name = ask("root", "GET", "/v1/models").json()["data"][0]["id"]
    body = {**body, "model": name} if "model" in body else body
    allowed = {"alice": (-7, 0), "bob": (-7, 0, 5), "root": (1 << 30,)}
    for who, priorities in allowed.items():
        for priority in priorities:
            assert ask(who, path=path, **body, priority=priority).status_code == 200, (who, priority)
    for who, priority in (("alice", 1), ("bob", 6), ("bob", 1 << 30)):
        answer = ask(who, path=path, **body, priority=priority)
        assert (answer.status_code, answer.json()["error"]["param"]) == (403, "priority")
        assert "up to" in answer.json()["error"]["message"]


def test_an_admin_pins_for_a_tenant(ask):
    ask("root", path="/flush_cache")
    body = {"input_ids": PROMPT["input_ids"], "tenant": "bob"}
    pin = ask("root", path="/cache/pin", **body).json()
    ask("root", path="/flush_cache")
    assert cached(ask("bob", **PROMPT)) == 112
    assert cached(ask("alice", **PROMPT)) == 0
    listed = ask("root", "GET", "/cache/pins").json()["pins"]
    assert [(one["id"], one["tenant"]) for one in (pin, *listed)] == [(pin["id"], "bob")] * 2
    assert ask("root", "DELETE", f"/cache/pins/{pin['id']}").status_code == 200
    given = body | {"tenant": "nobody"}
    assert ask("root", path="/cache/pin", **given).status_code == 404


def test_a_quota_binds_its_tenant_alone(ask):
    ask("root", path="/flush_cache")
    prompts = [{**PROMPT, "input_ids": [200 + 200 * i + j for j in range(97)]} for i in range(4)]
    for prompt in prompts:
        for who in ("alice", "bob"):
            ask(who, **prompt)
    assert [cached(ask("alice", **prompt)) for prompt in prompts] == [96] * 4
    nodes = ask("bob", "GET", "/cache/tree").json()["nodes"]
    pages = sum(node["pages"] for node in nodes)
    assert 6 < pages <= 10, "of 24 that it computed"
    used = {"quota_pages": 10, "used_pages": pages, "quota_tokens": 160, "used_tokens": 16 * pages}
    assert ask("bob", "GET", "/cache/quota").json() == {"tenant": "bob", **used}
    assert ask("root", "GET", "/cache/quota?tenant=bob").json() == {"tenant": "bob", **used}
    assert ask("alice", "GET", "/cache/quota").json() == {
        "tenant": "alice",
        "quota_pages": None,
        "quota_tokens": None,
        "used_pages": 24,
        "used_tokens": 24 * 16,
    }
    assert ask("alice", "GET", "/cache/quota?tenant=bob").status_code == 403
    assert cached(ask("bob", **prompts[3])) == 96
    causes = ask("root", "GET", "/cache/stats").json()["evicted_tokens_by_cause"]
    assert causes["quota"] >= 14 * 16


def test_a_quota_binds_its_tenant_in_the_public_scope_too(ask):
    ask("root", path="/flush_cache")
    prompts = [{**PROMPT, "input_ids": [200 + 200 * i + j for j in range(97)]} for i in range(4)]
    for prompt in prompts:
        ask("carol", **prompt, cache_scope="public")
        ask("carol", **prompt)
        ask("carol", **prompt, cache_scope="public", cache_salt="a")
    nodes = ask("root", "GET", "/cache/tree").json()["nodes"]
    assert {node["tenant"] for node in nodes} <= {"carol", "public"}
    assert 6 < sum(node["pages"] for node in nodes) <= 10, "of 72 that it computed"
    assert cached(ask("alice", **prompts[3], cache_scope="public", cache_salt="a")) == 96, "who pays does not matter"
    for prompt in prompts:
        ask("alice", **prompt, cache_scope="public")
    assert [cached(ask("carol", **prompt, cache_scope="public")) for prompt in prompts] == [96] * 4
    pin = {"input_ids": [7] * 176, "tenant": "carol", "cache_scope": "public"}
    assert ask("root", path="/cache/pin", **pin).status_code == 409, "11 pages"


def test_ids_of_nodes_tell_nothing_of_other_keys(ask):
    """Pages are handed out in order; the same node has the same id in all answers to a key."""
    seen, prompt = [], {**PROMPT, "input_ids": [1000] * 40}
    for others in (0, 160):
        ask("root", path="/flush_cache")
        if others:
            given = PROMPT | {"input_ids": [9] * others}
            ask("alice", **given)
        ask("bob", **prompt)
        given = prompt | {"input_ids": [1000] * 32 + [1001] * 40}
        ask("bob", **given)
        nodes = ask("bob", "GET", "/cache/tree").json()["nodes"]
        ids = [node["id"] for node in nodes]
        assert {node["parent"] for node in nodes} <= {None, *ids}
        pages = [node["id"] for node in ask("root", "GET", "/cache/tree?tenant=bob").json()["nodes"]]
        assert ask("root", "GET", f"/cache/nodes/{pages[0]}?start=0").status_code == 200
        text = ask("bob", path="/detokenize", tokens=[1000]).json()["text"]
        found = ask("bob", path="/cache/search", text=text)
        assert {node["id"] for node in found.json()["nodes"]} <= set(ids)
        assert {page for node in found.json()["nodes"] for page in node["above"]} <= set(ids)
        seen.append((ids, pages))
    assert all(min(ids) > 100_000 > max(pages) for ids, pages in seen)


def test_everybody_sees_their_own_part_of_the_tree(ask):
    ask("root", path="/flush_cache")
    ask("alice", **PROMPT)
    given = PROMPT | {"input_ids": [5] * 50}
    ask("bob", **given)
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
