"""The promises that all APIs share, over a live server."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import pytest

LONG = "Something that two tenants ask in the very same words, long enough for two pages of sixteen tokens. " * 2


@dataclass(frozen=True)
class Api:
    """How one API spells a request, its answer and its events.

    Attributes:
        shape: of the answer, by a JSON schema; `cached`: cached tokens of an answer.
    """

    path: str
    prompt: Callable[[str], dict]
    options: Callable[[int], dict]
    limit: str
    stop: Callable[[str], dict]
    shape: Callable[[dict], dict]
    text: Callable[[dict], str]
    cached: Callable[[dict], int]

    def body(self, text: str, tokens: int = 8, /, **fields) -> dict:
        return {"model": "smollm2", **self.prompt(text), **self.options(tokens), **fields}


def said(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}]}


def greedy(name: str) -> Callable[[int], dict]:
    return lambda tokens: {name: tokens, "temperature": 0}


def sampling(**more) -> dict:
    return {"sampling_params": {"max_new_tokens": 60, "temperature": 0, **more}}


def response_format(schema: dict) -> dict:
    """OpenAI's form, and that of others."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}}


APIS = {
    "generate": Api(
        "/generate",
        lambda text: {"text": text},
        lambda tokens: sampling(max_new_tokens=tokens),
        "sampling_params.max_new_tokens",
        lambda text: sampling(stop=text),
        lambda schema: sampling(json_schema=json.dumps(schema)),
        lambda answer: answer["text"],
        lambda answer: answer["meta_info"]["cached_tokens"],
    ),
    "completions": Api(
        "/v1/completions",
        lambda text: {"prompt": text},
        greedy("max_tokens"),
        "max_tokens",
        lambda text: {"stop": [text]},
        response_format,
        lambda answer: answer["choices"][0]["text"],
        lambda answer: answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    ),
    "chat": Api(
        "/v1/chat/completions",
        said,
        greedy("max_tokens"),
        "max_tokens",
        lambda text: {"stop": text},
        response_format,
        lambda answer: answer["choices"][0]["message"]["content"],
        lambda answer: answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    ),
    "messages": Api(
        "/v1/messages",
        said,
        greedy("max_tokens"),
        "max_tokens",
        lambda text: {"stop_sequences": ["never", text]},
        lambda schema: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        lambda answer: answer["content"][0]["text"],
        lambda answer: answer["usage"]["cache_read_input_tokens"],
    ),
    "responses": Api(
        "/v1/responses",
        lambda text: {"input": text},
        greedy("max_output_tokens"),
        "max_output_tokens",
        lambda text: {"stop": text},
        lambda schema: {"text": {"format": {"type": "json_schema", "name": "one", "schema": schema}}},
        lambda answer: answer["output"][0]["content"][0]["text"],
        lambda answer: answer["usage"]["input_tokens_details"]["cached_tokens"],
    ),
}


@pytest.fixture(params=APIS.values(), ids=APIS)
def each(request) -> Api:
    return request.param


