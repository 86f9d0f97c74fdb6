"""The journal of ended requests, and the trace of all of them."""

import json
import stat
from array import array
from types import SimpleNamespace

import pytest
from msgspec import to_builtins

from radix import Namespace
from runtime.errors import DeadlineExceeded, InvalidRequest
from runtime.frontend.output import Encoded
from runtime.protocol import Finish
from server.telemetry.journal import BLOCK_TOKENS, BadTrace, Journal, Trace


def ended(rid: str, tokens: list[int], account: str = "", salt: str = "", choice: int = 0):
    key = array("i", tokens).tobytes()
    submission = Encoded([], rid=rid, account=account, namespace=Namespace(account, salt), tokens=key)
    counts = {"prompt_tokens": len(tokens), "cached_tokens": 0, "completion_tokens": 7}
    times = {"queue_s": 0.1, "prefill_s": 0.2, "e2e_s": 1.5}
    return submission, SimpleNamespace(choice=choice, finish=Finish("stop"), **counts, **times)


def test_each_tenant_has_its_last_hundred():
    journal = Journal()
    journal.add(*ended("first", [1], "b"))
    for number in range(150):
        journal.add(*ended(f"{number}", [1], "a"))
    mine = journal.last("a")
    assert sorted(int(entry.rid) for entry in mine) == list(range(50, 150))
    assert [entry.rid for entry in journal.last("b")] == ["first"], "a loud neighbour displaces nothing"
    assert len(journal.last(None)) == 100
    assert journal.last("c") == []
    told = {"tenant": "b", "prompt_tokens": 1, "output_tokens": 7, "queue_s": 0.1, "finish": "stop"}
    assert told.items() <= to_builtins(journal.last("b")[0]).items()


def test_failed_requests_are_listed_with_what_they_had_reached_and_not_traced(tmp_path):
    journal = Journal(Trace(tmp_path / "trace", {}))
    submission, output = ended("late", [1, 2, 3])
    journal.add_failed(submission, output, 2.5, DeadlineExceeded("the request took longer than 2 s"))
    journal.add_failed(ended("refused", [])[0], None, 0.1, InvalidRequest("x" * 1000))
    journal.add_failed(ended("gone", [1])[0], None, 0.2, None)
    entries = {entry.rid: entry for entry in journal.last("")}
    late, refused, gone = (entries[rid] for rid in ("late", "refused", "gone"))
    told = {"finish": "timeout_error", "error": "the request took longer than 2 s", "e2e_s": 2.5}
    assert ({**told, "prompt_tokens": 3, "output_tokens": 7, "queue_s": 0.1}).items() <= to_builtins(late).items()
    assert (refused.finish, len(refused.error), refused.prompt_tokens) == ("invalid_request_error", 300, 0)
    assert (gone.finish, "error" in to_builtins(gone)) == ("client left", False)
    assert (tmp_path / "trace").read_text() == ""


def test_a_trace_tells_what_is_shared_and_no_text(tmp_path):
    journal = Journal(Trace(tmp_path / "trace", {"x": "alice"}))
    assert stat.S_IMODE((tmp_path / "trace").stat().st_mode) == 0o600
    head = list(range(100, 100 + 2 * BLOCK_TOKENS))
    prompts = [([*head, 1], "x", ""), ([*head, 2], "x", ""), (head, "y", ""), (head, "x", "s")]
    for number, (tokens, account, salt) in enumerate(prompts):
        journal.add(*ended(f"{number}", tokens, account, salt))
    journal.add(*ended("other choice", head, "x", choice=1))
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert [line["tenant"] for line in lines] == ["alice", "alice", "", "alice"]
    assert [(line["input_length"], line["output_length"]) for line in lines[:1]] == [(len(head) + 1, 7)]
    first, second, other, salted = (line["hash_ids"] for line in lines)
    assert (len(first), first[:2], first[2] == second[2]) == (3, second[:2], False)
    assert not set(first) & set(other)
    assert not set(first) & set(salted)
    assert lines[0].keys() == {"timestamp", "input_length", "output_length", "block_tokens", "hash_ids", "tenant"}
    # Another process has another secret.
    Journal(Trace(tmp_path / "second", {})).add(*ended("0", head, "x"))
    assert not set(json.loads((tmp_path / "second").read_text())["hash_ids"]) & set(first)


def test_a_trace_that_cannot_be_written(tmp_path, logged_here):
    with pytest.raises(BadTrace, match=r"--record-trace .* cannot be written: No such file"):
        Trace(tmp_path / "missing" / "trace", {})
    trace = Trace(tmp_path / "trace", {})
    trace._file.close()
    trace._file = open("/dev/full", "a", buffering=1)  # noqa: SIM115 (the trace closes it)
    for _ in range(2):
        Journal(trace).add(*ended("0", [1, 2]))
    assert [record.message.partition(": ")[0] for record in logged_here()] == ["--record-trace"]
    assert trace._file.closed


def test_a_tenant_is_erased_where_a_link_leads(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "trace")
    journal = Journal(Trace(tmp_path / "link", {"x": "alice", "y": "bob"}))
    for account in ("x", "y", "x"):
        journal.add(*ended("0", [1, 2, 3], account))
    journal.erase("x")
    journal.add(*ended("1", [1, 2, 3], "y"))
    lines = (tmp_path / "trace").read_text().splitlines()
    assert [json.loads(line)["tenant"] for line in lines] == ["bob", "bob"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "trace"]
