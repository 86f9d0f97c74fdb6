"""Accuracy of 8-bit weights: the real model's distributions over prose, against float32."""

from importlib.resources import files

import numpy as np
import pytest
import torch

from runtime.batch import AttentionPlan, ForwardBatch, LayerGroup, Span, causal_visible
from runtime.errors import ModelError
from runtime.execution.native.library import load_best
from runtime.models.tokenizer import Tokenizer
from tests.runtime.engine.driver import make_core

ROWS = 512


def log_probabilities(core, ids):
    """Of the tokens that may follow each of `ids`, float32 [n, vocab]."""
    plan = AttentionPlan(len(ids))
    pages = np.arange(-(-len(ids) // core.executor.pool.page_size), dtype=np.int32)
    plan.add(slice(0, len(ids)), Span(pages, len(ids)), causal_visible(len(ids), len(ids)))
    here = torch.arange(len(ids))
    group = LayerGroup(range(core.executor.spec.num_layers), None, here, plan)
    return core.executor.run(ForwardBatch(torch.tensor(ids), here, [group], here)).log_softmax(-1)


@pytest.fixture(scope="module")
def cores(default_model_dir):
    """In float32, and with weights of 8 bits."""
    library = load_best()
    if library is None or not library.has_int8():
        pytest.skip("this processor does not multiply bytes, or the kernels were not built")
    return make_core(default_model_dir), make_core(default_model_dir, quantization="int8")


def test_distributions_stay_near(default_model_dir, cores):
    text = (files("loadgen.http.corpus") / "darwin.txt").read_text("utf-8")[:8000]
    ids = Tokenizer.load(default_model_dir).encode(text)[-ROWS:]
    p, q = (log_probabilities(core, ids) for core in cores)
    divergence = (p.exp() * (p - q)).sum(-1)
    following = torch.tensor(ids[1:])[:, None]
    losses = [-side[:-1].gather(1, following).mean() for side in (p, q)]
    assert 0 < divergence.mean() < 0.02
    assert abs(losses[1] - losses[0]) < 0.02


@pytest.mark.parametrize(
    "options", [{"quantization": "int8", "kernels": "torch"}, {"kernels": "native", "kv_dtype": "fp8"}]
)
def test_without_the_kernels_it_is_refused(tiny_dir, options):
    with pytest.raises(ModelError, match="--quantization int8 and --kernels native need"):
        make_core(tiny_dir, **options)
