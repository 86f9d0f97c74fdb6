"""Tiers over HTTP: what answers say of them, what is never stored, and tenants that are erased."""

import time

import httpx
import pytest

BOSS = {"authorization": "Bearer boss-secret-key"}
ALICE = {"authorization": "Bearer alice-secret-key"}
IDS = [(7 * i * i + 11) % 4000 + 100 for i in range(200)]


def ask(server, route="/generate", key=ALICE, **fields):
    body = {"/generate": {"input_ids": IDS, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}}.get(
        route, {"model": "tiny", "max_tokens": 1, "temperature": 0}
    )
    answer = httpx.post(f"{server.url}{route}", json=body | fields, headers=key, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(server, key=ALICE):
    return ask(server, key=key)["meta_info"]["cached_tokens"]


def act(server, method, path, key=BOSS, **options):
    return httpx.request(method, f"{server.url}{path}", headers=key, timeout=60, **options)


@pytest.fixture(autouse=True)
def empty(guarded):
    assert act(guarded, "POST", "/flush_cache?tiers=true").json()["success"]


def test_an_answer_says_which_tier_had_its_tokens(guarded):
    def written() -> int:
        return act(guarded, "GET", "/cache/tiers").json()["tiers"]["host"]["counts"].get("written", 0)

    before = written()
    assert "cached_tokens_by_tier" not in ask(guarded)["meta_info"]
    again = ask(guarded)["meta_info"]
    assert again["cached_tokens_by_tier"] == {"pool": again["cached_tokens"]}, "and now written to the host"
    until = time.monotonic() + 60
    while written() < before + 3:
        assert time.monotonic() < until
        time.sleep(0.05)
    act(guarded, "POST", "/flush_cache")
    meta = ask(guarded)["meta_info"]
    assert meta["cached_tokens_by_tier"] == {"pool": 0, "host": 192}
    assert meta["cached_tokens"] == 192
    tiers = act(guarded, "GET", "/cache/tiers").json()
    assert tiers["loaded_tokens_by_tier"]["host"] >= 192
    assert tiers["tiers"]["host"].keys() >= {"blocks", "bytes", "queued_bytes", "open", "counts"}
    text = act(guarded, "GET", "/metrics").text
    assert "ramet:tier_loaded_tokens_total{model_name=" in text
    assert "ramet:tier_open{model_name=" in text


def test_every_route_may_ask_that_nothing_is_stored(guarded):
    model = act(guarded, "GET", "/v1/models").json()["data"][0]["id"]
    for route, fields in (
        ("/generate", {}),
        ("/v1/completions", {"model": model, "prompt": IDS[::-1]}),
        ("/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": "so it is " * 20}]}),
    ):
        before = act(guarded, "GET", "/cache/stats").json()["pages_tree"]
        ask(guarded, route, **fields, cache={"store": False})
        assert act(guarded, "GET", "/cache/stats").json()["pages_tree"] == before, route
        ask(guarded, route, **fields)
        assert act(guarded, "GET", "/cache/stats").json()["pages_tree"] > before, route
    refused = act(guarded, "POST", "/generate", json={"text": "a", "cache": {"store": "no"}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "cache.store"


def test_a_tenant_is_erased(guarded):
    assert cached(guarded) == cached(guarded, BOSS) == 0
    assert cached(guarded) == cached(guarded, BOSS) == 192
    done = act(guarded, "DELETE", "/cache/tenants/alice").json()
    assert done["erased_tokens"] >= 192
    assert done["erased_blocks"].keys() == {"host"}
    assert cached(guarded) == 0
    assert cached(guarded, BOSS) == 192
    assert act(guarded, "DELETE", "/cache/tenants/eve").status_code == 404
    assert act(guarded, "DELETE", "/cache/tenants/boss", key=ALICE).status_code == 403
