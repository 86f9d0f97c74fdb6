"""The script for a short loan of a GPU: parts in processes of their own, what ends them, and the page."""

import json
import time

import pytest

from loadgen.experiments.gpu import lease as module
from loadgen.experiments.gpu.bench_gpu import PARTS
from loadgen.experiments.gpu.lease import Lease
from loadgen.experiments.gpu.lease_page import page
from loadgen.experiments.gpu.lease_parts import Part, parts

# Stands for a bench: appends the records of its first arguments to the file of --json, and then does the last one.
BENCH = """
import json, os, sys, time
*cells, end = sys.argv[1 : sys.argv.index("--json")]
path = sys.argv[sys.argv.index("--json") + 1]
there = open(path).read() if os.path.exists(path) else json.dumps({"facts": 1}) + "\\n"
with open(path, "w") as file:
    file.write(there)
    for cell in cells:
        key = json.dumps({"cell": {"n": cell}, "repeat": 0})[:-1]
        if key in there:
            continue
        file.write(key + ', "error": "did not end"}\\n')
        file.flush()
        if cell == "abort":
            os.abort()
        file.write(key + ', "figures": {"step": 2}}\\n')
print("the last line")
time.sleep(60 if end == "hang" else 0)
sys.exit(int(end) if end.isdigit() else 0)
"""


def part(name, *words, seconds=0.0, most=30.0, stall=20.0):
    return Part(name, ("-c", BENCH, *words), seconds, seconds, most, stall)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_gpu", lambda: "A GPU, 1.2")

    def call(*wanted, seconds=60.0):
        (tmp_path / "work").mkdir(exist_ok=True)
        monkeypatch.setattr(Lease, "_call", lambda *_: None)
        code = Lease(tmp_path / "out", tmp_path / "work", time.monotonic() + seconds).run(wanted, None)
        for file in (tmp_path / "work").glob("*.jsonl"):
            file.unlink()  # as on the next machine
        return code, json.loads((tmp_path / "out" / "lease.json").read_text())["parts"]

    return call


def cells(part):
    last = {line["cell"]["n"]: line.get("error") for line in part["lines"][1:]}
    return {name: error is None for name, error in last.items()}


def test_what_dies_or_hangs_hurts_itself_alone(run, tmp_path):
    code, found = run(
        part("dies", "one", "abort", "three", "0"),
        part("hangs", "one", "hang", stall=1.0),
        part("refuses", "2"),
        part("ends", "one", "0"),
        part("has no room", "one", "0", seconds=1000.0),
    )
    assert code == 1
    assert cells(found["dies"]) == {"one": True, "abort": False, "three": True}
    assert found["dies"]["rc"] == 0, "the next process left out what had killed the first one"
    assert found["hangs"]["error"] == "killed: nothing new for 1 s"
    assert found["refuses"]["error"] == "exit status 2: the last line"
    assert (found["ends"]["rc"], found["ends"]["error"]) == (0, "")
    assert found["has no room"]["error"] == "left out: no time"
    text = (tmp_path / "out" / "gpu.md").read_text()
    assert "| dies | n abort | did not end |" in text
    assert "| dies: 1 of 3 cells | none fails | failed | no |" in text
    assert "| has no room | -1 | 0 | left out: no time |" in text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gpu.md", "lease.json", "log.txt"]


def test_it_goes_on_where_it_stopped_on_the_same_gpu(run, tmp_path, monkeypatch):
    assert run(part("first", "one", "0"), part("second", "one", "two", "3"))[0] == 1
    code, found = run(part("first", "one", "9"), part("second", "one", "two", "three", "0"))
    assert code == 0, "what had ended does not run again"
    assert cells(found["second"]) == {"one": True, "two": True, "three": True}
    assert sum("figures" in line for line in found["second"]["lines"]) == 3, "what was measured is not measured again"
    monkeypatch.setattr(module, "_gpu", lambda: "Another GPU, 1.2")
    assert run(part("first", "one", "9"))[0] == 1
    assert (tmp_path / "out" / "lease-of-another-gpu.json").exists()


def test_without_time_there_is_a_page(run, tmp_path):
    assert run(part("one", "one", "0"), seconds=-1)[0] == 1
    assert "left out: no time" in (tmp_path / "out" / "gpu.md").read_text()


def part_of(*lines):
    return {"rc": 0, "seconds": 1.0, "error": "", "lines": [{}, *lines]}


def one(figures, **cell):
    return {"cell": cell, "repeat": 0, "figures": figures}


