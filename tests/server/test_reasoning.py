"""Requests that share reasoning steps, on all routes, and those that cannot."""

import json
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.server.conftest import PATIENCE_S, LiveServer, start, stop

STEP = r"So we see that it is the first of all that we know\.\n\n"
SHARED = {"method": "reasoncache", "percentile": 100}


@pytest.fixture(scope="module")
def thinker(tiny_dir, tmp_path_factory) -> Iterator[LiveServer]:
    """A server whose requests share reasoning steps if they say nothing else."""
    options = (
        "--model",
        str(tiny_dir),
        "--pool-tokens",
        "4096",
        "--page-size",
        "4",
        "--reuse",
        "reasoncache",
        "--drafts",
        "off",
    )
    server = start(tmp_path_factory.mktemp("thinker") / "log", *options, "--debug-invariants")
    yield server
    server.check_idle()
    assert stop(server) == 0
    assert "Traceback" not in server.log.read_text()


@pytest.fixture
def http(thinker) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=thinker.url, timeout=120) as client:
        yield client


def body(**fields):
    sampling = {"max_new_tokens": 160, "temperature": 0, "regex": f"({STEP}){{7}}"}
    return {"text": "Think.", "sampling_params": sampling, **fields}


def until_shared(ask: Callable[[], dict]) -> dict:
    """An answer's account of its reuse. Steps are compared beside it: on a busy machine it may have ended before."""
    deadline = time.monotonic() + PATIENCE_S
    while not (told := ask())["substituted_pages"]:
        assert time.monotonic() < deadline
    return told


def metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return float(next(line.rsplit(" ", 1)[1] for line in lines if line.startswith(f"{name}{{")))


def test_an_answer_says_what_was_shared(http):
    told = until_shared(lambda: http.post("/generate", json=body(reuse=SHARED)).json()["meta_info"]["reuse"])
    assert told["method"] == "reasoncache"
    assert told["approximate"]
    assert 0 < told["amsr"] < 1
    assert 0 < told["first_substituted_token"] < told["exact_tokens"] < 160
    assert metric(http, "ramet:substituted_pages_total") >= told["substituted_pages"]
    assert metric(http, "ramet:saved_pages") == 0
    assert metric(http, "ramet:reasoning_cpu_seconds_total") > 0


def test_streams_say_it_at_their_end(http):
    def end() -> dict:
        with http.stream("POST", "/generate", json=body(reuse=SHARED, stream=True)) as answer:
            *events, last = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        assert not any("reuse" in event["meta_info"] for event in events)
        return last["meta_info"]["reuse"]

    assert until_shared(end)["approximate"]


def test_the_servers_default_and_how_to_leave_it(http):
    short = {"text": "Think.", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    told = http.post("/generate", json=short).json()["meta_info"]["reuse"]
    assert (told["method"], told["approximate"], told["first_substituted_token"]) == ("reasoncache", False, None)
    for exact in ({"reuse": {"method": "none"}}, {"return_logprob": True, "logprob_start_len": 0}):
        answer = http.post("/generate", json={**short, **exact})
        assert answer.status_code == 200
        assert "reuse" not in answer.json()["meta_info"]


def test_each_choice_says_what_it_shared(http):
    model = http.get("/v1/models").json()["data"][0]["id"]
    fields = {"model": model, "max_tokens": 4, "n": 2, "reuse": SHARED}
    chat = {"messages": [{"role": "user", "content": "Think."}]}
    for path, prompt in (("completions", {"prompt": "Think."}), ("chat/completions", chat)):
        answer = http.post(f"/v1/{path}", json={**fields, **prompt}).json()
        assert [choice["reuse"]["method"] for choice in answer["choices"]] == ["reasoncache"] * 2
        with http.stream("POST", f"/v1/{path}", json={**fields, **prompt, "stream": True}) as stream:
            events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
        assert sum("reuse" in event for event in events) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reuse": SHARED | {"percentile": 0}}, "reuse.percentile"),
        ({"reuse": SHARED | {"percentile": "80"}}, "reuse.percentile"),
        ({"reuse": SHARED | {"tau_max": 0.5, "tau_min": 0.6}}, "reuse.tau_min"),
        ({"reuse": SHARED | {"ratio": 0.5}}, "reuse.ratio"),
        ({"reuse": {"method": "no such"}}, "reuse.method"),
        ({"reuse": SHARED, "return_logprob": True, "logprob_start_len": 0}, "reuse"),
        ({"reuse": SHARED, "text": None, "segments": [{"document": {"text": "A text."}}, {"text": "Think."}]}, "reuse"),
    ],
)
def test_bad_requests_get_one_clear_error(http, fields, param):
    answer = http.post("/generate", json=body(**fields))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    if fields["reuse"] == {"method": "no such"}:
        assert {"a3", "auto", "reasoncache"} <= set(answer.json()["error"]["message"].split())


def test_modules_are_refused(http):
    http.post("/v1/schemas", json={"pml": "<schema name='s'><module name='m'>Once.</module></schema>"})
    pml = "<prompt schema='s'><m/>Think.</prompt>"
    answer = http.post("/generate", json={"pml": pml, "reuse": SHARED})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reuse")
    # The default is for those that it can serve.
    served = http.post("/generate", json={"pml": pml, "sampling_params": {"max_new_tokens": 1}})
    assert served.json()["meta_info"]["reuse"]["strategy"] == "modules"


def test_routes_that_cannot_say_it_stay_exact(http, thinker):
    """Whatever they ask for is served by another strategy: no page of theirs is handed to the evaluation."""
    model = http.get("/v1/models").json()["data"][0]["id"]
    short = {"text": "Think.", "sampling_params": {"max_new_tokens": 2, "temperature": 0}}

    def booked() -> float:
        """The time is booked by a later request that shares steps."""
        assert http.post("/generate", json=short).status_code == 200
        return metric(http, "ramet:reasoning_cpu_seconds_total")

    times = [booked() for _ in range(2)]
    while times[-2] != times[-1]:  # what earlier tests left to be compared
        time.sleep(0.2)
        times.append(booked())
    said = {"model": model, "messages": [{"role": "user", "content": "Think."}], "max_tokens": 24, "temperature": 0}
    assert http.post("/v1/messages", json=said).status_code == 200
    asked = {"model": model, "input": "Think.", "max_output_tokens": 24, "temperature": 0}
    assert http.post("/v1/responses", json=asked).status_code == 200
    assert booked() == times[-1]
