"""The harness: order of measurements, files, intervals, options and reports."""

import json
import random
from typing import ClassVar, Literal

import pytest
from pydantic import Field

from loadgen import commands
from loadgen.harness import Bench, BenchError, Figure, repeats_of
from loadgen.harness.run import execute
from loadgen.harness.statistics import compared, estimate, over_repeats


class Toy(Bench):
    """A bench that returns what it is told, and remembers the order."""

    figures: ClassVar = (
        Figure("seconds", "time, ms", factor=1000, versus="ratio", plotted=True),
        Figure("seconds", "slowest, ms", factor=1000, statistic="max"),
        Figure("never", "never measured"),
    )
    calls: ClassVar[list] = []
    broken: ClassVar[list] = []

    repeats: int = repeats_of(3)
    sizes: tuple[int, ...] = Field((1, 8), description="of inputs")
    mode: Literal["plain", "odd"] = Field("plain", description="how")

    def baseline(self):
        return "way", "old"

    def cells(self):
        return [{"way": way, "size": size} for way in ("old", "new") for size in self.sizes]

    def measure(self, cell, draw: random.Random):
        self.calls.append((cell["way"], cell["size"], draw.random()))
        if self.mode == "odd" and len(self.calls) == 7:
            raise KeyboardInterrupt
        if (cell["way"], cell["size"]) in self.broken:
            raise RuntimeError("no | room\nfor it")
        seconds = cell["size"] * (0.5 if cell["way"] == "new" else 1.0)
        return {"seconds": [seconds, 2 * seconds], "note": "kept"}


@pytest.fixture(autouse=True)
def forget():
    Toy.calls.clear()


def test_rounds_alternate_and_cells_of_a_round_draw_the_same():
    assert execute("toy", Toy(seed=1)) == 0
    rounds = [Toy.calls[i : i + 4] for i in range(0, len(Toy.calls), 4)]
    assert len(rounds) == 1 + 3
    names = [[call[:2] for call in calls] for calls in rounds]
    assert names[0] == names[2] == names[1][::-1] == names[3][::-1]
    assert [len({call[2] for call in calls}) for calls in rounds] == [1] * 4
    assert len({calls[0][2] for calls in rounds}) == 4


def test_a_file_is_continued_and_not_measured_again(tmp_path):
    path = tmp_path / "toy.jsonl"
    assert execute("toy", Toy(seed=1, json_=path, mode="odd")) == 130
    first = path.read_text()
    assert len(first.splitlines()) == 1 + 2
    path.write_text(first + '{"cut')  # as a killed process leaves it
    Toy.calls[:] = [None] * 20
    with pytest.raises(BenchError, match="--resume"):
        execute("toy", Toy(json_=path, mode="odd"))
    assert execute("toy", Toy(json_=path, mode="odd", resume=True)) == 0
    facts, *lines = map(json.loads, path.read_text().splitlines())
    assert len({(line["cell"]["way"], line["cell"]["size"], line["repeat"]) for line in lines}) == len(lines) == 12
    assert facts["seed"] == 1
    assert facts["machine"]["cores"] >= 1
    assert lines[0]["figures"]["note"] == "kept"
    with pytest.raises(BenchError, match="other options"):
        execute("toy", Toy(json_=path, sizes=(3,), resume=True))
    (tmp_path / "text").write_text("no JSON")
    with pytest.raises(BenchError, match="not the result"):
        execute("toy", Toy(json_=tmp_path / "text", resume=True))


def test_the_page_has_command_machine_table_and_plot(tmp_path, capsys):
    page, plot = tmp_path / "toy.md", tmp_path / "toy.png"
    assert execute("toy", Toy(sizes=(2, 4), markdown=page, plot=plot)) == 0
    text = page.read_text()
    assert "ramet bench toy --sizes 2 4\n" in text
    assert "cores of" in text
    assert "| new | 4 | 3,000.0 |" in text.replace("3000.0", "3,000.0")
    assert "times old" in text
    assert "0.50" in text
    assert "never" not in text
    assert "![plot](toy.png)" in text
    assert plot.stat().st_size > 5000
    assert "slowest, ms" in capsys.readouterr().out


