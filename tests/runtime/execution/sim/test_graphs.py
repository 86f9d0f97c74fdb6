"""Graphs of decode steps on the simulated device: which steps have one, and that it waits for nothing."""

import pytest

from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.execution.sim.engines import FAMILIES, Engine, draw, save

# Layers of both kinds, in two layer groups or more.
_MIXED = {
    **{"hidden_size": 256, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 24},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
SHARED = [draw(7, 100) + draw(i, 5 + 7 * i) for i in range(5)]
TREE = [draw(7, 70) + draw(i // 2, 70) + draw(i + 9, 5 + i) for i in range(6)]
ALONE = [draw(i, 60 + 7 * i) for i in range(4)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(FAMILIES, "Qwen2", _MIXED)
        return {kind: save(kind, tmp_path_factory.mktemp(kind)) for kind in ("Llama", "Mistral", "Qwen2")}


@pytest.fixture(autouse=True)
def little_is_shared(monkeypatch):
    monkeypatch.setattr("runtime.execution.attention.flashinfer._MERGE_BYTES", 1 << 14)


def decoding(device, path, prompts):
    """An engine that decodes requests, whose shared prompts are in the tree."""
    engine = Engine(device, path)
    for prompt in prompts:
        engine.together([prompt], max_new_tokens=1)
    engine.tokens.clear()
    engine.begin_decode(prompts)
    return engine


@pytest.mark.parametrize(
    ("kind", "prompts", "levels", "windows"),
    [
        ("Llama", SHARED, 1, [None]),
        ("Llama", SHARED[:1] + ALONE[:1] + SHARED[1:3], 1, [None]),
        ("Llama", TREE, 2, [None]),
        ("Mistral", ALONE, 0, [24]),
        ("Mistral", SHARED, 0, [24]),
        ("Qwen2", SHARED, 1, [24, None]),
    ],
)
def test_a_step_is_one_launch(device, models, kind, prompts, levels, windows):
    engine = decoding(device, models[kind], prompts)
    graphs = engine.core.executor.decoder.graphs
    found, ran = graphs._graph, []
    graphs._graph = lambda shape: ran.append(shape.calls) or found(shape)
    events = engine.watch_steps(6)
    assert events.stalls == []
    assert (events.count("launch"), events.count("wait")) == (6, 12)
    (calls,) = set(ran)
    assert [call.window for call in calls] == windows
    assert calls[-1].levels == levels


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2"])
@pytest.mark.parametrize("batches", ["8", "0"])
def test_graphs_and_windows_give_the_tokens_of_the_host(device, models, monkeypatch, kind, batches):
    """In float32, where no rounding decides; FlashInfer's own kernels have none."""
    prompts = SHARED[:3] + TREE[:3] + ALONE[:2]
    with monkeypatch.context() as patched:
        patched.setattr("runtime.execution.building.choose_attention", lambda *_: "flashinfer")
        engine = Engine(device, models[kind], dtype="float32", cuda_graph_batches=batches)
    host = Driver(make_core(models[kind], kernels="torch", step_tokens=128))
    for prompt in prompts:  # so that later ones find what they share
        engine.together([prompt], max_new_tokens=1)
        host.together([prompt], max_new_tokens=1)
    found = engine.together(prompts, max_new_tokens=9)
    assert found == host.together(prompts, max_new_tokens=9)


def test_prompts_within_a_window_need_no_mask(device, models):
    engine = Engine(device, models["Mistral"])
    engine.together([SHARED[0]], max_new_tokens=1)
    engine.begin_decode([SHARED[0][:110]])
    for prompt in SHARED[1:]:
        engine.ask(prompt)
    with device.watch() as events:
        engine.step()
        engine.step()
    assert events.of("sync") == []
