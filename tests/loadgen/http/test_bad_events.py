"""Events that no server should send: each ends as rubbish or as figures, and never as a run without a report."""

from __future__ import annotations

import json
import random

import pytest

from loadgen.http.apis import APIS, BadEvent, ServerError
from loadgen.http.arrivals import Closed
from loadgen.http.load import Bounds
from loadgen.http.record import Record
from loadgen.http.summary import summarise
from tests.loadgen.helpers import run
from tests.loadgen.http.test_client import DONE, HEAD, sends

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


@pytest.mark.parametrize("seed", range(4))
def test_rubbish_bytes_end_in_figures(bad_server, seed):
    rng = random.Random(seed)
    event = b"data: " + json.dumps(EVENTS["completions"]).encode() + b"\n\n"
    whole = bytearray(HEAD + 3 * event + DONE)
    for _ in range(rng.randrange(1, 30)):
        whole[rng.randrange(len(HEAD) if rng.random() < 0.8 else 0, len(whole))] = rng.randrange(256)
    result = run(bad_server(sends(bytes(whole))).url, bounds=Bounds(requests=3), arrivals=Closed(1))
    assert len(result.records) == 3
    assert sum(result.figures["errors"].values()) + result.figures["completed"] == 3
    json.dumps(result.figures | result.facts, allow_nan=False)


def test_counters_that_are_rubbish_or_never_come_are_left_out(bad_server):
    async def rubbish(reader, writer, head):
        body = b'# TYPE a counter\na_total{x="1 3.0\n\xff{{{'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    result = run(bad_server(rubbish, always=True).url, bounds=Bounds(requests=1))
    assert result.facts["server_metrics"] is None
    assert result.figures["errors"] == {"cut": 1}