def test_a_cell_that_fails_ends_no_bench_and_is_measured_again(tmp_path, capsys, monkeypatch):
    page, path = tmp_path / "toy.md", tmp_path / "toy.jsonl"
    monkeypatch.setattr(Toy, "broken", [("new", 8)])
    assert execute("toy", Toy(warmup=0, repeats=2, json_=path, markdown=page)) == 1
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert len(lines) == 8
    errors = [line for line in lines if "error" in line]
    assert [line["cell"] for line in errors] == [{"way": "new", "size": 8}] * 2
    assert errors[0]["error"].startswith("RuntimeError: no | room (test_harness.py:")
    assert "| way new, size 8 | RuntimeError: no / room" in page.read_text()
    assert "RuntimeError: no / room" in capsys.readouterr().out
    Toy.calls.clear()
    Toy.broken.clear()
    assert execute("toy", Toy(warmup=0, repeats=2, json_=path, resume=True)) == 0
    assert [call[:2] for call in Toy.calls] == [("new", 8)] * 2
    assert "no / room" not in capsys.readouterr().out


def test_what_ends_a_bench_fails_a_guarded_cell(tmp_path, monkeypatch):
    """The process was begun for its cells alone, and `no more here` is for a lost device."""

    def refuse(bench, cell, draw):
        if cell == {"way": "old", "size": 8}:
            raise BenchError("request 3 failed")
        return {"seconds": 1.0}

    monkeypatch.setattr(Toy, "measure", refuse)
    with pytest.raises(BenchError, match="request 3 failed"):
        execute("toy", Toy(repeats=1, warmup=0))
    assert execute("toy", Toy(repeats=1, warmup=0, guard=True, json_=tmp_path / "a.jsonl")) == 1
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()[1:]]
    assert sum("figures" in line for line in lines) == 3
    (error,) = {line["error"] for line in lines if "error" in line} - {"did not end"}
    assert error.startswith("BenchError: request 3 failed")


def test_a_bench_whose_every_cell_fails_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(Toy, "broken", [("old", 8), ("new", 8)])
    page = tmp_path / "toy.md"
    assert execute("toy", Toy(sizes=(8,), warmup=0, markdown=page, plot=tmp_path / "toy.png")) == 1
    assert page.read_text().count("RuntimeError: no / room") == 2


def test_a_bench_that_its_limit_ends_says_so(capsys):
    assert execute("toy", Toy(limit=1e-9)) == 3
    assert capsys.readouterr().err.endswith("--limit 1e-09 ended this after 0 of 12 measurements\n")
    assert Toy.calls == []


def test_intervals():
    draw = random.Random(0)
    values = [draw.gauss(10, 1) for _ in range(100)]
    middle, low, high = estimate(values, "mean")
    assert low < middle < high
    assert high - low == pytest.approx(2 * 1.96 * 0.1, rel=0.3)
    assert estimate([3.0, 3.0]) == (3.0, 3.0, 3.0)
    assert over_repeats([[], []], "median") is None
    assert over_repeats([[1, 2, 3], [5, 6, 7]], "median")[0] == 4
    assert compared([[2.0], [6.0]], [[1.0], [2.0]], "median", "ratio")[0] == 2.5
    assert compared([[1, 0, 1]], [[0, 0, 1]], "mean", "difference")[0] == pytest.approx(1 / 3)
    assert compared([[1.0]], [[0.0]], "median", "ratio") is None


def test_options_come_from_the_fields_and_reports_from_files(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(commands, "find_bench", {"tree": Toy}.get)
    monkeypatch.setattr(commands, "BENCHES", {"tree": commands.BENCHES["tree"]})

    files = [tmp_path / f"{name}.jsonl" for name in ("before", "after")]
    for path, sizes in zip(files, ((1, 2), (1, 2, 3)), strict=True):
        assert bench("tree", "--sizes", *sizes, "--repeats", 2, "--json", path)[0] == 0
    code, out, _ = bench("report", *files)
    assert (code, "after" in out, "times before" in out) == (0, True, True)
    assert bench("report", files[0])[0] == 0
    for wrong, reason in (
        (("tree", "--sizes", "x"), "--sizes: Input should be a valid integer"),
        (("tree", "--repeats", "0"), "--repeats"),
        (("tree", "--mode", "none"), "--mode"),
        (("tree", "--json", tmp_path / "no" / "file"), "--json: there is no directory"),
        (("report", tmp_path / "none"), "not the result of a bench"),
    ):
        code, _, err = bench(*wrong)
        assert code == 2
        assert reason in err
