"""`ramet bench user` on a server that already runs, because a start takes seconds."""

import json

import pytest

from loadgen.experiments.gpu.bench_user import User


@pytest.fixture
def launches(ramet, monkeypatch):
    """How often the bench has started a server, which is a running one, and which it leaves running."""
    found = []

    def launch(bench):
        found.append(bench.device)
        bench._url = ramet.url
        bench._log.write_bytes(ramet.log.read_bytes())
        return ramet.process

    monkeypatch.setattr(User, "_launch", launch)
    monkeypatch.setattr(User, "_stop", lambda bench: None)
    return found


ASKED = ("server", "completions", "stream", "structured", "load", "log")


def test_answers_and_load_are_measured(launches, measured, tiny_dir):
    options = ("--device", "cpu", "--model", tiny_dir, "--duration", "0.3", "--prompt-tokens", "9")
    only = ("--only", *(f"asked={kind}" for kind in ASKED))
    rows = measured("user", *options, "--clients", "2", "--output-tokens", "3", *only)
    assert [row["asked"] for row in rows] == list(ASKED)
    server, completions, stream, structured, load, log = rows
    assert server["ready"] > 0
    assert completions["cached_tokens"] > 100
    assert stream["first"] > 0
    assert stream["events"] > 2
    assert structured["seconds"] > 0
    assert load["requests"] > 0
    assert load["ttft_p99"] >= load["ttft"] > 0
    assert load["rate"] == pytest.approx(3 * load["requests"])
    assert log["warnings"] == len(log["lines"])
    assert launches == ["cpu"]


def test_without_flashinfer_on_a_gpu_all_of_it_fails(launches, bench, tiny_dir, tmp_path):
    only = ("--only", "asked=server", "asked=stream")
    assert bench("user", "--model", tiny_dir, *only, "--json", tmp_path / "user.jsonl")[0] == 1
    failed = [json.loads(line)["error"] for line in (tmp_path / "user.jsonl").read_text().splitlines()[1:]]
    assert len(failed) == 2
    for error in failed:
        assert error.startswith(("RuntimeError: attention by native", "RuntimeError: attention by torch"))
    assert launches == ["cuda"], "the second cell starts no further server"
