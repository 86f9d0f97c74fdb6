"""Cases of `ramet bench faults` on a small scale, with the bounds of the full one."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from loadgen.__main__ import main
from loadgen.faults.clients import _judge
from loadgen.faults.server import ids, running_server
from loadgen.faults.ties import TIE_NATS, apart, shortfall

SMALL = ["--model", "{}", "--dtype", "float32", "--threads", "1"]


@pytest.mark.parametrize(
    "case",
    [
        "storm",
        "large",
        "fuzz",
        "kill",
        "drain",
        "descriptors",
        "frozen",
        "pages",
        "amplify",
        "retraction",
        "signals",
        "tiers",
    ],
)
def test_a_server_stands(case, tiny_dir, tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    options = [option.format(tiny_dir) for option in SMALL] + ["--step-timeout", "1"] * (case == "frozen")
    monkeypatch.setattr(
        "sys.argv",
        ["loadgen", "faults", "--case", case, "--scale", "0.02", "--seed", "0", "--json", str(out), "--", *options],
    )
    code = main()
    found = json.loads(out.read_text())[case]
    assert (code, found["problems"]) == (0, [])
    assert found["seen"]


def test_a_wrong_answer_is_no_tie(tiny_dir):
    """A token that the idle server would not choose is far from its first choice, at any place."""

    async def measure() -> tuple[float, list[float]]:
        async with running_server([option.format(tiny_dir) for option in SMALL]) as server:
            draw = random.Random(1)
            prompt = ids(draw, 30)
            _, answer = await server.generate(prompt, 8)
            said = answer["output_ids"]
            wrong = [[*said[:at], *ids(draw, 1), *said[at + 1 :]] for at in (0, 4, 7)]
            return await shortfall(server, prompt, said), [await apart(server, prompt, said, other) for other in wrong]

    own, others = asyncio.run(measure())
    assert own < 0.001
    assert min(others) > TIE_NATS


@pytest.mark.parametrize(
    ("answer", "status", "fine"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{}", "200", True),
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {}\n\n", "200", False),
        (b'HTTP/1.1 400 X\r\n\r\n{"error": {"message": "", "type": "", "param": null, "code": null}}', "400", True),
        (b'HTTP/1.1 422 X\r\n\r\n{"detail": []}', "422", False),
        (b'HTTP/1.1 404 X\r\n\r\n{"error": {"message": ""}}', "404", False),
        (b"HTTP/1.1 500 X\r\n\r\n{}", "500", False),
        (b"", "none", False),
    ],
)
def test_what_is_no_good_answer_is_seen(answer, status, fine):
    found, problem = _judge(answer)
    assert (found, problem == "") == (status, fine)
