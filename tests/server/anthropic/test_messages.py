"""`/v1/messages` on a live server: usage, events, errors; on the real model."""

import json
import random
import re
from types import SimpleNamespace

import httpx
import pytest
from msgspec.structs import replace

from runtime.errors import EngineDead, Overloaded, RametError, RateLimited
from runtime.frontend.output import Encoded, Output
from runtime.protocol import Breakpoint, CacheUsage, Finish
from server.anthropic.messages import MessageWriter
from server.anthropic.messages import usage as usage_of
from server.anthropic.prompt import chat_of
from server.anthropic.types import MessagesRequest
from server.errors import Forbidden, Unauthorized, error_response

MODEL = "smollm2"
FIVE, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
WORDS = ["root", "stem", "leaf", "bark", "ring", "seed", "twig", "moss", "fern", "vine"]


def text(said: str, control=None) -> dict:
    return {"type": "text", "text": said} | ({"cache_control": control} if control else {})


def said(seed: int, count: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count))


def body(*blocks: dict, **fields) -> dict:
    ask = [{"role": "user", "content": list(blocks) or "Name a tree."}]
    return {"model": MODEL, "max_tokens": 4, "temperature": 0, "messages": ask, **fields}


def send(client: httpx.Client, asked: dict) -> dict:
    answer = client.post("/v1/messages", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: httpx.Client, asked: dict) -> list[dict]:
    """The events of a stream, each under its own name."""
    answer = client.post("/v1/messages?beta=true", json={**asked, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def total(usage: dict) -> int:
    assert sum(usage["cache_creation"].values()) == usage["cache_creation_input_tokens"]
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]


def count(client: httpx.Client, asked: dict) -> int:
    fields = {name: asked[name] for name in ("model", "messages", "system", "tools", "thread") if name in asked}
    return client.post("/v1/messages/count_tokens", json=fields).json()["input_tokens"]


def let_go(client: httpx.Client) -> None:
    client.post("/flush_cache?pins=true")


@pytest.fixture(autouse=True)
def nothing_stays(client):
    """What is kept for hours would hold up the tests of other modules that share the server."""
    yield
    let_go(client)


def test_usage_adds_up_in_every_mix_of_breakpoints(client):
    draw = random.Random(4)
    salt = "mix"
    for turn in range(12):
        parts = [
            text(said(draw.randrange(3), draw.randrange(5, 60)), draw.choice([None, FIVE, HOUR])) for _ in range(3)
        ]
        system = [text(said(9, 40), draw.choice([None, HOUR]))]
        asked = body(*parts, system=system, cache_salt=salt, max_tokens=draw.choice([0, 2]))
        before = client.get("/cache/pins").json()
        usage = send(client, asked)["usage"]
        assert total(usage) == count(client, asked)
        places = usage["breakpoints"]
        assert len(places) == sum("cache_control" in part for part in (*parts, *system))
        kept = max((place["kept_tokens"] for place in places), default=0)
        assert usage["cache_creation_input_tokens"] == max(kept - usage["cache_read_input_tokens"], 0)
        after = client.get("/cache/pins").json()
        assert after["pinned_tokens"] >= max(before["pinned_tokens"], kept)
        if turn % 4 == 3:
            assert client.post("/flush_cache").json()["live_tokens"] == after["pinned_tokens"], "what is kept stays"
        if turn == 7:
            let_go(client)
    assert client.get("/cache/stats").json()["keeps"] > 0
    let_go(client)
    assert client.get("/cache/pins").json()["pinned_tokens"] == 0


def test_a_breakpoint_that_is_not_kept_is_said():
    places = [Breakpoint(40, 3600.0, 32), Breakpoint(64, 300.0, 64), Breakpoint(90, 300.0, reason="no room")]
    books = CacheUsage(read=16, created={3600.0: 16, 300.0: 32}, input=36, breakpoints=places)
    output = Output(0, 0, "r", "", "", [], [], None, None, 100, 16, 5, None, 0.0, 0.0, 0.0, usage=books)
    assert usage_of(output) == {
        "input_tokens": 36,
        "cache_creation_input_tokens": 48,
        "cache_read_input_tokens": 16,
        "output_tokens": 5,
        "cache_creation": {"ephemeral_5m_input_tokens": 32, "ephemeral_1h_input_tokens": 16},
        "service_tier": "standard",
        "breakpoints": [
            {"tokens": 40, "kept_tokens": 32, "ttl_s": 3600.0, "reason": None},
            {"tokens": 64, "kept_tokens": 64, "ttl_s": 300.0, "reason": None},
            {"tokens": 90, "kept_tokens": 0, "ttl_s": 300.0, "reason": "no room"},
        ],
    }
    assert total(usage_of(replace(output, usage=None))) == 100


def test_a_stream_is_the_same_message(client):
    asked = body(text(said(1, 60), FIVE), max_tokens=8)
    whole = send(client, asked)
    first, second, *rest = events(client, asked)
    assert second["type"] == "ping"
    told = [first, *(event for event in rest if event["type"] != "ping")]  # a slow step has another ping
    kinds = [event["type"] for event in told]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event["delta"]["text"] for event in told[2 : 2 + deltas]) == whole["content"][0]["text"]
    start, end = told[0]["message"], told[-2]
    assert (start["content"], start["stop_reason"], start["role"]) == ([], None, "assistant")
    assert end["delta"] == {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert total(start["usage"]) == total(end["usage"]) == total(whole["usage"])
    let_go(client)


def test_ends_of_answers(client):
    ask = {"messages": [{"role": "user", "content": "Count: 1, 2, 3,"}, {"role": "assistant", "content": "4, 5,"}]}
    assert send(client, body(**ask))["stop_reason"] == "max_tokens"
    stopped = send(client, body(**ask, stop_sequences=["7", "6"]) | {"max_tokens": 20})
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "6")
    warmed = send(client, body(max_tokens=0))
    assert (warmed["content"], warmed["usage"]["output_tokens"]) == ([], 0)


