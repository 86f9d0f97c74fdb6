"""Answers with receipts, and `ramet verify`, on a tiny model."""

import json
from pathlib import Path

import httpx
import pytest

from server.cli import main
from tests.server.conftest import LiveServer, start, stop

ASK = {"receipt": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("verify") / "trace"


@pytest.fixture(scope="module")
def recorded(tiny_dir, trace) -> list[dict]:
    """Answers of all three kinds, greedy and seeded ones, whose prompts share prefixes and fill pages."""
    options = ("--model", str(tiny_dir), "--page-size", "4", "--record-trace", str(trace))
    server: LiveServer = start(trace.with_name("log"), *options)
    words = "A tree has a root, a stem and leaves. " * 3

    def post(path: str, **body) -> dict:
        answer = httpx.post(f"{server.url}{path}", json={**ASK, **body}, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    found = [
        post("/v1/completions", prompt=f"{words}{i}", max_tokens=6, temperature=i % 2, seed=i) for i in range(3)
    ] + [
        post("/v1/chat/completions", messages=[{"role": "user", "content": words}], max_tokens=5, temperature=0),
        post("/generate", text=words, sampling_params={"max_new_tokens": 5, "temperature": 0}),
    ]  # fmt: skip
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": True, "receipt": True}
    stream = httpx.post(f"{server.url}/v1/messages", json=asked, timeout=120).text
    last = json.loads(stream.strip().rsplit("data: ", 1)[1])
    assert last["type"] == "message_stop"
    assert last["receipt"]["weights"] == found[0]["receipt"]["weights"]
    two = post("/v1/completions", prompt="x", max_tokens=1, n=2)
    assert [one["parameters"] for one in two["receipt"]] == [{"max_new_tokens": 1, "n": 2}] * 2
    assert stop(server) == 0
    return found


def verify(answers: list[dict], tmp_path, tiny_dir, *options: str) -> int:
    (tmp_path / "log").write_text("\n".join(map(json.dumps, answers)))
    return main(["verify", str(tmp_path / "log"), "--model", str(tiny_dir), "--dtype", "float32", *options])


def test_recorded_answers_are_computed_again(recorded, tmp_path, tiny_dir, capsys):
    assert verify(recorded, tmp_path, tiny_dir, "--page-size", "4", "--threads", "1") == 0
    shown = capsys.readouterr().out
    together = ("in one batch", "several of each", "by several clients")
    for condition in ("cold", "warm", *together, "after evictions", "from host memory"):
        assert f"{condition} " in shown
    assert "another" not in shown


def test_a_trace_is_computed_with_prompts_of_its_shape(recorded, trace, tmp_path, tiny_dir, capsys, monkeypatch):
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert verify(lines, tmp_path, tiny_dir, "--page-size", "4", "--threads", "1") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{len(lines)} requests are of a trace" in shown
    assert "record answers with `receipt`" in shown
    assert "from host memory │ 0 │ 0" in shown
    found = [
        [([1, 2], [-0.5, -1.0])] * len(lines),
        [([1, 2], [-0.5, -1.0])] * (len(lines) - 1) + [([1, 3], [-0.5, -2.0])],
    ]
    monkeypatch.setattr("loadgen.offline.verify._conditions", lambda *_: zip(("cold", "warm"), found, strict=True))
    assert verify(lines, tmp_path, tiny_dir) == 1
    assert f"answer {len(lines)}, token 2" in capsys.readouterr().out


def test_an_answer_that_is_not_the_model_s_is_found(recorded, tmp_path, tiny_dir, capsys):
    from array import array

    from server.generation.receipts import digest_of

    forged = json.loads(json.dumps(recorded[:2]))
    ids = forged[1]["choices"][0]["token_ids"]
    ids[3] = (ids[3] + 1) % 1000
    assert verify(forged, tmp_path, tiny_dir) == 1
    assert "not those of the receipt" in capsys.readouterr().err
    forged[1]["receipt"] |= {"output": digest_of(array("i", ids).tobytes()), "weights": "x"}
    assert verify(forged, tmp_path, tiny_dir) == 1
    shown = capsys.readouterr().out
    assert "answer 2, token 4" in shown
    assert "1 of 2 answers were computed with another weights" in shown


@pytest.mark.parametrize("line", ["", "x", "[]", "{}", '{"hash_ids": [1]}', '{"receipt": {}, "prompt_token_ids": "x"}'])
def test_what_is_no_answer_is_refused(line, tmp_path, tiny_dir, capsys):
    (tmp_path / "log").write_text(line)
    assert main(["verify", str(tmp_path / "log"), "--model", str(tiny_dir)]) == 1
    assert "ramet: " in capsys.readouterr().err
