"""Times of sending, number of requests, and latencies from the scheduled time."""

import asyncio
from itertools import pairwise

import pytest

from loadgen.http.arrivals import Closed, Gamma
from loadgen.http.load import Bounds
from loadgen.http.workloads.base import length
from loadgen.http.workloads.dialogues import Chat
from tests.loadgen.helpers import run
from tests.loadgen.http.test_client import DONE, HEAD, LAST, PIECE

_REGULAR = 1e9  # a burstiness so high that gaps are equal


def slow(seconds):
    """A server that answers after some time, and counts how many requests it has at once."""

    async def script(reader, writer, head):
        script.running += 1
        script.most = max(script.most, script.running)
        try:
            await asyncio.sleep(seconds)
            writer.write(HEAD + PIECE + LAST + DONE)
            await writer.drain()
        finally:
            script.running -= 1
        writer.close()

    script.running = script.most = 0
    return script


def test_a_closed_loop_holds_its_concurrency(bad_server):
    script = slow(0.2)
    result = run(bad_server(script).url, arrivals=Closed(3), bounds=Bounds(requests=10))
    assert script.most == 3
    assert len(result.records) == result.figures["completed"] == 10
    assert result.facts["ended_by"] == "the number of requests"


def test_time_counts_from_the_scheduled_instant(bad_server):
    """80 requests a second for a server that takes 10: what is held up by the bound must show in the latencies."""
    script = slow(0.1)
    result = run(bad_server(script).url, arrivals=Gamma(80.0, _REGULAR), bounds=Bounds(requests=16, outstanding=1))
    assert script.most == 1
    assert [round(r.scheduled_s * 80) for r in result.records] == list(range(1, 17))
    last = result.records[-1]
    assert last.sent_s - last.scheduled_s > 1.2
    assert last.e2e_s == pytest.approx(last.end_s - last.scheduled_s)
    assert max(result.figures["sent_late"]) > 1.2


def test_the_duration_ends_the_sending_and_the_grace_what_is_under_way(bad_server):
    result = run(bad_server(slow(30)).url, bounds=Bounds(duration_s=0.3, grace_s=0.2))
    assert (result.figures["errors"], result.figures["failed"], result.figures["unfinished"]) == ({}, 0, 2)
    result = run(bad_server(slow(0.05)).url, bounds=Bounds(duration_s=0.4))
    assert result.figures["errors"] == {}
    assert 2 <= len(result.records) <= 2 * 8, "of each user no more than answers of 0.05 s fit into that"
    assert result.facts["ended_by"] == "the duration"


def test_turns_follow_each_other_with_time_to_think(bad_server):
    chat = Chat(turns=length("3"), prefix_tokens=length("8"), prompt_tokens=length("8"), think=length("0.1"))
    result = run(bad_server(slow(0.02)).url, workload=chat, arrivals=Gamma(100.0, _REGULAR), bounds=Bounds(requests=6))
    talks = {}
    for record in result.records:
        talks.setdefault(record.session, []).append(record)
    for turns in talks.values():
        assert [record.turn for record in turns] == list(range(len(turns)))
        for before, after in pairwise(turns):
            assert after.scheduled_s == pytest.approx(before.end_s + 0.1)
            assert after.sent_s >= after.scheduled_s
            assert after.prompt_chars > before.prompt_chars