def test_a_call_and_its_stream(client):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    tools = [{"name": "plant", "input_schema": schema}, {"name": "water", "input_schema": schema}]
    asked = body(tools=tools, tool_choice={"type": "tool", "name": "water"}, max_tokens=60)
    whole = send(client, asked)
    (call,) = whole["content"]
    assert (call["type"], call["name"], whole["stop_reason"]) == ("tool_use", "water", "tool_use")
    told = events(client, asked)
    starts = [event["content_block"] for event in told if event["type"] == "content_block_start"]
    assert [(start["type"], start["name"], start["input"]) for start in starts] == [("tool_use", "water", {})]
    (delta,) = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    assert json.loads(delta["partial_json"]) == call["input"]
    assert told[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
def test_a_thread_goes_on_with_new_messages_alone(client, stream):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tools = [{"name": "water", "input_schema": schema}, {"type": "web_search_20250305", "name": "web_search"}]
    start = body(text("Water the oak.", FIVE), tools=tools, system="Be brief.", max_tokens=40)
    forced = {**start, "tool_choice": {"type": "tool", "name": "water"}, "thread": {"type": "create"}}
    if stream:
        told = events(client, forced)
        name = told[0]["message"]["id"]
        (call,) = [event["content_block"] for event in told if event["type"] == "content_block_start"]
        parts = [event["delta"]["partial_json"] for event in told if event["type"] == "content_block_delta"]
        call["input"] = json.loads("".join(parts))
    else:
        first = send(client, forced)
        name, (call,) = first["id"], first["content"]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "Done."}]}
    rest = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    more = {"messages": [result], "thread": {"type": "continue", "previous_message_id": name}}
    whole = {**start, "messages": [*start["messages"], {"role": "assistant", "content": [call]}, result]}
    assert count(client, more) == count(client, whole)
    first, again = (send(client, {**rest, **more}) for _ in range(2))
    plain = send(client, {**whole, "max_tokens": 4})
    assert first["content"] == again["content"] == plain["content"]
    assert total(first["usage"]) == total(plain["usage"])
    assert first["left_out"] == ["tool web_search_20250305"]
    why = {"role": "user", "content": "Why?"}
    third = {"messages": [why], "thread": {"type": "continue", "previous_message_id": first["id"]}}
    said_before = {"role": "assistant", "content": first["content"]}
    assert count(client, third) == count(client, {**whole, "messages": [*whole["messages"], said_before, why]})


def test_a_thread_that_is_gone_is_told_so_that_clients_send_all_again(client):
    answer = client.post("/v1/messages", json=body(thread={"type": "continue", "previous_message_id": "msg_none"}))
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (404, "not_found_error")
    assert error["details"] == {"error_code": "thread_not_found"}