def test_targets_stand_beside_figures():
    decode = [one({"step": [s, s, 9]}, part="decode", mode=m, requests=32) for m, s in (("default", 2), ("eager", 3))]
    decode[0]["figures"]["share"] = 0.65
    shared = [
        one({"step": s}, part="shared prefix", mode=m) for m, s in (("default", 1), ("no cascade", 1.4), ("eager", 3))
    ]
    families = [
        one(
            {"theirs": 0.9, "warm": 1, "gap": 0.02}, part="families", family="A", dtype="bfloat16", kernels="flashinfer"
        ),
        one({"theirs": 1, "warm": 0.5, "gap": 0}, part="families", family="B", dtype="float32"),
    ]
    kernels = [{"name": "a<b|c>", "us": 12.34, "count": 64}] * 9
    steps = one({"step": 0.5, "kernels": kernels, "calls": kernels}, part="steps", steps="decode")
    product = one({"error": 0.01, "faster": 0.5}, part="products", weights="float8", rows=1)
    log = one({"warnings": 1, "lines": ["a warning"]}, asked="log")
    cases = [one({"seconds": s}, case=c) for c, s in (("no cache", 30), ("BiCache", 20))]
    errors = [one({"error": e}, part="attention", kind=k) for k, e in (("a", 0.004), ("b", 0.02))]
    first = one({"over": [1.2, 1.3, 1.4]}, part="first token")
    text = page({"gpu": "A", "parts": {
        "kernels": part_of(*errors), "tokens": part_of(*families), "products": part_of(product), "user": part_of(log),
        "speed": part_of(*decode, *shared, first, steps), "BiCache": part_of(*cases),
    }})  # fmt: skip
    for line in (
        "| attention: worst relative error | at most 0.01000 | 0.02000 | no |",
        "| families in float32: tokens as transformers, fewest | at least 100% | 100% | yes |",
        "| families in float32: cached tokens as uncached, fewest | at least 100% | 50% | no |",
        "| families by FlashInfer: logits apart where tokens part from transformers' | at most 0.1000 | 0.0200 | yes |",
        "| decode, 32 requests: share of the bandwidth's bound | at least 70% | 65% | no |",
        "| decode, 32 requests: graphs over eager, times as fast | at least 1.00 | 1.50 | yes |",
        "| decode, 1 requests: graphs over eager, times as fast | at least 1.00 |  |  |",
        "| 32 requests on a prefix of 4,096: cascade over plain, times as fast | at least 1.30 | 1.40 | yes |",
        "| 32 requests on a prefix of 4,096, eager: cascade over plain, times as fast | at least 1.30 |  |  |",
        "| first token of 4,096 cached + 128: times its ideal share | at most 1.50 | 1.30 | yes |",
        "| products, float8, rows 1: times as fast as bfloat16 | at least 1.00 | 0.50 | no |",
        "| BiCache over no cache, times as fast (paper: 1.36 to 1.98) | at least 1.36 | 1.50 | yes |",
        "| decode | 12.3 | 64 | a<b/c> |",
        "| asked log | a warning |",
        "| steps | steps decode | step 0.5 |",
    ):
        assert f"{line}\n" in text
    assert text.count("| decode | 12.3 |") == 8, "only the longest kernels"


def test_what_failed_is_no_figure():
    """Not even beside cells that did not fail: the worst of them is unknown."""
    failed = {"cell": {"part": "attention", "kind": "b"}, "repeat": 0, "error": "RuntimeError: a | b"}
    share = {"cell": {"part": "decode", "mode": "default", "requests": 32}, "repeat": 0, "error": "2292% of"}
    text = page({"gpu": "A", "parts": {
        "kernels": part_of(one({"error": 0.004}, part="attention", kind="a"), failed), "speed": part_of(share),
    }})  # fmt: skip
    for line in (
        "| attention: 1 of 2 cells | none fails | failed | no |",
        "| attention: worst relative error | at most 0.01000 | failed | no |",
        "| decode, 32 requests: share of the bandwidth's bound | at least 70% | failed | no |",
        "| decode, 32 requests: graphs over eager, times as fast | at least 1.00 |  |  |",
        "| attention | kind b | RuntimeError: a / b |",
    ):
        assert f"{line}\n" in text


def test_the_rehearsal_measures_with_the_benches_themselves(tmp_path):
    """Two parts of it; the whole rehearsal is the command, which takes minutes. Other tests run the other benches."""
    wanted = [one for one in parts(rehearse=True, model=None) if one.name in ("products", "BiCache")]
    assert Lease(tmp_path / "out", tmp_path, time.monotonic() + 900).run(wanted, None) == 0, (
        tmp_path / "out" / "log.txt"
    ).read_text()
    text = (tmp_path / "out" / "gpu.md").read_text()
    (product,) = (line for line in text.splitlines() if line.startswith("| products, float8, rows 1:"))
    (bicache,) = (line for line in text.splitlines() if line.startswith("| BiCache over"))
    assert product[-5:] in ("yes |", " no |")
    assert bicache[-5:] in ("yes |", " no |")


def test_every_part_is_a_command_of_the_benches():
    names = [one.name for one in parts(rehearse=False, model="DIR")]
    assert names == [one.name for one in parts(rehearse=True, model=None)]
    found = parts(rehearse=False, model="DIR")
    assert sum(one.seconds for one in found) < 9 * 60
    words = [word for one in found for word in one.command]
    assert set(PARTS) <= set(words), "every part of the bench"
    assert all(one.least <= one.seconds < one.most for one in found)
