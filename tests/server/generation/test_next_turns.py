"""`--next-turn-tokens`: the history of a chat is computed as its next turn renders it, while the server is idle."""

import json
import time

import httpx
import pytest

from loadgen.http.bench_next_turn import TEMPLATE
from tests.server.conftest import PATIENCE_S, start, stop

THINKS, PLAIN = "<think>[a-z ]{80}</think>[a-z ]{120}", "[a-z ]{120}"
ASKED = {"role": "user", "content": "Tell me of the sea."}
PAGE = 16
FORMAT = {
    "type": "json_schema",
    "schema": {"type": "object", "properties": {"a": {"type": "string", "pattern": f"^{THINKS}$"}}, "required": ["a"]},
}
BOSS, ALICE = ({"Authorization": f"Bearer {name}-secret-key"} for name in ("boss", "alice"))


@pytest.fixture(scope="module")
def server(tiny_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("next-turns")
    (directory / "template").write_text(TEMPLATE)
    (directory / "keys").write_text("boss boss-secret-key admin\nalice alice-secret-key\n")
    options = ["--chat-template", directory / "template", "--api-keys", directory / "keys", "--pool-tokens", 4096]
    options += ["--next-turn-tokens", 1000, "--debug-invariants"]
    server = start(directory / "log", "--model", str(tiny_dir), *map(str, options))
    yield server
    assert stop(server) == 0
    assert "Traceback" not in (directory / "log").read_text()


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, headers=ALICE, timeout=60) as client:
        yield client


def state(client):
    return client.get("/server_info", headers=BOSS).json()["state"]


def wait_computed(client, before):
    """Wait until a next turn is computed; the number of its tokens."""
    last, now = before, before
    deadline_s = time.monotonic() + PATIENCE_S
    while now == before or now != last:
        time.sleep(0.05)
        last, now = now, state(client)["next_turn_tokens"]
        assert time.monotonic() < deadline_s
    return now - before


def read(usage):
    return usage["prompt_tokens_details"]["cached_tokens"]


def chat(client, messages, regex=THINKS, **fields):
    body = {"messages": messages, "max_tokens": 300, "structured_outputs": {"regex": regex}, **fields}
    return client.post("/v1/chat/completions", json=body).raise_for_status().json()


def test_thoughts_are_left_out_of_a_history_that_is_computed_while_idle(client):
    before, salt = state(client), {"cache_salt": "chat"}
    answer = chat(client, [ASKED], **salt)
    said, usage = answer["choices"][0]["message"], answer["usage"]
    computed = wait_computed(client, before["next_turn_tokens"])
    after = state(client)
    assert computed > 16
    assert after["requests"] - before["requests"] == 1
    assert after["prompt_tokens"] - before["prompt_tokens"] == usage["prompt_tokens"]
    assert "ramet:next_turn_tokens_total{" in client.get("/metrics", headers=BOSS).text
    second = chat(
        client, [ASKED, {"role": "assistant", "content": said["content"]}, ASKED], PLAIN, max_tokens=1, **salt
    )["usage"]
    # What is left is the question, and what fills no page.
    assert read(second) >= second["prompt_tokens"] - 24 - PAGE
    assert read(second) >= usage["prompt_tokens"] + computed - PAGE


@pytest.mark.parametrize(
    ("fields", "lengths"),
    [({}, (80, 120)), ({"include_reasoning": False}, (0, 120)), ({"separate_reasoning": False}, (0, 215))],
)
def test_reasoning_stands_beside_the_text(client, fields, lengths):
    body = {"messages": [ASKED], "seed": 1, "structured_outputs": {"regex": THINKS}, **fields}
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    said, usage = answer["choices"][0]["message"], answer["usage"]
    names = ("reasoning_content", "content")
    assert tuple(len(said.get(name, "")) for name in names) == lengths
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < thought < usage["completion_tokens"] if fields.get("separate_reasoning", True) else thought == 0
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        *events, last = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought
    deltas = [event["choices"][0]["delta"] for event in events]
    assert ["".join(delta.get(name, "") for delta in deltas) for name in names] == [said.get(n, "") for n in names]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [ASKED], "max_tokens": 300, "output_config": {"format": FORMAT}}),
        ("/v1/responses", {"input": [ASKED], "max_output_tokens": 300, "text": {"format": {**FORMAT, "name": "a"}}}),
    ],
)
def test_other_routes_have_next_turns_too(client, path, body):
    before, salt = state(client)["next_turn_tokens"], {"cache_salt": path}
    answer = client.post(path, json=body | salt).raise_for_status().json()
    assert wait_computed(client, before) > PAGE
    (message,) = answer["content"] if "content" in answer else answer["output"][0]["content"]
    usage = chat(
        client, [ASKED, {"role": "assistant", "content": message["text"]}, ASKED], PLAIN, max_tokens=1, **salt
    )["usage"]
    assert read(usage) >= usage["prompt_tokens"] - 24 - PAGE


def test_nothing_is_computed_where_it_would_not_pay_or_must_not_be_kept(client):
    before = state(client)["next_turn_tokens"]
    chat(client, [ASKED], PLAIN, cache_salt="plain")
    chat(client, [ASKED], cache_salt="n", n=2)
    chat(client, [ASKED], cache_salt="not stored", cache={"store": False})
    chat(client, [ASKED], cache_salt="cut", truncate_prompt_tokens=20)
    chat(client, [ASKED], cache_salt="cut", max_tokens=1)
    with client.stream("POST", "/v1/chat/completions", json={"messages": [ASKED], "stream": True}) as response:
        next(response.iter_lines())
    while state(client)["running"]:
        time.sleep(0.05)
    chat(client, [ASKED], cache_salt="last")
    assert 0 < wait_computed(client, before) < 200, "only the last one"


def test_an_erased_tenant_has_no_next_turn(client):
    chat(client, [ASKED], cache_salt="erased")
    client.delete("/cache/tenants/alice", headers=BOSS).raise_for_status()
    before = state(client)["next_turn_tokens"]
    client.post("/v1/chat/completions", json={"messages": [ASKED], "max_tokens": 1}, headers=BOSS).raise_for_status()
    assert state(client)["next_turn_tokens"] == before
    assert client.get("/cache/quota").json()["used_pages"] == 0
