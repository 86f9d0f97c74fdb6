"""Bidirectional models are built from their config and give what a plain float32 reading of the checkpoint gives."""

import json

import numpy as np
import pytest
import torch

from runtime.batch import AttentionPlan, ForwardBatch, LayerGroup, Span
from runtime.config import make_config
from runtime.errors import ModelError
from runtime.execution.building import build_executor
from runtime.features.diffusion.published import DiffusionSpec, read_spec
from runtime.models.shards import split_spec
from runtime.models.spec import DecoderSpec
from runtime.models.weights import load_weights
from tests.runtime.features.diffusion.bicache.models import EOS, KINDS, MASK, save_tiny
from tests.runtime.features.diffusion.bicache.reference import PlainModel


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_kv_are_the_references(kind, kernels, tmp_path):
    path = save_tiny(kind, tmp_path / kind)
    plain = PlainModel(path)
    executor = build_executor(
        make_config(model=str(path), dtype="float32", device="cpu", pool_tokens=64, kernels=kernels), path
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
    shift = read_spec(path).logits_shift
    torch.testing.assert_close(logits[: n - shift], plain.logits(tokens)[shift:], rtol=1e-4, atol=1e-4)
    for layer, (k, v) in enumerate(plain.hidden(tokens)[1]):
        torch.testing.assert_close(executor.pool.k[layer][slots], k, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(executor.pool.v[layer][slots], v, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_configuration_says(kind, tmp_path):
    spec = DecoderSpec.load(save_tiny(kind, tmp_path / kind))
    assert (spec.sees, spec.causal) == ("all", False)
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
        ("llada2", {"use_qkv_bias": True}),
        ("llada2", {"score_function": "softmax"}),
        ("llada2", {"image_token_offset": 290}),
        ("llada2", {"partial_rotary_factor": 0.75}),
        ("llada2", {"n_group": None}),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path, kind, changes):
    with pytest.raises(ModelError, match=next(iter(changes))):
        DecoderSpec.load(edited(tmp_path, kind, **changes))


@pytest.mark.parametrize(
    "changes",
    [{"num_experts_per_tok": 5}, {"n_group": 3}, {"topk_group": 5}, {"num_experts_per_tok": 0}, {"n_group": "4"}],
)
def test_numbers_of_experts_that_do_not_fit_are_refused(tmp_path, changes):
    with pytest.raises(ModelError, match="experts"):
        DecoderSpec.load(edited(tmp_path, "llada2", **changes))


def test_experts_are_not_divided_among_ranks(tmp_path):
    spec = DecoderSpec.load(save_tiny("llada2", tmp_path / "llada2"))
    with pytest.raises(ModelError, match="layers of LLaDA2MoeModelLM are served by one rank"):
        split_spec(spec, 2)


def test_the_bias_of_experts_keeps_its_bits(tmp_path):
    path = save_tiny("llada2", tmp_path / "llada2")
    weights = load_weights(path, DecoderSpec.load(path), torch.bfloat16)
    kinds = {name: tensor.dtype for name, tensor in weights.items()}
    assert {name for name, kind in kinds.items() if kind == torch.float32} == {
        f"model.layers.{i}.mlp.gate.expert_bias" for i in (1, 2, 3)
    }


def test_llada2_minis_shapes(tmp_path):
    """16 B parameters, and ends by its pad token."""
    path = edited(tmp_path, "llada2", hidden_size=2048, num_hidden_layers=20, num_attention_heads=16, head_dim=128,
                  num_key_value_heads=4, intermediate_size=5120, moe_intermediate_size=512, num_experts=256,
                  num_experts_per_tok=8, n_group=8, topk_group=4, vocab_size=157184, pad_token_id=156892,
                  mask_token_id=156895, max_position_embeddings=32768, block_length=None)  # fmt: skip
    spec = DecoderSpec.load(path)
    assert sum(np.prod(shape) for shape in spec.expected_tensors().values()) == pytest.approx(16.26e9, rel=0.001)
    assert spec.eos_token_ids == (156892,)
    assert spec.sees == "blocks of 32"
    expected = DiffusionSpec(156895, 0, "low_confidence", attended=32, block=32, threshold=0.95, edits=True)
    assert read_spec(path) == expected
    names = [spec.stored_name(name) for name in spec.expected_tensors()]
    assert len(set(names)) == len(names)
    assert "model.layers.1.mlp.shared_experts.down_proj.weight" in names
    assert "model.layers.0.attention.query_key_value.weight" in names


def test_the_published_models_shapes(tmp_path):
    """The sizes of LLaDA-8B and Dream-7B, and that LLaDA's checkpoint has 291 tensors."""
    llada = edited(tmp_path, "llada", d_model=4096, n_layers=32, n_heads=32, n_kv_heads=32, mlp_hidden_size=12288,
                   vocab_size=126464, embedding_size=126464, mask_token_id=126336, eos_token_id=126081)  # fmt: skip
    spec = DecoderSpec.load(llada)
    assert len(spec.expected_tensors()) == 291
    assert spec.eos_token_ids == (126081, 126348)
    assert len({spec.stored_name(name) for name in spec.expected_tensors()}) == 291
    assert sum(np.prod(shape) for shape in spec.expected_tensors().values()) == pytest.approx(8.0e9, rel=0.01)
    dream = edited(tmp_path, "dream", hidden_size=3584, num_hidden_layers=28, num_attention_heads=28,
                   num_key_value_heads=4, intermediate_size=18944, vocab_size=152064, mask_token_id=151666)  # fmt: skip
    spec = DecoderSpec.load(dream)
    assert sum(np.prod(shape) for shape in spec.expected_tensors().values()) == pytest.approx(7.6e9, rel=0.01)
