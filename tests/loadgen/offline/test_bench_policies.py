"""The replay of block traces: against a brute-force cache, and within its bounds."""

import json
import random
from array import array

import pytest

from loadgen.experiments.micro.bench_holds import mixed
from loadgen.harness import BenchError
from loadgen.harness.run import execute
from loadgen.offline.bench_policies import Policies, capacities_of, last_prompts, offline_bound, operations, replay
from loadgen.offline.stress import STRESS, stress_trace
from loadgen.offline.traffic import read_traffic, reuse_gaps
from radix import POLICIES

CAPACITIES = (60, 150, 400)
LENGTHS = {"input_length": 40, "output_length": 1}


@pytest.fixture(scope="module")
def trace():
    """Conversations that grow by a few blocks a turn, as recorded ones do."""
    draw = random.Random(2)
    fresh = iter(range(10**6))
    open_chats: list[list[int]] = []
    trace = []
    for _ in range(600):
        if open_chats and draw.random() < 0.6:
            chat = draw.choice(open_chats[-30:])
        else:
            chat = []
            open_chats.append(chat)
        chat.extend(next(fresh) for _ in range(draw.randrange(1, 5)))
        trace.append((float(len(trace)), array("i", chat)))
    return trace


# Blocks of the trace that each policy finds, of 3,110.
HITS = {"foresight": [738, 1462, 1623], "lru": [702, 1320, 1623]}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_stays_below_the_offline_bound(trace, policy):
    bounds = [offline_bound(trace, capacity) for capacity in CAPACITIES]
    found = [replay(trace, policy, capacity) for capacity in CAPACITIES]
    assert [sum(one.hits) for one in found] == HITS[policy]
    assert all(one.hit_ratio <= bound.hit_ratio for one, bound in zip(found, bounds, strict=True))
    assert replay(trace, policy, 10**6).hits == offline_bound(trace, 10**6).hits


def test_who_holds_is_found_again_and_others_pay_for_it(tmp_path, measured):
    trace = [(float(i), array("i", blocks)) for i, blocks in enumerate([[1, 2], [3, 4], [5, 6], [3, 4], [1, 2]])]
    hold_s = [9.0, 0.0, 0.0, 0.0, 0.0]
    assert replay(trace, "lru", 4).found == [0, 0, 0, 2, 0]
    assert replay(trace, "lru", 4, hold_s).found == [0, 0, 0, 0, 2]
    assert replay(trace, "lru", 4, [3.0, *hold_s[1:]]).found == [0, 0, 0, 0, 0], "it is over too soon"
    assert replay(trace, "lru", 3, hold_s).found == replay(trace, "lru", 3).found, "half of the cache may be held"
    path = tmp_path / "small.jsonl"
    lines = [{**LENGTHS, "timestamp": 1000 * at_s, "hash_ids": list(blocks)} for at_s, blocks in trace]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = measured("holds", "--traces", path, "--hold-times", 0, 2)
    assert {one["traffic"] for one in found} == {"small"}
    assert len(found) == 2 * 2 * len(POLICIES)
    assert all(one["holding"] == one["hits"] for one in found)


def test_synthetic_traffic_of_those_who_hold_and_others():
    shares = {}
    for name in ("bursts", "agents", "few agents"):
        trace, holds = mixed(name, random.Random(3))
        assert [at_s for at_s, _ in trace] == sorted(at_s for at_s, _ in trace)
        shares[name] = sum(holds) / len(trace)
    assert 0.1 < shares["bursts"] < shares["agents"]
    assert 0.01 < shares["few agents"] < shares["agents"] / 4


def test_a_tally_by_quarter():
    trace = [
        (float(i), array("i", blocks))
        for i, blocks in enumerate([[1], [1], [1, 2], [1, 2], [3], [3, 4, 5], [1, 2], [9]])
    ]
    tally = replay(trace, "lru", 100)
    assert (tally.blocks, tally.hits) == ([2, 4, 4, 3], [1, 3, 1, 2])
    assert tally.by_quarter() == [0.5, 0.75, 0.25, pytest.approx(2 / 3)]
    assert tally.hit_ratio == 7 / 13
    assert tally.saved == pytest.approx(7 + 2 / 64)
    assert tally.saved_ratio == tally.saved / tally.operations
    assert operations(0, 3) == pytest.approx(3 + 3 / 64) == operations(0, 1) + operations(1, 3)
    assert offline_bound(trace, 2).hits == [1, 3, 1, 1], "2 goes for 3, which is next"


