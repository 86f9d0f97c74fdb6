"""The dashboard's routes: their data, who may see it, and changes of single nodes."""

import json
import time

import httpx
import pytest

from tests.server.conftest import PATIENCE_S
from tests.server.sglang.test_generate import ENDLESS


def listen(url, until, headers=None, seconds=PATIENCE_S):
    """Events of the live stream until one fulfils a condition; that one."""
    deadline = time.monotonic() + seconds
    with httpx.stream("GET", f"{url}/dashboard/events", headers=headers, timeout=seconds) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: ") and until(event := json.loads(line[6:])):
                return event
            assert time.monotonic() < deadline
    raise AssertionError("the stream ended")


def blocks(url, wanted=lambda block: True, headers=None):
    """The blocks of the first tree in which one is wanted, and that one."""

    def found(event):
        return any(block["id"] >= 0 and wanted(block) for block in event.get("tree", {}).get("blocks", ()))

    told = listen(url, found, headers)["tree"]["blocks"]
    return told, next(block for block in told if block["id"] >= 0 and wanted(block))


def flush(client):
    """Empty the cache, as soon as the requests of earlier tests have ended, with what they had kept for hours."""
    while client.post("/flush_cache?pins=true").raise_for_status().json()["live_tokens"]:
        time.sleep(0.02)


def generate(client, text, **more):
    body = {"text": text, "sampling_params": {"max_new_tokens": 2, "temperature": 0}, **more}
    return client.post("/generate", json=body).raise_for_status().json()


SAYING = (
    "Five lighthouse keepers counted forty seven ships before the fog came in, and then none at all for nine days. "
)


@pytest.mark.parametrize("path", ["/", "/dashboard", "/docs"])
def test_the_page_loads_nothing_from_elsewhere(client, path):
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]
    outside = [part for part in answer.text.split('"') if part.startswith(("http:", "https:", "//"))]
    assert outside == ["http://www.w3.org/2000/svg"]


def test_the_stream_tells_figures_and_tree(client, server):
    client.post("/flush_cache")
    generate(client, SAYING)
    assert listen(server.url, lambda e: "model" in e)["model"]["page_size"] == 16
    figures = listen(server.url, lambda e: "figures" in e)["figures"]
    assert figures["pages_total"] == figures["pages_free"] + figures["pages_tree"] + figures["pages_private"]
    assert figures["ttft_p50_s"] > 0
    told, block = blocks(server.url, lambda b: b["preview"].startswith("Five lighthouse"))
    assert (block["start"], block["tokens"] % 16) == (0, 0)
    root = told[block["parent"]]
    assert (root["id"], root["parent"]) == (-1, None)
    assert root["total"] >= block["total"] >= block["tokens"] > 0


def test_a_running_request_is_listed_without_its_text(client, server):
    body = {"text": "Quokkas never", "rid": "shown-request", "stream": True,
            "sampling_params": ENDLESS}  # fmt: skip
    with client.stream("POST", "/generate", json=body) as answer:
        lines = answer.iter_lines()  # dropped, it would end the stream
        next(lines)
        event = listen(
            server.url, lambda e: any(r["rid"] == "shown-request" for r in e.get("figures", {}).get("requests", ()))
        )
    (request,) = [r for r in event["figures"]["requests"] if r["rid"] == "shown-request"]
    assert request["prompt_tokens"] > 0
    assert request["max_tokens"] == ENDLESS["max_new_tokens"]
    assert request["phase"] in ("prefill", "decode")
    assert "Quokkas" not in json.dumps(event)


def test_a_node_is_pinned_unpinned_and_evicted(client, server):
    flush(client)
    generate(client, SAYING * 2)
    _, block = blocks(server.url, lambda b: b["start"] == 0)
    path, start = f"/cache/nodes/{block['id']}", {"start": block["start"]}
    pinned = client.post(f"{path}/pin", params=start).raise_for_status().json()
    assert pinned["tokens"] == block["tokens"]
    assert client.post("/flush_cache").json()["live_tokens"] == block["tokens"]
    assert client.delete(path, params=start).json() == {"evicted_tokens": 0}
    _, block = blocks(server.url, lambda b: b["pinned"])
    assert client.delete(f"{path}/pin", params=start).json() == {"unpinned": [pinned["id"]]}
    assert client.get("/cache/pins").json()["pins"] == []
    assert client.delete(path, params=start).json() == {"evicted_tokens": block["tokens"]}
    assert generate(client, SAYING * 2)["meta_info"]["cached_tokens"] == 0
    client.post("/flush_cache")


def test_a_node_that_is_gone_or_another_is_refused(client, server):
    flush(client)
    generate(client, SAYING)
    _, block = blocks(server.url)
    path = f"/cache/nodes/{block['id']}"
    for wrong in (f"{path}?start={block['start'] + 16}", "/cache/nodes/100000000?start=0"):
        pins = wrong.replace("?", "/pin?")
        for method, where in (("POST", pins), ("DELETE", pins), ("DELETE", wrong), ("GET", wrong)):
            answer = client.request(method, where)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "node_not_found")
    for node in (path, f"{path}?start=-1", f"{path}?start={10**20}", f"/cache/nodes/{10**20}?start=0"):
        assert client.delete(node).status_code == client.get(node).status_code == 400, node
    assert generate(client, SAYING)["meta_info"]["cached_tokens"] > 0


