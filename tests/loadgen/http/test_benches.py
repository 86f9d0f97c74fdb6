"""The benches over HTTP as commands, against a real Ramet server and an independent one."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from loadgen.http.bench_next_turn import NextTurn
from loadgen.http.local_server import free_port, wait_ready
from tests.loadgen.http.test_load import slow

SMALL = ("--prompt-tokens", 10, "--output-tokens", 5)


def lines_of(path: Path) -> list[dict]:
    """The measurements in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


@pytest.mark.parametrize("api", ["generate", "chat", "completions"])
def test_serve_measures_and_records(bench, ramet, tmp_path, api, monkeypatch):
    monkeypatch.setenv("RAMET_BENCH_API_KEY", "a secret")
    path, page = tmp_path / "run.jsonl", tmp_path / "run.md"
    code, out, _ = bench("serve", "--url", ramet.url, "--api", api, "--groups", 2, "--prefix-tokens", 40, *SMALL,
                         "--requests", 12, "--concurrency", 3, "--warmup-requests", 1, "--flush", "--goodput",
                         "ttft:1e9", "--seed", 3, "--records", "--json", path, "--markdown", page)  # fmt: skip
    assert code == 0
    assert "time to first token (TTFT)" in out
    (measured,) = lines_of(path)
    figures = measured["figures"]
    assert measured["cell"] == {"workload": "shared-prefix", "concurrency": 3, "server": ramet.url}
    assert (figures["completed"], figures["goodput"], figures["output_tokens"]) == (12, 1.0, 60)
    assert figures["hit_ratio"] > 0
    assert figures["facts"]["flushed"] is True
    assert [request["output_tokens"] for request in figures["requests"]] == [5] * 12
    if api == "generate":
        assert len(figures["queue"]) == 12
    assert "--goodput ttft:1e9" in page.read_text()
    assert "a secret" not in path.read_text() + page.read_text() + out


def test_serve_warms_shared_prefixes_and_says_when_they_were_cold(bench, ramet, tmp_path):
    given = ("serve", "--url", ramet.url, "--groups", 2, "--prefix-tokens", 64, *SMALL, "--requests", 4,
             "--concurrency", 4, "--flush", "--records", "--json")  # fmt: skip
    code, out, _ = bench(*given, tmp_path / "cold.jsonl")
    assert (code, "4 of 4 complete requests came before their shared prefix was in the cache" in out) == (0, True)
    code, out, _ = bench(*given, tmp_path / "warm.jsonl", "--warm-prefixes")
    assert (code, "before their shared prefix" in out) == (0, False)
    figures = lines_of(tmp_path / "warm.jsonl")[0]["figures"]
    assert all(request["cached_tokens"] >= 48 for request in figures["requests"])
    assert len(figures["requests"]) == 4


def test_every_load_takes_other_lines_of_a_file(bench, ramet, tmp_path):
    """The same ones for all servers; without a bound each load takes all of them, and the terminal says so."""
    file, parts, wholes = (tmp_path / f"{name}.jsonl" for name in ("prompts", "parts", "wholes"))
    file.write_text("".join(json.dumps({"prompt": "x" * (i + 1), "output_len": 2}) + "\n" for i in range(8)))
    given = ("serve", "--url", f"one={ramet.url}", f"two={ramet.url}", "--workload", "file", "--file", file,
             "--concurrency", 1, 2, "--records", "--json")  # fmt: skip
    code, out, _ = bench(*given, parts, "--requests", 3)
    sent = [[r["prompt_chars"] for r in line["figures"]["requests"]] for line in lines_of(parts)]
    assert (code, sent) == (0, [[1, 2, 3], [1, 2, 3], [4, 5, 6], [4, 5, 6]])
    assert "same lines" not in out
    assert "every load sent the same lines" in bench(*given, wholes)[1]
    assert [len(line["figures"]["requests"]) for line in lines_of(wholes)] == [8] * 4