def test_a_thread_that_no_body_may_hold_is_not_kept(client):
    left_out = {"role": "assistant", "content": [{"type": "redacted_thinking"}] * 3900}
    long = [{"role": "user", "content": "a"}, *[left_out] * 8]
    first = send(client, body(messages=[*long, {"role": "user", "content": "b"}], thread={"type": "create"}))
    more = body(thread={"type": "continue", "previous_message_id": first["id"]})
    send(client, more)
    second = send(client, {**more, "messages": long + more["messages"]})
    more["thread"]["previous_message_id"] = second["id"]
    assert client.post("/v1/messages", json=more).json()["error"]["details"] == {"error_code": "thread_not_found"}


def test_the_older_name_of_the_format(client):
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    asked = body(output_format={"type": "json_schema", "schema": schema}, max_tokens=20)
    assert json.loads(send(client, asked)["content"][0]["text"]) == {"n": 7}


BAD = [
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"model": "another"}, 404, "model"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": 7}]}]}, 400, None),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role"),
    ({"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "2h"}}]}, 400, None),
    ({"system": [text("x", FIVE)] * 5}, 400, "cache_control"),
    ({"tools": [{"type": "web_search_20250305"}], "tool_choice": {"type": "any"}}, 400, "tool_choice"),
    ({"thread": {"type": "resume"}}, 400, "thread.type"),
    ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, 404, "thread.previous_message_id"),
    ({"thread": {"type": "create"}, "messages": []}, 400, "messages"),
    ({"temprature": 1}, 400, "temprature"),
    ({"tool_choice": {"type": "any"}}, 400, "tool_choice"),
    ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "g"}}, 400, "tool_choice"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "tree"}}}}, 400, None),
    ({"stop_sequences": [""]}, 400, "stop_sequences.0"),
    ({"container": "c"}, 400, "container"),
    ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "messages"),
]


