"""Positions are explicit: they may have gaps, and the largest one counts, not the number of tokens."""

import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.batch import AttentionPlan, ForwardBatch, LayerGroup, Span, causal_visible
from runtime.config import make_config
from runtime.execution.building import build_executor
from tests.runtime.execution.attention.stand_in import stand_in

CONTEXT = 512


@pytest.fixture(params=["native", "torch", "flashinfer"])
def executor(request, any_tiny_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in())
    monkeypatch.setattr("runtime.execution.building.choose_attention", lambda *_: request.param)
    kernels = "auto" if request.param == "native" else "torch"
    options = {"dtype": "float32", "device": "cpu", "pool_tokens": 64, "kernels": kernels}
    executor = build_executor(make_config(model=str(any_tiny_dir), context_length=CONTEXT, **options), any_tiny_dir)
    if not executor.decoder.attention.startswith(request.param):
        pytest.skip("no native kernels")
    return executor


def batch(executor, positions):
    n, pages = len(positions), np.array([2, 0], dtype=np.int32)
    plan = AttentionPlan(n)
    plan.add(slice(0, n), Span(pages, n), causal_visible(n, n))
    group = LayerGroup(range(executor.spec.num_layers), None, 32 + torch.arange(n), plan)
    return ForwardBatch(torch.arange(100, 100 + n), torch.tensor(positions), [group], torch.arange(n))


def test_positions_with_gaps_up_to_the_last_of_the_context(executor, any_tiny_dir):
    if executor.has_windows:
        pytest.skip("windows know no gaps: modules, which have them, are not served with windows")
    positions = [0, 4, 5, 300, CONTEXT - 1]
    theirs = AutoModelForCausalLM.from_pretrained(any_tiny_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = theirs(torch.arange(100, 105)[None], position_ids=torch.tensor([positions])).logits[0]
    torch.testing.assert_close(executor.run(batch(executor, positions)), wanted, atol=1e-4, rtol=1e-4)


def test_a_position_behind_the_context_is_refused(executor):
    with pytest.raises(ValueError, match=f"position {CONTEXT} "):
        executor.run(batch(executor, [0, CONTEXT]))