def test_serve_compares_servers_over_workloads_and_loads(bench, ramet, tmp_path):
    path, plot = tmp_path / "run.jsonl", tmp_path / "run.png"
    code, out, _ = bench("serve", "--url", f"one={ramet.url}", f"two={ramet.url}/v1/", "--workload", "unique", "chat",
                         "--turns", 2, "--prefix-tokens", 10, *SMALL, "--concurrency", 1, 2, "--requests", 4,
                         "--repeats", 2, "--process", f"one={os.getpid()}",
                         "--json", path, "--plot", plot)  # fmt: skip
    assert code == 0
    assert "times one" in out
    assert bench("report", path, path)[0] == 0
    assert plot.stat().st_size > 10000
    lines = lines_of(path)
    assert len(lines) == 2 * 2 * 2 * 2
    seeds = {}
    for line in lines:
        cell = line["cell"]
        place = (cell["workload"], cell["concurrency"], line["repeat"])
        seeds.setdefault(place, set()).add(line["figures"]["facts"]["seed"])
        # The one process that is known is the client, which has worked.
        assert (line["figures"]["cpu"] > 0) == (cell["server"] == "one")
    # Both servers get the same prompts, and every workload, load and repeat has prompts of its own.
    assert {len(found) for found in seeds.values()} == {1}
    assert len(set.union(*seeds.values())) == 8


def test_serve_varies_an_option_of_the_workload(bench, ramet, tmp_path):
    path = tmp_path / "run.jsonl"
    code, _, _ = bench("serve", "--url", ramet.url, "--workload", "unique", "--vary", "prompt-tokens", 40, 20,
                       "--output-tokens", 2, "--concurrency", 1, "--requests", 2, "--json", path)  # fmt: skip
    assert code == 0
    found = {line["cell"]["prompt_tokens"]: line["figures"]["input_tokens"] for line in lines_of(path)}
    assert list(found) == [40, 20]
    assert found[40] > 1.5 * found[20]


def test_prefix_measures_cold_and_warm(bench, ramet, tmp_path):
    path = tmp_path / "p.jsonl"
    sizes = ("--prefix-tokens", 256, "--question-tokens", 16, "--repeats", 2)
    code, out, _ = bench("prefix", "--url", ramet.url, *sizes, "--json", path)
    assert code == 0
    assert "times cold" in out
    found = [(line["cell"]["prompt"], line["figures"]["cached"] > 200) for line in lines_of(path)]
    assert sorted(found) == sorted([("cold", False), ("warm", True), ("question alone", False)] * 2)


def test_next_turn_measures_a_second_turn_and_others_requests(ramet):
    bench = NextTurn(steps=1, step_tokens=30, others=2)
    with httpx.Client(base_url=ramet.url, timeout=60) as client:
        bench._clients = {"off": client}
        found = bench.measure({"next turn": "off"}, random.Random(0))
    assert (found["computed"], len(found["others"])) == (0, 2)
    assert min(found["ttft"], *found["others"]) > 0


def test_agents_reads_the_longest_prefix_whatever_their_habit(bench, ramet, tmp_path):
    path = tmp_path / "a.jsonl"
    sizes = ("--requests", 5, "--turns", 3, "--system-tokens", 12, "--step-tokens", 12, "--seed", 0)
    code, out, _ = bench("agents", "--url", ramet.url, *sizes, "--json", path)
    httpx.post(f"{ramet.url}/flush_cache?pins=true").raise_for_status()
    assert code == 0
    assert "habit" in out
    measured = {line["cell"]["habit"]: line["figures"] for line in lines_of(path)}
    for figures in measured.values():
        # Only whole pages of 16 tokens are kept of a prompt. A session's first prompt begins as the title's before it.
        assert all(abs(step["shared"] - step["read"]) < 16 for step in figures["steps"]), figures["steps"]
    assert measured["messages"]["prompt"] == measured["chat"]["prompt"]
    spent = {habit: figures["prefilled"] for habit, figures in measured.items()}
    assert spent["date first"] > 2 * spent["billing line last"] > 2 * spent["none"] * 0.9
    assert spent["billing line first"] == spent["none"], "this line is no part of the prompt"
    assert min(spent["tools reordered"], spent["keys reordered"], spent["thoughts stripped"]) > spent["none"]


def test_agents_with_screenshots_compute_what_is_new(bench, tmp_path):
    path = tmp_path / "a.jsonl"
    sizes = ("--screenshots", 2, "--agents", 2, "--system-tokens", 12, "--step-tokens", 12)
    assert bench("agents", "--small", *sizes, "--json", path)[0] == 0
    (measured,) = lines_of(path)
    figures = measured["figures"]
    assert measured["cell"] == {"session": "screenshots", "habit": "none"}
    assert [step["read"] > 200 for step in figures["steps"]] == [False, False, True, True]
    assert figures["prompt"] > 6 * 13 * 16
    assert figures["over_new"] <= 1.05


