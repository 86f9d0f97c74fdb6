"""`ramet bench drafted` on a server of a small model: free answers and held ones, and a server that is not there."""

from __future__ import annotations

import argparse
import json

from loadgen.micro import bench_drafted
from loadgen.micro.bench_drafts import TASKS, Question


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_drafted.add_arguments(parser)
    return parser.parse_args(["--clients", "2", "--output", "8", "--rounds", "1", *options])


def test_servers_get_the_tasks_in_turn(ramet, tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "call", lambda draw, prose: Question("Repeat it.", "a (b) c"))  # the context is 512
    files = [f"--json={tmp_path / 'a.json'}", f"--markdown={tmp_path / 'a.md'}"]
    urls = [f"one={ramet.url}", f"two={ramet.url}/v1"]
    assert bench_drafted.run(parse("--tasks", "call", "again", *files, "--url", *urls)) == 0
    call, again = json.loads((tmp_path / "a.json").read_text())["cells"]
    assert (call["task"], again["task"]) == ("call", "again")
    assert min(*call["one"], *call["two"], *again["one"], *again["two"]) > 0
    assert (tmp_path / "a.md").read_text().splitlines()[0].endswith("| one / two [95 %] |")


def test_a_refusal_is_shown(ramet, capsys):
    assert bench_drafted.run(parse("--tasks", "call", "--url", f"one={ramet.url}")) == 1
    assert "context_length_exceeded" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_an_error(capsys):
    assert bench_drafted.run(parse("--url", "gone=http://127.0.0.1:9")) == 1
    assert capsys.readouterr().out.startswith("error: ")