def late_with_tokens(client, server, body):
    """Let a request exceed its time; its entry, with time enough for some tokens, however slow the machine is."""
    for timeout_s in (1.5, 15.5, 60.5):
        rid = f"late by {timeout_s} s"
        assert client.post("/generate", json={**body, "rid": rid, "timeout_s": timeout_s}).status_code == 408
        told = listen(
            server.url, lambda event, rid=rid: f'"{rid}"' in json.dumps(event.get("figures", {}).get("finished"))
        )
        (late,) = (entry for entry in told["figures"]["finished"] if entry["rid"] == rid)
        if late["output_tokens"]:
            assert f"longer than its {timeout_s} s" in late["error"]
            return late
    raise AssertionError("not a token within a minute")


def test_requests_without_an_end_are_listed_with_the_reason(client, server):
    body = {"text": "Quokkas never", "sampling_params": ENDLESS}
    late = late_with_tokens(client, server, body)
    far = {"input_ids": [5] * 10_000, "rid": "too-long", "sampling_params": {"max_new_tokens": 1}}
    assert client.post("/generate", json=far).status_code == 400
    with client.stream("POST", "/generate", json={**body, "rid": "left", "stream": True}) as answer:
        lines = answer.iter_lines()  # dropped, it would end the stream
        next(lines)
    server.wait(lambda state: state["running"] == 0)
    names = {late["rid"]: "timeout_error", "too-long": "invalid_request_error", "left": "client left"}

    def told(event):
        ends = {entry["rid"]: entry["finish"] for entry in event.get("figures", {}).get("finished", ())}
        return names.items() <= ends.items()

    assert listen(server.url, told)
    assert late["e2e_s"] > 0


def test_only_so_many_may_look(client, server):
    streams, deadline = [], time.monotonic() + PATIENCE_S
    try:
        while len(streams) < 32:  # those who have just gone may still count
            streams.append(client.stream("GET", "/dashboard/events"))
            if streams[-1].__enter__().status_code != 200:
                streams.pop().__exit__(None, None, None)
            assert time.monotonic() < deadline
        assert httpx.get(f"{server.url}/dashboard/events", timeout=30).status_code == 503
    finally:
        for stream in streams:
            stream.__exit__(None, None, None)
    while True:  # the server learns of their going a moment later
        with client.stream("GET", "/dashboard/events") as answer:
            if answer.status_code == 200:
                break
        assert time.monotonic() < deadline


def test_a_key_sees_its_own_alone(guarded):
    """Its nodes without their text, its requests and its quota; not those of others, and no figures of the server."""
    alice, boss = ({"Authorization": f"Bearer {name}-secret-key"} for name in ("alice", "boss"))
    for headers, text in ((alice, SAYING), (boss, "Nobody may see this. " * 9)):
        body = {"text": text, "sampling_params": {"max_new_tokens": 1}}
        httpx.post(f"{guarded.url}/generate", headers=headers, timeout=60, json=body).raise_for_status()
    event = listen(guarded.url, lambda e: e.get("figures", {}).get("finished"), alice)
    assert {request["tenant"] for request in event["figures"]["finished"]} == {"alice"}
    assert event["figures"]["quota"]["tenant"] == "alice"
    assert "pages_total" not in event["figures"]
    shown, _ = blocks(guarded.url, headers=alice)
    assert {(block["tenant"], block["preview"]) for block in shown} == {("alice", "")}
    everything, _ = blocks(guarded.url, headers=boss)
    assert {block["tenant"] for block in everything} == {"alice", "boss"}
    assert httpx.get(f"{guarded.url}/cache/nodes/0?start=0", headers=alice).status_code == 403


def test_the_server_keeps_the_figures_of_an_hour(client, server):
    generate(client, SAYING)
    server.wait(lambda state: state["requests"] > 0)
    history = listen(server.url, lambda e: e.get("history"))["history"]
    figures = listen(server.url, lambda e: "figures" in e)["figures"]
    assert all(sample.keys() == figures.keys() - {"requests", "finished"} for sample in history)
    assert [one["at_s"] for one in history] == sorted(one["at_s"] for one in history)
    assert history[-1]["pages_total"] == figures["pages_total"]


def test_misses_are_counted_by_reason_and_salts_are_named(client, server):
    client.post("/flush_cache")
    blocks_seen = listen(server.url, lambda e: "tree" in e)
    assert blocks_seen
    before = client.get("/cache/stats").json()["missed_tokens_by_reason"]
    for _ in range(2):
        tokens = generate(client, SAYING * 2, cache_salt="pepper")["meta_info"]["prompt_tokens"]
    client.post("/flush_cache")
    generate(client, SAYING * 2, cache_salt="pepper")
    after = client.get("/cache/stats").json()["missed_tokens_by_reason"]
    grown = {reason: after[reason] - before.get(reason, 0) for reason in after if after[reason] != before.get(reason)}
    assert grown == {"new": tokens, "flush": tokens}
    told, block = blocks(server.url, lambda b: b["preview"].startswith("Five lighthouse"))
    assert block["salt"] == told[block["parent"]]["salt"] == "pepper"
    client.post("/flush_cache")
