"""Whatever a server does, a run ends with a counted error of the right kind."""

import asyncio
import json
import random
import socket
import struct

import pytest

from loadgen.http.apis import APIS, BadEvent, ServerError
from loadgen.http.client import Timeouts
from loadgen.http.load import Bounds
from loadgen.http.record import Record
from loadgen.http.sse import MAX_EVENT_BYTES, EventSplitter
from loadgen.http.summary import summarise
from tests.loadgen.helpers import run

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PIECE = b'data: {"choices": [{"index": 0, "text": " a", "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"index": 0, "text": " b", "finish_reason": "length"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def sends(*pieces, then="close"):
    """A script: send pieces one by one, then close, stall or reset."""

    async def script(reader, writer, head):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        if then == "stall":
            await asyncio.sleep(30)
        if then == "reset":
            # Closing with a linger of 0 sends RST instead of FIN.
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        writer.close()

    return script


def errors(result):
    return result.figures["errors"]


@pytest.mark.parametrize(
    ("kind", "script"),
    [
        ("cut", sends(HEAD, PIECE)),
        ("cut", sends(HEAD)),
        ("empty", sends(HEAD, DONE)),
        ("reset", sends()),
        ("reset", sends(then="reset")),
        ("cut", sends(HEAD, PIECE, then="reset")),
        ("cut", sends(CHUNKED, b"%x\r\n%b\r\n" % (len(PIECE), PIECE), then="reset")),
        ("cut", sends(CHUNKED, b"%x\r\n%b" % (len(PIECE), PIECE[:9]))),
        ("stall", sends(HEAD, PIECE, then="stall")),
        ("stall", sends(then="stall")),
        ("rubbish", sends(HEAD, b"data: {rubbish\n\n")),
        ("rubbish", sends(HEAD, b"data: \xff\xfe\n\n")),
        ("rubbish", sends(HEAD, b"data: [1, 2]\n\n")),
        ("rubbish", sends(HEAD, b'data: {"choices": 7}\n\n')),
        ("rubbish", sends(HEAD, b'data: {"choices": [{"text": 7}]}\n\n')),
        ("rubbish", sends(b"\x00\x01\x02 this is no HTTP\r\n\r\n")),
        ("server error", sends(HEAD, PIECE, b'data: {"error": {"message": "out of pages"}}\n\n', DONE)),
        ("http 503", sends(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy")),
        ("http 400", sends(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}")),
        ("overrun", sends(HEAD, *[PIECE * 200] * 8, then="stall")),
    ],
)
def test_every_failure_is_counted_by_its_kind(bad_server, kind, script):
    server = bad_server(script)
    stall_s = 0.3 if kind == "stall" else 60
    result = run(server.url, bounds=Bounds(requests=3), timeouts=Timeouts(total_s=60, stall_s=stall_s))
    assert errors(result) == {kind: 3}
    assert server.requests == 3
    assert result.figures["completed"] == 0
    assert all(record.end_s >= record.sent_s > 0 for record in result.records)


def test_nobody_listens():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        result = run(f"http://127.0.0.1:{probe.getsockname()[1]}", bounds=Bounds(requests=3))
    assert errors(result) == {"connect": 3}


def test_a_stream_that_drips_is_ended_by_the_total_time(bad_server):
    server = bad_server(sends(HEAD, *[b": still here\n\n"] * 500))
    assert errors(run(server.url, bounds=Bounds(requests=2), timeouts=Timeouts(0.4, 60))) == {"timeout": 2}


def test_a_server_that_always_fails_is_given_up_and_not_hammered(bad_server):
    server = bad_server(sends())
    result = run(server.url, bounds=Bounds(duration_s=60, failures=6))
    assert 6 <= server.requests <= 8
    assert result.facts["ended_by"].endswith("failures in a row")


def test_a_server_that_dies_amid_the_run_leaves_what_was_good(bad_server):
    good = HEAD + PIECE + LAST + DONE
    count = 0

    async def script(reader, writer, head):
        nonlocal count
        count += b"POST" in head
        writer.write(good if count <= 5 else b"")
        await writer.drain()
        writer.close()

    result = run(bad_server(script).url, bounds=Bounds(requests=10))
    assert result.figures["completed"] == 5
    assert errors(result) == {"reset": 5}
    assert max(result.figures["ttft"]) > 0


def test_without_usage_the_pieces_are_counted(bad_server):
    result = run(bad_server(sends(HEAD, PIECE, PIECE, LAST, DONE)).url)
    assert result.figures["output_tokens"] == 4 * 3
    assert result.figures["output_tokens_counted_by"] == ["pieces"]
    assert result.figures["hit_ratio"] is None


def test_the_chat_api_counts_from_the_first_text_and_not_from_the_role(bad_server):
    def event(delta, reason=None):
        return b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": reason}]}).encode() + b"\n\n"

    counts = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": None}
    usage = b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"
    pause = [b": wait\n\n"] * 5
    script = sends(HEAD, event({"role": "assistant", "content": ""}), *pause, event({"reasoning_content": "hm"}),
                   event({"content": "x"}), event({}, "stop"), usage, DONE)  # fmt: skip
    result = run(bad_server(script).url, api="chat", bounds=Bounds(requests=1))
    (record,) = result.records
    assert (record.prompt_tokens, record.output_tokens, record.finish_reason) == (9, 4, "stop")
    assert len(record.arrivals_s) == 2
    assert record.ttft_s > 0.05


def test_generate_streams_of_both_forms(bad_server):
    def stream(*texts):
        for i, text in enumerate(texts, 1):
            finish = {"type": "length"} if i == len(texts) else None
            meta = {"prompt_tokens": 7, "completion_tokens": i, "cached_tokens": 2, "finish_reason": finish}
            yield b"data: " + json.dumps({"text": text, "meta_info": meta}).encode() + b"\n\n"

    for texts in (["a", "ab", "abc"], ["a", "b", "c"]):
        result = run(bad_server(sends(HEAD, *stream(*texts), DONE)).url, api="generate", bounds=Bounds(requests=1))
        (record,) = result.records
        assert (record.ok, record.output_tokens, record.cached_tokens) == (True, 3, 2)
        assert len(record.arrivals_s) == 3


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_split_wherever_the_bytes_are_cut(size):
    stream = b'\xef\xbb: a comment\r\n\r\ndata: {"a":\r\ndata: 1}\r\n\r\nevent: x\ndata:2\n\n\n\ndata: 3'
    splitter = EventSplitter()
    found = [event for i in range(0, len(stream), size) for event in splitter.feed(stream[i : i + size])]
    assert found + splitter.close() == [b'{"a":\n1}', b"2", b"3"]


def test_an_endless_event_is_refused():
    splitter = EventSplitter()
    for _ in range(MAX_EVENT_BYTES // (1 << 20)):
        splitter.feed(b"x" * (1 << 20))
    with pytest.raises(ValueError, match="bytes"):
        splitter.feed(b"x")


EVENTS = {
    "generate": {
        "text": "a b",
        "output_ids": [1, 2],
        "meta_info": {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 3, "queue_time": 0.5,
                      "prefill_time": 0.1, "finish_reason": {"type": "length", "length": 2}},
    },
    "completions": {
        "choices": [{"index": 0, "text": " a", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
        "timings": {"predicted_n": 2, "cache_n": 1},
    },
    "chat": {
        "choices": [{"index": 0, "delta": {"content": " a", "reasoning_content": "b"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    },
}  # fmt: skip
VALUES = [None, True, -1, 0, 1.5, 1e308, 10**400, "", "x", "\u0000\U0001f600", [], {}, [[]], {"type": None}, [None] * 3]


def spoilt(event, rng):
    """The event with one value, at any depth, put in another's place, dropped, or doubled in a list."""
    if not isinstance(event, dict | list) or not event or rng.random() < 0.25:
        return rng.choice(VALUES)
    copy = event.copy()
    key = rng.choice(list(copy)) if isinstance(copy, dict) else rng.randrange(len(copy))
    if rng.random() < 0.15:
        del copy[key]
    else:
        copy[key] = spoilt(copy[key], rng)
    return copy


@pytest.mark.parametrize("api", list(APIS))
def test_spoilt_events_are_rubbish_or_leave_sound_figures(api):
    rng = random.Random(api)
    refused, taken = 0, []
    for number in range(3000):
        answer = APIS[api].answer(Record(number, wanted_tokens=2, sent_s=0.5, end_s=2.0))
        try:
            answer.take(json.dumps(EVENTS[api]).encode(), 1.0)
            answer.take(json.dumps(spoilt(EVENTS[api], rng)).encode(), 1.5)
        except (BadEvent, ServerError):
            refused += 1
        answer.end()
        taken.append(answer.record)
    assert 300 < refused < 2900
    summary = summarise(taken)
    assert summary["completed"] == 3000
    json.dumps(summary, allow_nan=False)
