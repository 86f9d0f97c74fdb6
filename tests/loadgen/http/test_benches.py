"""The benchmarks as commands, against a real Ramet server and an independent one."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec

import httpx
import pytest

from loadgen.__main__ import main
from loadgen.http.bench_sweep import knee
from loadgen.http.local_server import free_port, wait_ready
from loadgen.http.summary import Level
from tests.loadgen.http.test_load import slow


@pytest.fixture
def bench(monkeypatch, capsys):
    """Runs `python -m loadgen` in this process; the exit code, what it wrote, and its errors."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["loadgen", *map(str, arguments)])
        try:
            code = main()
        except SystemExit as exit_:
            code = exit_.code
        written = capsys.readouterr()
        return code, written.out, written.err

    return call


SMALL = ("--prompt-tokens", 10, "--output-tokens", 5)


class Page(HTMLParser):
    """The tags of a page, and the addresses that it would load."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.tags = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [
            value
            for name, value in attrs
            if name in ("src", "href", "xlink:href", "data") and not value.startswith(("#", "data:"))
        ]


@pytest.mark.parametrize("api", ["generate", "chat", "completions"])
def test_serve_writes_everything(bench, ramet, tmp_path, api):
    files = {kind: tmp_path / f"run.{kind}" for kind in ("json", "csv", "html")}
    outputs = [part for kind, path in files.items() for part in (f"--{kind}", path)]
    code, out, err = bench("serve", "--url", ramet.url, "--api", api, "--groups", 2, "--prefix-tokens", 40, *SMALL,
                           "--requests", 12, "--concurrency", 3, "--warmup", 1, "--flush", "--goodput", "ttft:1e9",
                           "--seed", 3, *outputs)  # fmt: skip
    assert (code, err) == (0, "")
    assert "time to first token (TTFT)" in out
    data = json.loads(files["json"].read_text())
    assert data["summary"]["completed"] == data["summary"]["goodput"]["requests"] == 12
    assert data["summary"]["output_tokens"] == 60
    assert data["summary"]["cached_tokens"] > 0
    assert data["flushed"] is True
    if api == "generate":
        assert data["summary"]["latency"]["queue"]["max"] >= 0
    with files["csv"].open() as lines:
        assert [int(row["output_tokens"]) for row in csv.DictReader(lines)] == [5] * 12
    text = files["html"].read_text()
    assert '<p class="verdict">Half of the requests had their first token within' in text
    assert "cold start" in text
    page = Page(text)
    assert page.loads == []
    assert page.tags.count("svg") == 6
    assert "script" not in page.tags


def test_prefix_measures_cold_and_warm(bench, ramet, tmp_path):
    path = tmp_path / "p.json"
    sizes = ("--prefix-tokens", 256, "--question-tokens", 16, "--runs", 2)
    code, out, _ = bench("prefix", "--url", ramet.url, *sizes, "--json", path)
    assert code == 0
    assert "over ideal share" in out
    seconds = json.loads(path.read_text())["seconds"]
    assert {kind: len(values) for kind, values in seconds.items()} == {"cold": 2, "warm": 2, "question alone": 2}
    assert min(min(values) for values in seconds.values()) > 0


def test_agents_reads_the_longest_prefix_whatever_their_habit(bench, ramet, tmp_path):
    path, plot = tmp_path / "a.json", tmp_path / "a.png"
    sizes = ("--requests", 5, "--sessions", 1, "--system-tokens", 12, "--step-tokens", 12)
    code, out, _ = bench("agents", "--url", ramet.url, *sizes, "--json", path, "--plot", plot)
    httpx.post(f"{ramet.url}/flush_cache?pins=true").raise_for_status()
    assert code == 0
    assert "habit" in out
    assert plot.stat().st_size > 1000
    measured = {habit: one for habit, (one,) in json.loads(path.read_text())["sessions"].items()}
    for counts in measured.values():
        # Only whole pages of 16 tokens are kept of a prompt.
        assert all(0 <= count["exact"] - count["read"] < 16 for count in counts), counts
    spent = {habit: sum(count["prompt"] - count["read"] for count in one) for habit, one in measured.items()}
    assert spent["billing line first"] > 2 * spent["billing line last"] > 2 * spent["none"] * 0.9
    assert min(spent["tools reordered"], spent["keys reordered"], spent["thoughts stripped"]) > spent["none"]


def test_compare_sets_runs_side_by_side(bench, ramet, tmp_path):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        assert (
            bench("serve", "--url", ramet.url, "--workload", "unique", *SMALL, "--requests", 8, "--json", path)[0] == 0
        )
    code, out, _ = bench("compare", *paths, "--draws", 50, "--html", tmp_path / "both.html")
    assert code == 0
    assert "TTFT p90 ms" in out
    page = (tmp_path / "both.html").read_text()
    verdict = re.search(r'<p class="verdict">(.*?)</p>', page)[1]
    assert "b.json) is " in verdict
    assert "to the first token" in verdict
    assert verdict.replace("&#x27;", "'") in " ".join(out.split())
    shown = Page(page)
    assert (shown.loads, shown.tags.count("svg"), shown.tags.count("h1")) == ([], 12, 2)
    assert "differ" not in out
    assert bench("compare", paths[0], tmp_path / "none.json")[0] == 2


def test_sweep_stops_where_the_service_level_breaks(bench, bad_server, tmp_path):
    """A server of three places, which sends a fourth request away."""
    server = bad_server(with_places(3))
    files = ("--json", tmp_path / "s.json", "--plot", tmp_path / "s.png")
    code, out, _ = bench("sweep", "--url", server.url, "--model", "m", "--workload", "unique", *SMALL, "--requests", 8,
                         "--goodput", "ttft:1e9", "--stop", 64, *files)  # fmt: skip
    assert code == 0
    data = json.loads((tmp_path / "s.json").read_text())
    loads = [level["load"] for level in data["levels"]]
    assert loads == [1, 2, 3, 4]
    assert [level["held"] for level in data["levels"]] == [True, True, True, False]
    assert data["knee"] == 3
    assert (tmp_path / "s.png").stat().st_size > 10000
    assert "holds" in out


def with_places(places):
    """A script of a server that answers so many requests at once."""
    answer = slow(0.2)

    async def script(reader, writer, head):
        if answer.running < places:
            await answer(reader, writer, head)
        else:
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nfull")

    return script


def test_the_knee_is_below_the_first_level_that_broke():
    def levels(*held):
        return [Level(2**i, {}, good) for i, good in enumerate(held)]

    assert knee(levels(True, True, False, True)) == 2
    assert knee(levels(False, True)) is None
    assert knee(levels(True)) == 1


def test_suite_runs_every_case_on_every_server(bench, ramet, tmp_path):
    files = ("--json", tmp_path / "s.json", "--markdown", tmp_path / "s.md")
    urls = (f"one={ramet.url}", f"two={ramet.url}/v1/")
    code, out, err = bench("suite", "--url", *urls, "--repeats", 2, "--scale", 0.01, "--length-scale", 0.02,
                           "--concurrency", 2, "--warmup", 0, "--cases", "abcde", *files)  # fmt: skip
    assert (code, err) == (0, "")
    runs = json.loads((tmp_path / "s.json").read_text())["runs"]
    assert {(run["letter"], run["server"], run["repeat"]) for run in runs} == {
        (letter, server, repeat) for letter in "abcde" for server in ("one", "two") for repeat in (0, 1)
    }
    assert [run["server"] for run in runs if run["letter"] == "a"] == ["one", "two", "two", "one"]
    # Both servers get the same prompts, and every repeat fresh ones.
    seeds = {(run["letter"], run["repeat"], run["result"]["seed"]) for run in runs}
    assert len(seeds) == len({seed for *_, seed in seeds}) == 10
    lines = (tmp_path / "s.md").read_text().splitlines()
    assert len(lines) == 2 + 5 * 2
    assert {line.count("|") for line in lines} == {11}
    assert "(c) chat of 6 turns" in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["serve", "--documents", "3"], "--documents"),
        (["serve", "--arrivals", "gamma", "--rate", "2"], "gamma arrivals take --rate and --burstiness"),
        (["serve", "--workload", "trace"], "needs --trace"),
        (["serve", "--workload", "file", "--file", "/no/such/file"], "/no/such/file"),
        (["serve", "--goodput", "speed:3"], "speed:3"),
        (["serve", "--tokenizer", "/no/such"], "/no/such"),
        (["serve", "--url", "http://127.0.0.1:9", "--requests", "1"], "cannot be reached"),
        (["serve", "--url", "nonsense"], "cannot be reached"),
        (["serve", "--rate", "-1"], "must be above 0"),
        (["sweep"], "--goodput"),
        (["sweep", "--goodput", "ttft:1", "--start", "0.5"], "at least 1"),
        (["suite", "--url", "http://x", "--cases", "az"], "no case z"),
        (["compare", "--draws", "0", "x"], "at least 1"),
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
    path, server = tmp_path / "run.json", bad_server(slow(0.05))
    command = [sys.executable, "-m", "loadgen", "serve", "--url", server.url, "--model", "m",
               "--workload", "unique", "--requests", "100000", "--json", str(path),
               "--html", str(tmp_path / "r.html")]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert "closed loop" in process.stdout.readline()
    while server.requests < 20:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    data = json.loads(path.read_text())
    assert data["ended_by"] == "the user"
    assert 0 < data["summary"]["completed"] < 100000
    assert "<svg" in (tmp_path / "r.html").read_text()


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
    path = tmp_path / "run.json"
    code, out, err = bench("serve", "--url", transformers_server, "--model", tiny_dir, "--api", api,
                           "--workload", "chat", "--turns", 2, "--prefix-tokens", 20, *SMALL,
                           "--requests", 4, "--concurrency", 2, "--tokenizer", tiny_dir, "--json", path)  # fmt: skip
    assert (code, err) == (0, ""), out
    data = json.loads(path.read_text())
    assert data["summary"]["completed"] == 4, data["summary"]["errors"]
    assert data["fixed_output"].startswith("not supported")
    assert data["server_metrics"] is None
    assert data["summary"]["hit_ratio"] is None
    assert data["summary"]["input_tokens"] > 4 * 20
    assert 4 <= data["summary"]["output_tokens"] <= 4 * 6
