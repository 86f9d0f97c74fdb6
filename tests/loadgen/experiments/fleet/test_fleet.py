"""Replicas and one server with the memory of all; Ray itself is covered by tests/server/ray."""

import json
import threading

from loadgen.experiments.fleet.bench_fleet import Fleet, _Killer
from loadgen.harness.run import execute
from loadgen.http.record import Record


def test_one_server_without_ray(tmp_path):
    path = tmp_path / "fleet.jsonl"
    assert execute("fleet", Fleet(repeats=1, replicas=(1,), workloads=("prefixes",), json_=path)) == 0
    (measured,) = map(json.loads, path.read_text().splitlines()[1:])
    figures = measured["figures"]
    assert figures["hit_ratio"] > 0.3
    assert (figures["imbalance"], figures["failed"]) == (1.0, 0)


def test_a_replica_is_killed_once_half_of_the_requests_have_ended():
    killed = threading.Event()
    ended = _Killer(killed.set, 2)
    ended(Record(0))
    assert not killed.is_set()
    ended(Record(1))
    assert killed.wait(60)
