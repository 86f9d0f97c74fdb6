"""Accuracy of weights of 4 and 8 bits: the real model's distributions over prose, against float32."""

from importlib.resources import files

import numpy as np
import pytest
import torch

from runtime.batch import AttentionPlan, ForwardBatch, LayerGroup, Span, causal_visible
from runtime.errors import ModelError
from runtime.execution.native.library import load_best
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
def plain(default_model_dir, tokenizer):
    """Tokens of prose, and their distributions in float32."""
    if load_best() is None:
        pytest.skip("the kernels were not built, or this processor cannot run them")
    text = (files("loadgen.http.corpus") / "darwin.txt").read_text("utf-8")[:8000]
    ids = tokenizer.encode(text)[-ROWS:]
    return ids, log_probabilities(make_core(default_model_dir), ids)


@pytest.mark.parametrize(("quantization", "most"), [("none", 0.001), ("int8", 0.01), ("int4", 0.1)])
def test_distributions_stay_near(default_model_dir, plain, quantization, most):
    ids, p = plain
    q = log_probabilities(make_core(default_model_dir, quantization=quantization, dtype="bfloat16"), ids)
    divergence = (p.exp() * (p - q)).sum(-1)
    following = torch.tensor(ids[1:])[:, None]
    losses = [-side[:-1].gather(1, following)[:, 0] for side in (p, q)]
    change = losses[1] - losses[0]
    same = float((p.argmax(-1) == q.argmax(-1)).float().mean())
    print(
        f"\n| {quantization} | {losses[1].mean():.3f} (float32 {losses[0].mean():.3f}) | {divergence.mean():.4f} "
        f"| {divergence.quantile(0.99):.4f} | {same:.1%} |"
    )
    assert 0 < divergence.mean() < most
    # Errors of single tokens that cancel out in the mean are no loss: of 511, their sum is left.
    assert abs(change.mean()) < most + 2 * change.std() / len(change) ** 0.5


@pytest.mark.parametrize(
    "options", [{"quantization": "int8", "kernels": "torch"}, {"kernels": "native", "kv_dtype": "fp8"}]
)
def test_without_the_kernels_it_is_refused(tiny_dir, options):
    with pytest.raises(ModelError, match="--quantization int4 or int8 and --kernels native need"):
        make_core(tiny_dir, **options)