def ask(client, api: Api, text: str, tokens: int = 8, /, **fields) -> dict:
    answer = client.post(api.path, json=api.body(text, tokens, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_stop_string_ends_the_answer(client, each):
    whole = each.text(ask(client, each, "Name a tree.", 60))
    stop = whole[8:11]
    assert each.text(ask(client, each, "Name a tree.", 60, **each.stop(stop))) == whole[: whole.index(stop)]


def test_an_answer_follows_a_schema(client, each):
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": {"n": digit}, "required": ["n"], "additionalProperties": False}
    assert json.loads(each.text(ask(client, each, "A number:", 60, **each.shape(schema)))).keys() == {"n"}


@pytest.mark.parametrize(
    ("name", "unlimited", "end"),
    [
        ("generate", sampling(max_new_tokens=None), ("length", "meta_info", "finish_reason", "type")),
        ("completions", {"max_tokens": -1}, ("length", "choices", 0, "finish_reason")),
        ("chat", {"max_tokens": None}, ("length", "choices", 0, "finish_reason")),
        ("messages", {}, ("model_context_window_exceeded", "stop_reason")),
        ("responses", {"max_output_tokens": None}, ("max_output_tokens", "incomplete_details", "reason")),
    ],
)
def test_an_answer_ends_with_the_context_and_says_so(guarded, name, unlimited, end):
    """Without a limit; Anthropic's messages must have one."""
    api, (expected, *at) = APIS[name], end
    with httpx.Client(base_url=guarded.url, headers={"x-api-key": "alice-secret-key"}, timeout=60) as alice:

        def ask(tokens: int, **fields) -> tuple[dict, int, int]:
            body = api.body("Count them. " * 100, tokens) | {"model": None, **fields}
            answer = alice.post(api.path, json=body).json()
            used = answer.get("usage") or answer["meta_info"]
            read = [used.get(f"cache_{what}_input_tokens", 0) for what in ("read", "creation")]
            prompt = used.get("prompt_tokens") or used["input_tokens"] + sum(read)
            return answer, prompt, used.get("completion_tokens") or used["output_tokens"]

        _, prompt, _ = ask(1)
        answer, again, output = ask(512 - prompt, **unlimited)
    assert again == prompt < 500
    assert again + output == 512
    for key in at:
        answer = answer[key]
    assert answer == expected


def test_salts_do_not_share(client, each):
    client.post("/flush_cache")
    found = [each.cached(ask(client, each, LONG, 1, cache_salt=salt)) for salt in ("one", "two", "one")]
    assert (found[0], found[1], found[2] > 0) == (0, 0, True)


def test_a_request_holds_what_it_used_within_the_server_s_bound(client, each):
    client.post("/flush_cache")
    ask(client, each, LONG, 1, cache={"hold_s": 0})
    assert client.get("/cache/stats").json()["pages_held"] == 0
    ask(client, each, LONG, 1, cache={"hold_s": 600})
    held = [node["held_s"] for node in client.get("/cache/tree").json()["nodes"]]
    assert all(0 < left <= 600 for left in held), held
    state = client.get("/cache/stats").json()
    assert (state["pages_held"], state["held_pages_lost"]) == (state["pages_tree"], 0)
    refused = client.post(each.path, json=each.body(LONG, 1, cache={"hold_s": 601}))
    assert (refused.status_code, "600 s at most" in refused.text, "cache.hold_s" in refused.text) == (400, True, True)
    client.post("/flush_cache")


def test_a_bad_field_is_named(client, each):
    for fields, status, param in (
        ({"modle": 1}, 400, "modle"),
        ({"model": "gpt-9"}, 404, "model"),
    ):
        answer = client.post(each.path, json=each.body("x") | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize("stream", [True, False])
def test_what_nobody_knows_is_left_out_and_named(client, each, stream):
    answer = client.post(each.path, json=each.body("x", 1, colour={"a": 1}, options={}, stream=stream))
    assert answer.status_code == 200, answer.text
    assert answer.text.count('"colour"') == 1 + (stream and each.path == "/v1/responses") * 2
    assert '"left_out":["colour"]' in answer.text


def test_an_answer_that_takes_too_long_is_one_status_on_all_routes(client, server, each):
    with server.paused():
        answer = client.post(each.path, json=each.body("x", 4, timeout_s=0.1))
    assert (answer.status_code, answer.json()["error"]["type"]) == (408, "timeout_error")


def test_more_tokens_than_the_context_has_may_be_asked_for(server, each):
    server.leave(each.path, each.body("x", 32_000))  # it waits, so it is not refused


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(client, server, each, stream):
    before = server.state()["aborted_requests"]
    after = server.leave(each.path, each.body("Count: 1, 2, 3,", 6000, stream=stream))["aborted_requests"]
    assert after - before == 1