@pytest.mark.parametrize(("fields", "status", "param"), BAD, ids=range(len(BAD)))
def test_errors_have_their_form(client, fields, status, param):
    answer = client.post("/v1/messages", json=body(**fields))
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert told.keys() == {"type", "error", "request_id"}
    assert told["type"] == "error"
    assert told["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert param is None or told["error"]["param"] == param
    assert told["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


def test_errors_before_the_route_have_their_form_too(client):
    for answer, kind in (
        (client.get("/v1/messages"), "invalid_request_error"),
        (client.post("/v1/messages/nothing", json={}), "not_found_error"),
        (client.post("/v1/messages", content=b"x" * ((8 << 20) + 1)), "request_too_large"),
        (client.post("/v1/messages/count_tokens", content=b"{"), "invalid_request_error"),
    ):
        assert 400 <= answer.status_code < 500
        assert answer.json()["error"]["type"] == kind
    assert client.head("/").status_code == client.head("/v1/models").status_code == 200
    assert client.head("/v1/messages").status_code == 405


def test_each_status_has_its_type_of_error():
    told = {
        kind: error_response(kind("no"), "/v1/messages") for kind in (Unauthorized, Forbidden, RateLimited, Overloaded)
    }
    types = [json.loads(response.body)["error"]["type"] for response in told.values()]
    assert types == ["authentication_error", "permission_error", "rate_limit_error", "overloaded_error"]
    assert told[Unauthorized].headers["www-authenticate"] == "Bearer"
    assert json.loads(error_response(EngineDead("no"), "/v1/messages/count_tokens").body)["type"] == "error"
    assert json.loads(error_response(RametError("no"), "/v1/messages").body)["error"]["type"] == "api_error"
    assert "type" not in json.loads(error_response(RametError("no"), "/generate").body)


def test_an_answer_that_is_aborted_is_an_error(client, server):
    with server.waiting("/v1/messages", body()) as asked:
        client.post("/abort_request", json={"abort_all": True})
        told = asked.result()
    assert (told.status_code, told.json()["error"]["type"]) == (409, "conflict_error")


def billed(version: str, **fields) -> dict:
    """Claude Code's system prompt of a conversation, in blocks."""
    line = text(f"x-anthropic-billing-header: cc_version=2.1.{version}; cc_entrypoint=cli;")
    return body(system=[line, text(said(77, 60))], cache_salt="billed", **fields)


def test_a_line_for_bills_costs_no_conversation_its_cache(client):
    first, second = send(client, billed("197.1c0")), send(client, billed("198.8a5", explain=True))
    assert total(first["usage"]) == total(second["usage"]) == count(client, body(system=[text(said(77, 60))]))
    assert second["usage"]["cache_read_input_tokens"] >= total(second["usage"]) - 16
    assert second["explain"]["reason"] == "hit"
    assert first["left_out"] == ["x-anthropic-billing-header"]
    assert "left_out" not in send(client, body())
    (whole,) = [{"role": "system", "content": f"{billed('1')['system'][0]['text']}\n{said(77, 60)}"}]
    asked = {"model": MODEL, "max_tokens": 1, "messages": [whole, {"role": "user", "content": "x"}]}
    shorter = {**asked, "messages": [{**whole, "content": said(77, 60)}, asked["messages"][1]]}
    answers = [client.post("/v1/chat/completions", json=each).json() for each in (asked, shorter)]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
    assert answers[0]["left_out"] == ["x-anthropic-billing-header"]


def test_a_message_that_waits_begins_before_it_is_admitted(tokenizer):
    """`idle` is called while a stream has no event; the first Output comes later and begins nothing anew."""
    info = SimpleNamespace(context_length=100)
    context = SimpleNamespace(engine=SimpleNamespace(info=info, tokenizer=tokenizer), check_model=str)
    asked = MessagesRequest.model_validate(body())
    submission = Encoded("x", tokens=b"1234" * 9)
    writer = MessageWriter(asked, chat_of(asked), submission, context)
    start, *pings = [*writer.idle(), *writer.idle()]
    assert (start["type"], start["message"]["usage"]["input_tokens"]) == ("message_start", 9)
    assert [ping["type"] for ping in pings] == ["ping", "ping"]
    assert [*writer.write(Output(0, 0, "", computed=256), None)] == [{"type": "ping"}]
    kinds = [event["type"] for event in writer.write(Output(0, 0, "", delta="Oak", finish=Finish("stop")), None)]
    assert kinds == [
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_what_the_model_cannot_use_is_left_out_and_listed(client):
    """An agent that once read a picture, or whose tools run elsewhere, must not be refused for ever."""
    source = {"type": "base64", "media_type": "image/png", "data": "x" * 5000}
    call = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "image", "source": source}]}
    found = {"type": "search_result", "title": "Oaks", "source": "o.txt", "content": [text("An oak is a tree.")]}
    server_use = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "oak"}}
    turns = [
        {"role": "user", "content": [{"type": "document", "source": {**source, "media_type": "application/pdf"}}]},
        {"role": "assistant", "content": [server_use, call]},
        {"role": "user", "content": [result, found, text("So?", FIVE)]},
    ]
    tools = [{"type": "bash_20250124", "name": "bash"}, {"name": "read", "input_schema": {"type": "object"}}]
    odd = {"thread": {"type": "create"}, "context_management": {"edits": [{"type": "compact_20260112"}]}}
    answer = send(client, body(messages=turns, tools=tools, **odd))
    assert answer["left_out"] == [
        "tool bash_20250124",
        "content server_tool_use",
        "content image",
        "content base64",
        "edit compact_20260112",
    ]
    assert total(answer["usage"]) < 900, "the picture is no part of the prompt"


def test_the_words_that_clients_read_in_errors(client):
    def refused(**fields) -> str:
        return client.post("/v1/messages", json=body(**fields)).json()["error"]["message"]

    words = refused(messages=[{"role": "user", "content": "word " * 9000}])
    assert re.fullmatch(r"prompt is too long: 90\d\d tokens > 8192 maximum", words), words
    chat = {"messages": [{"role": "user", "content": "word " * 9000}]}
    error = client.post("/v1/chat/completions", json=chat).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 8192 tokens" in error["message"]


def test_models_in_the_form_of_each_client(client):
    plain = client.get("/v1/models").json()
    assert client.get("/models").json() == plain
    asked = {"anthropic-version": "2023-06-01"}
    typed = client.get("/v1/models", headers=asked).json()
    assert [model["id"] for model in typed["data"]] == [model["id"] for model in plain["data"]]
    assert (typed["first_id"], typed["has_more"], typed["data"][0]["type"]) == (MODEL, False, "model")
    assert client.get(f"/v1/models/{MODEL}", headers=asked).json() == typed["data"][0]