def test_agents_with_screenshots_need_a_model_that_sees(bench, ramet):
    code, out, err = bench("agents", "--url", ramet.url, "--screenshots", 1, "--agents", 1, "--system-tokens", 12)
    assert code != 0
    assert "does not see" in out + err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["serve", "--documents", "3"], "--documents"),
        (["serve", "--workload", "trace"], "needs --trace"),
        (["serve", "--workload", "poem"], "no workload poem"),
        (["serve", "--workload", "file", "--file", "/no/such/file"], "/no/such/file"),
        (["serve", "--prompt-tokens", "zipf:3"], "--prompt-tokens: 'zipf:3'"),
        (["serve", "--goodput", "speed:3"], "speed:3"),
        (["serve", "--extra-body", "a=[1]"], "no JSON object"),
        (["serve", "--process", "a=1x"], "--process"),
        (["serve", "--process", "a=1"], "no server a"),
        (["serve", "--tokenizer", "/no/such"], "/no/such"),
        (["serve", "--url", "http://127.0.0.1:9", "--requests", "1"], "cannot be reached"),
        (["serve", "--url", "nonsense"], "cannot be reached"),
        (["serve", "--vary", "nonsense", "1"], "nonsense is no option of a workload"),
        (["serve", "--vary", "prompt-tokens", "many"], "'many' are not numbers"),
        (["serve", "--rate", "-1"], "must be above 0"),
    ],
)
def test_a_wrong_command_is_refused_with_a_reason(bench, arguments, complaint):
    code, _, err = bench(*arguments)
    assert code == 2
    assert complaint in err
    assert "Traceback" not in err


def test_a_server_that_refuses_the_first_request_is_named(bench, bad_server):
    async def refuse(reader, writer, head):
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 12\r\n\r\nno such name")

    code, _, err = bench("serve", "--url", bad_server(refuse).url, "--model", "m", "--requests", 1)
    assert code == 2
    assert "no such name" in err


def test_ctrl_c_on_the_command_writes_what_there_is(bad_server, tmp_path):
    path, server = tmp_path / "run.jsonl", bad_server(slow(0.05))
    command = [sys.executable, "-m", "loadgen", "serve", "--url", server.url, "--model", "m",
               "--workload", "unique", "--requests", "100000", "--json", str(path)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while server.requests < 20:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    (measured,) = lines_of(path)
    assert measured["figures"]["facts"]["ended_by"] == "the user"
    assert 0 < measured["figures"]["completed"] < 100000
    assert "ended by the user" in out


@pytest.fixture(scope="module")
def transformers_server(tiny_dir, tmp_path_factory) -> Iterator[str]:
    """`transformers serve`: an OpenAI-compatible server that owes nothing to this one, and refuses unknown fields."""
    if find_spec("accelerate") is None:
        pytest.skip("transformers serve needs accelerate, which is not installed")
    port = free_port()
    log = tmp_path_factory.mktemp("transformers") / "log"
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(tiny_dir), "--device", "cpu",
               "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_an_independent_server(bench, transformers_server, tiny_dir, tmp_path, api):
    path = tmp_path / "run.jsonl"
    code, out, _ = bench("serve", "--url", transformers_server, "--model", tiny_dir, "--api", api,
                         "--workload", "chat", "--turns", 2, "--prefix-tokens", 20, *SMALL,
                         "--requests", 4, "--concurrency", 2, "--tokenizer", tiny_dir, "--json", path)  # fmt: skip
    assert code == 0, out
    (measured,) = lines_of(path)
    figures = measured["figures"]
    assert figures["completed"] == 4, figures["errors"]
    assert figures["facts"]["fixed_output"].startswith("not supported")
    assert figures["facts"]["server_metrics"] is None
    assert figures["hit_ratio"] is None
    assert figures["input_tokens"] > 4 * 20
    assert 4 <= figures["output_tokens"] <= 4 * 6


def test_a_bench_over_http_is_chosen_without_torch_and_matplotlib():
    code = "import sys\nfrom loadgen.__main__ import main\nmain()\nprint({'torch', 'matplotlib'} & {*sys.modules})"
    command = [sys.executable, "-c", code, "serve", "--requests", "1", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "cannot be reached" in done.stderr
    assert done.stdout.splitlines()[-1] == "set()"
