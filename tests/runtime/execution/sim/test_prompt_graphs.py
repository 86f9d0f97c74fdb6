"""Graphs of steps with prompt rows on the simulated device: which steps have one, and that it waits for nothing."""

import pytest

from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.execution.sim.engines import Engine, draw, save

PREFIX = draw(7, 100)
BEHIND = [PREFIX + draw(i, 6 + 11 * i) for i in range(4)]
COLD = [draw(i, count) for i, count in enumerate((20, 64, 65, 127, 128, 300))]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {kind: save(kind, tmp_path_factory.mktemp(kind)) for kind in ("Llama", "Mistral")}


@pytest.fixture
def exact(device, models, monkeypatch):
    """Makes an engine in float32, where no rounding decides, and its like on the host."""

    def make(kind="Llama", **options):
        with monkeypatch.context() as patched:
            patched.setattr("runtime.execution.building.choose_attention", lambda *_: "flashinfer")
            engine = Engine(device, models[kind], dtype="float32", **options)
        options = {"step_tokens": 128} | options
        return engine, Driver(make_core(models[kind], kernels="torch", **options))

    return make


def watch_graphs(engine):
    """For each step from now on: rows, requests' rows that need logits, and rows of its graph (0: it has none)."""
    graphs, found = engine.core.executor.decoder.graphs, []
    run, graph = graphs.run, graphs._graph

    def counted(batch):
        found.append((len(batch.tokens), len(batch.logits_rows), 0))
        return run(batch)

    def named(shape):
        found[-1] = (*found[-1][:2], shape.rows.size)
        return graph(shape)

    graphs.run, graphs._graph = counted, named
    return found


def test_a_question_behind_a_cached_prefix_is_one_launch(device, models):
    engine = Engine(device, models["Llama"])
    for prompt in BEHIND[:2]:  # the second time, all memory is reserved
        engine.together([prompt], max_new_tokens=1)
    engine.ask(BEHIND[3], 4)
    ran = watch_graphs(engine)
    with device.watch() as events:
        engine.step()
    assert ran == [(39, 1, 64), (1, 1, 8)]  # the next step is launched ahead
    assert events.stalls == []
    assert events.count("launch") == 2


def test_chunks_beside_decoding_requests_are_launches_too(device, models):
    engine = Engine(device, models["Llama"])
    engine.begin_decode(BEHIND[:2])
    engine.together([draw(9, 200)], max_new_tokens=1)
    engine.ask(draw(11, 300))
    ran = watch_graphs(engine)
    with device.watch() as events:
        for _ in range(3):
            engine.step()
    assert [size for *_, size in ran[:3]] == [128, 128, 64]
    assert events.stalls == []


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_tokens_are_those_of_the_host(exact, kind, page_size):
    """Cold and in chunks, behind cached prefixes, and beside requests that decode."""
    engine, host = exact(kind, page_size=page_size)
    ran = watch_graphs(engine)
    for prompts in (COLD[:1], COLD[1:2], COLD[2:4], BEHIND[:1], BEHIND[1:], COLD):
        for one in (engine, host):
            one.together(prompts, max_new_tokens=5)
    assert engine.tokens == host.tokens
    assert {size for *_, size in ran} >= {8, 64, 128}
    assert any(rows > wanted > 1 for rows, wanted, size in ran if size), "rows of prompts beside others"
    if kind == "Llama":
        assert all(size for *_, size in ran)


def test_requests_that_come_while_others_decode(exact):
    engine, host = exact()
    ran = watch_graphs(engine)
    for one in (engine, host):
        for i, prompt in enumerate(BEHIND + COLD):
            one.add(f"{i}", prompt, max_new_tokens=12)
            one.step()
            one.step()
        one.run()
    assert engine.tokens == host.tokens
    assert all(size for *_, size in ran)


def test_drafts_are_verified_in_graphs(exact):
    prompts = [draw(i, 6) * 8 for i in range(3)]
    engine, host = exact(drafts="auto", overlap="off")
    ran = watch_graphs(engine)
    assert engine.together(prompts, max_new_tokens=24) == host.together(prompts, max_new_tokens=24)
    assert engine.core.counters["drafted_tokens"]
    verified = [size for rows, wanted, size in ran if rows == wanted > 3]
    assert verified
    assert set(verified) == {64}


@pytest.mark.parametrize(("step_tokens", "sizes"), [(128, {64}), (256, {0})])
def test_log_probabilities_of_prompts(exact, step_tokens, sizes):
    """More wanted rows than a graph has are computed without one."""
    engine, host = exact(step_tokens=step_tokens)
    ran, found = watch_graphs(engine), []
    for one in (engine, host):
        one.add("a", draw(3, 100), max_new_tokens=1, prompt_logprobs_from=0, logprobs=2)
        one.run()
        found.append([token for event in one.events["a"] for token in event.prompt_logprobs or ()])
    assert {size for *_, size in ran} == sizes
    assert len(found[0]) == 100
    for mine, theirs in zip(*found, strict=True):
        assert mine.token == theirs.token
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_no_graphs_if_none_are_wanted(device, models):
    assert Engine(device, models["Llama"], cuda_graph_batches="0").core.executor.decoder.graphs is None