def test_prompts_that_none_continues_go_first():
    trace = [(float(i), array("i", blocks)) for i, blocks in enumerate([[1, 2, 9], [3, 4, 8], [5, 6, 7], [1, 2, 10]])]
    assert last_prompts(trace) == {1, 2, 3}
    assert replay(trace, "lru", 6).found == [0, 0, 0, 0]
    assert replay(trace, "lru", 6, ends=last_prompts(trace)).found == [0, 0, 0, 2]


@pytest.mark.parametrize(("name", "least"), [("recent", -0.003), ("loop", 0.04), ("chats", 0.02), ("uniform", 0.003)])
def test_foresight_is_hardly_ever_behind_lru(name, least):
    """All traces and sizes are in the benchmark."""
    trace = stress_trace(name)
    capacity = capacities_of(trace)[1]
    assert replay(trace, "foresight", capacity).hit_ratio - replay(trace, "lru", capacity).hit_ratio > least


def test_foresight_holds_a_part_of_a_loop_that_is_larger_than_the_cache():
    """From the third of ten rounds on; what is used least recently is always needed next."""
    documents, asked = [list(range(40 * i, 40 * i + 40)) for i in range(20)], iter(range(10**6, 10**7))
    trace = [(float(i), array("i", [*documents[i % 20], next(asked)])) for i in range(200)]
    assert replay(trace, "lru", 480).hit_ratio == 0
    assert replay(trace, "foresight", 480).by_quarter()[1] > 0.4


@pytest.mark.parametrize("name", STRESS)
def test_a_stress_trace_is_the_same_with_the_same_seed(name):
    trace = stress_trace(name, 3)
    assert trace == stress_trace(name, 3) != stress_trace(name, 4)
    assert all(blocks for _, blocks in trace)


def test_a_run_measures_every_policy_and_its_bounds(tmp_path, trace, measured):
    path = tmp_path / "small.jsonl"
    path.write_text(
        "\n".join(json.dumps({**LENGTHS, "timestamp": 1000 * s, "hash_ids": list(blocks)}) for s, blocks in trace[:80])
    )
    found = measured("policies", "--traces", path, "--capacities", 60, 150, "--stress", "uniform")
    small = {(one["policy"], one["blocks in the cache"]): one["hits"] for one in found if one["trace"] == "small"}
    assert len(small) == 2 * (len(POLICIES) + 3)
    assert small["infinite", 60] >= small["foresight, ends known", 60] > small["foresight", 60]
    assert small["lru", 150] == replay(trace[:80], "lru", 150).hit_ratio
    assert small["infinite", 60] == small["infinite", 150] >= small["offline bound", 150] >= small["foresight", 150]
    assert {one["trace"] for one in found} == {"small", "uniform"}
    with pytest.raises(BenchError, match="sorted is none of loop"):
        execute("policies", Policies(stress=("sorted",)))


def test_advice_on_traffic_of_one_s_own(tmp_path, default_model_dir, capsys):
    path = tmp_path / "own.jsonl"
    line = LENGTHS | {"block_tokens": 16, "tenant": "alice"}
    lines = [line | {"timestamp": 60_000 * (3 - i), "hash_ids": [1 << 60, 8, 100 + i]} for i in range(4)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    traffic = read_traffic(path)
    assert traffic.block_tokens == 16
    found = [(s, list(blocks)) for s, blocks in traffic.trace]
    assert found == [(60.0 * i, [0, 1, 2 + i]) for i in range(4)], "as they arrived"
    assert reuse_gaps(traffic.trace) == [60.0] * 6
    assert execute("policies", Policies(traces=(path,))) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "50.0 % of the prompt tokens were in whole blocks of 16 tokens of earlier prompts" in said
    assert "A pool of 48 tokens (--pool-tokens) finds 50.0 %" in said
    assert "Nine of ten uses come within 60 s" in said
    # Prompts and a tokenizer.
    prompts = tmp_path / "prompts.jsonl"
    asked = [{"messages": [{"role": "user", "content": "Tell me of the sea. " * 9 + end}]} for end in "ab"]
    prompts.write_text("\n".join(json.dumps(line) for line in [*asked, {"text": "Once upon a time " * 9}]))
    (_, first), (_, second), (_, third) = read_traffic(prompts, default_model_dir).trace
    shared = sum(a == b for a, b in zip(first, second, strict=True))
    assert first[:shared] == second[:shared]
    assert (3 <= shared < len(first), third[0] in first) == (True, False)
    # A bad line is named.
    for text in ("5", "{", '{"timestamp": 1}'):
        path.write_text(json.dumps(lines[0]) + "\n\n" + text)
        with pytest.raises(BenchError, match=r"own\.jsonl, line 3 is no request with times"):
            execute("policies", Policies(traces=(path,)))
