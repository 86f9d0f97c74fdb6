"""Cases of `ramet bench faults` on a small scale; what is measured in seconds may take ten times as long."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from loadgen.__main__ import main
from loadgen.faults import amplify, clients, descriptors, endings, live_tiers, signals, tiers
from loadgen.faults.bench_faults import CASES
from loadgen.faults.clients import _judge
from loadgen.faults.server import Server, http_client, ids, running_server
from loadgen.faults.ties import TIE_NATS, apart, shortfall

# Without drafts, as a quick machine would end a stream before it is treated.
SMALL = ["--model", "{}", "--dtype", "float32", "--threads", "1", "--drafts", "off"]
SCALE = 0.02
# Cases of one server, one after the other; the last one ends it.
SHARED = ("storm", "large", "fuzz", "pages", "amplify", "descriptors", "kill", "drain")


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    for module, names in (
        (clients, ("_REFUSED_WITHIN_S", "_REFUSED_AT_LAST_S")),
        (descriptors, ("_HEALTHY_WITHIN_S",)),
        (endings, ("_TOLD_WITHIN_S", "_RESTART_S")),
        (live_tiers, ("_MOST_ANSWER_S",)),
        (signals, ("_ENDS_WITHIN_S", "_LEFT_WITHIN_S")),
        (tiers, ("_MOST_LOAD_S",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, 10 * getattr(module, name))
    monkeypatch.setattr(amplify, "_NOTICED_S", {what: 10 * most_s for what, most_s in amplify._NOTICED_S.items()})


@pytest.fixture
def options(tiny_dir):
    return [option.format(tiny_dir) for option in SMALL]


def test_a_server_stands(options):
    given = [option for name in ("descriptors", "kill") for option in CASES[name].options]

    async def live() -> None:
        async with running_server([*given, *options]) as server:
            for name in SHARED:
                found = await CASES[name].run(server, SCALE, random.Random(0))
                assert (name, found.problems) == (name, [])
                assert found.seen

    asyncio.run(live())


@pytest.mark.parametrize(("case", "more"), [("frozen", ["--step-timeout", "1"]), ("retraction", []), ("signals", []),
                                            ("tiers", [])])  # fmt: skip
def test_a_server_of_its_own_stands(case, more, options, tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    command = ["faults", "--case", case, "--scale", f"{SCALE}", "--seed", "0", "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["loadgen", *command, "--", *options, *more])
    code = main()
    found = json.loads(out.read_text())[case]
    assert (code, found["problems"]) == (0, [])
    assert found["seen"]


def test_a_wrong_answer_is_no_tie(ramet):
    """A token that the idle server would not choose is far from its first choice, at any place."""

    async def measure() -> tuple[float, list[float]]:
        async with http_client() as http:
            server, draw = Server(ramet.process, ramet.url, 0.0, http), random.Random(1)
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
