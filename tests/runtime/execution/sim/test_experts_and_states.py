"""Models with experts and with recurrent layers on the simulated device."""

import pytest
import torch

from runtime.features.drafts.drafter import Drafter
from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.execution.sim.engines import Engine, draw, save


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_steps_with_experts_run_in_graphs(device, tmp_path, monkeypatch, capability):
    """With a kernel for groups of rows, and without, where only a few rows can do without the host."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    engine = Engine(device, save("Qwen3Moe", tmp_path), cuda_graph_batches="4,128")
    assert engine.core.executor.decoder.graphs.sizes == [4, 128][: capability[0] - 7]
    engine.begin_decode([draw(i, 20 + i) for i in range(4)])
    events = engine.watch_steps(5)
    assert events.stalls == []
    assert events.count("launch") == 5


@pytest.mark.parametrize("kind", ["GptOss", "DeepseekV3"])
def test_steps_with_experts_and_without_graphs_or_a_kernel_wait_for_no_counts(device, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    engine = Engine(device, save(kind, tmp_path))
    engine.begin_decode([draw(i, 20 + i) for i in range(4)])
    assert engine.watch_steps(5).stalls == []


@pytest.mark.parametrize(("kind", "overlap"), [("Qwen3Next", "off"), ("Qwen3_5", "on"), ("Lfm2", "off")])
def test_steps_of_recurrent_layers_wait_for_nothing(device, tmp_path, monkeypatch, kind, overlap):
    """Prompts, stored states, drafts and decode; the tokens are those of the host, where the recurrence goes by row.

    Steps that overlap have no drafts.
    """
    path, prompts = save(kind, tmp_path), [draw(i, 70 + i) for i in range(3)]
    known = Driver(make_core(path, kernels="torch")).together(prompts, max_new_tokens=14)

    def propose(self, requests, room, beside):
        """Two right guesses and a wrong one, if the answer is long enough."""
        found = {}
        for number, request in enumerate(sorted(requests, key=lambda one: one.rid)):
            if len(coming := known[number][request.num_output :][:3]) == 3 and request.num_output % 2:
                found[request] = request.tokens[:0]
                found[request].extend([*coming[:2], coming[2] ^ 1])
        return found

    monkeypatch.setattr(Drafter, "propose", propose)
    engine = Engine(device, path, dtype="float32", drafts="auto", overlap=overlap)
    with device.watch() as events:
        engine.begin_decode(prompts, max_new_tokens=14)
    engine.run()
    assert [engine.tokens[rid] for rid in sorted(engine.tokens)] == known
    state = engine.core.state()
    assert overlap == "on" or 0 < state["accepted_tokens"] < state["drafted_tokens"]
    # Torch's attention tries its kernels once. With float32, experts have none for the many rows of a prompt.
    known = {"runtime/execution/attention/varlen.py", "runtime/execution/experts.py"}
    assert {event.place.split(":")[0] for event in events.of("sync", "pageable")} <= known
