"""Diffusion models are built from their config and give what a plain float32 reading of the checkpoint gives."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from runtime.batch import AttentionPlan, ForwardBatch, LayerGroup, Span
from runtime.config import make_config
from runtime.errors import ModelError
from runtime.execution.executor import Executor
from runtime.models.diffusion import DiffusionSpec
from runtime.models.spec import LlamaSpec
from tests.runtime.reuse.bicache.models import EOS, KINDS, MASK, save_tiny
from tests.runtime.reuse.bicache.reference import PlainModel


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_kv_are_the_references(kind, native, tmp_path):
    path = save_tiny(kind, tmp_path / kind)
    plain = PlainModel(path)
    executor = Executor(
        make_config(model=str(path), dtype="float32", device="cpu", pool_tokens=64, native_kernels=native), path
    )
    tokens = torch.randint(0, MASK, (29,), generator=torch.Generator().manual_seed(3)).tolist() + [MASK] * 8
    n = len(tokens)
    plan = AttentionPlan(n)
    plan.add(slice(0, n), Span(np.array([2, 0, 1], dtype=np.int32), n))
    slots = torch.tensor([[2, 0, 1][i // 16] * 16 + i % 16 for i in range(n)])
    batch = ForwardBatch(
        torch.tensor(tokens), torch.arange(n), [LayerGroup(range(4), None, slots, plan)], torch.arange(n)
    )
    logits = executor.run(batch).clone()
    logits[:, MASK] = -torch.inf
    shift = executor.spec.diffusion.logits_shift
    torch.testing.assert_close(logits[: n - shift], plain.logits(tokens)[shift:], rtol=1e-4, atol=1e-4)
    for layer, (k, v) in enumerate(plain.hidden(tokens)[1]):
        torch.testing.assert_close(executor.pool.k[layer][slots], k, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(executor.pool.v[layer][slots], v, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "shift"), [("llada", 0), ("dream", 1), ("llama_diffusion", 1)])
def test_what_the_configuration_says(kind, shift, tmp_path):
    spec = LlamaSpec.load(save_tiny(kind, tmp_path / kind))
    algorithm = "entropy" if kind == "dream" else "low_confidence"
    assert spec.diffusion == DiffusionSpec(MASK, shift, algorithm)
    assert spec.eos_token_ids == (EOS,)
    assert spec.qkv_bias == (kind == "dream")


def edited(tmp_path, kind, **changes):
    path = save_tiny(kind, tmp_path / kind)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llada", {"block_type": "sequential"}),
        ("llada", {"include_qkv_bias": True}),
        ("llada", {"alibi": True}),
        ("llada", {"mask_token_id": 300}),
        ("dream", {"mask_token_id": None}),
        ("llama_diffusion", {"logits_shift": 2}),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path, kind, changes):
    with pytest.raises(ModelError, match=next(iter(changes))):
        LlamaSpec.load(edited(tmp_path, kind, **changes))


def test_the_published_models_shapes(tmp_path):
    """The sizes of LLaDA-8B and Dream-7B, and that LLaDA's checkpoint has 291 tensors."""
    llada = edited(tmp_path, "llada", d_model=4096, n_layers=32, n_heads=32, n_kv_heads=32, mlp_hidden_size=12288,
                   vocab_size=126464, embedding_size=126464, mask_token_id=126336, eos_token_id=126081)  # fmt: skip
    spec = LlamaSpec.load(llada)
    assert len(spec.expected_tensors()) == 291
    assert spec.eos_token_ids == (126081, 126348)
    assert len({spec.stored_name(name) for name in spec.expected_tensors()}) == 291
    assert sum(np.prod(shape) for shape in spec.expected_tensors().values()) == pytest.approx(8.0e9, rel=0.01)
    dream = edited(tmp_path, "dream", hidden_size=3584, num_hidden_layers=28, num_attention_heads=28,
                   num_key_value_heads=4, intermediate_size=18944, vocab_size=152064, mask_token_id=151666)  # fmt: skip
    spec = LlamaSpec.load(dream)
    assert sum(np.prod(shape) for shape in spec.expected_tensors().values()) == pytest.approx(7.6e9, rel=0.01)
