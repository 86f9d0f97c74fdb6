"""Adapters: what is trained is what the merged checkpoint computes; it appears whole, once, and only if it fits."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from loadgen.accuracy.lora import LoraLlama
from runtime.errors import ModelError
from runtime.models.adapters.merge import MASK_TOKEN_ID, merge_adapter
from runtime.models.spec import LlamaSpec
from tests.full_disk import little_room
from tests.runtime.reuse.bicache.reference import PlainModel

ABOUT = {"rank": "4", "alpha": "8"}


@pytest.fixture(scope="module")
def trained(tiny_dir):
    """A network with an adapter that changes every product."""
    model = LoraLlama.load(tiny_dir, torch.device("cpu"))
    model.adapt(4, 8, MASK_TOKEN_ID, seed=1)
    with torch.no_grad():
        for name, factor in model.learned().items():
            # What the file holds is bfloat16.
            value = torch.randn_like(factor) * 0.1 if name.endswith("lora_B.weight") else factor
            factor.copy_(value.bfloat16().float())
    return model


@pytest.fixture
def adapter(trained, tmp_path):
    save_file(trained.adapter(), tmp_path / "adapter.safetensors", ABOUT)
    return tmp_path / "adapter.safetensors"


@torch.no_grad()
def test_the_merged_model_computes_what_was_trained(trained, adapter, tiny_dir, tmp_path):
    (tmp_path / "models").mkdir()
    path = merge_adapter(tiny_dir, adapter, tmp_path / "models", "merged")
    tokens = [5, 900, 31, MASK_TOKEN_ID, 77, MASK_TOKEN_ID]
    plain = PlainModel(path)
    expected = plain.norm(plain.hidden(tokens)[0][-1], plain.tensors["model.norm.weight"])
    torch.testing.assert_close(trained.hidden(torch.tensor([tokens]))[0], expected, rtol=1e-3, atol=1e-4)
    base, merged = load_file(tiny_dir / "model.safetensors"), load_file(path / "model.safetensors")
    adapted = [name.replace("lora_B.", "") for name in trained.learned() if "lora_B" in name]
    assert len(adapted) == 7 * trained.config.num_hidden_layers
    for name in adapted:
        assert not torch.equal(merged[name], base[name])


def test_it_is_a_diffusion_model_with_the_base_models_tokenizer(adapter, tiny_dir, tmp_path):
    (tmp_path / "models").mkdir()
    path = merge_adapter(tiny_dir, adapter, tmp_path / "models", "merged")
    spec = LlamaSpec.load(path)
    assert spec.diffusion is not None
    assert (spec.diffusion.mask_token_id, spec.diffusion.logits_shift) == (MASK_TOKEN_ID, 1)
    assert spec.eos_token_ids == LlamaSpec.load(tiny_dir).eos_token_ids
    assert (path / "tokenizer.json").read_bytes() == (tiny_dir / "tokenizer.json").read_bytes()


def test_merged_once_and_again_for_another_adapter(adapter, tiny_dir, tmp_path, trained):
    models = tmp_path / "models"
    models.mkdir()
    path = merge_adapter(tiny_dir, adapter, models, "merged")
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    assert merge_adapter(tiny_dir, adapter, models, "merged") == path
    assert (path / "model.safetensors").stat().st_mtime_ns == stamp
    save_file({name: 2 * tensor for name, tensor in trained.adapter().items()}, adapter, ABOUT)
    assert merge_adapter(tiny_dir, adapter, models, "merged") != path


def test_a_depth_table_beside_an_adapter_goes_with_it(adapter, tiny_dir, tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    without = merge_adapter(tiny_dir, adapter, models, "merged")
    assert not (without / "depth_table.json").exists()
    adapter.with_name("adapter.depth_table.json").write_text("{}")
    path = merge_adapter(tiny_dir, adapter, models, "merged")
    assert path != without
    assert (path / "depth_table.json").read_text() == "{}"


def test_what_does_not_fit_is_refused_and_leaves_nothing(trained, tiny_dir, tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    tensors = trained.adapter()
    narrow = {name: tensor[..., :8].contiguous() for name, tensor in tensors.items()}
    unmasked = {name: tensor for name, tensor in tensors.items() if name != "mask_embedding"}
    for wrong, about in ((narrow, ABOUT), (unmasked, ABOUT), (tensors, {"rank": "4"})):
        save_file(wrong, tmp_path / "wrong.safetensors", about)
        with pytest.raises(ModelError, match="not an adapter of this model"):
            merge_adapter(tiny_dir, tmp_path / "wrong.safetensors", models, "merged")
    (tmp_path / "wrong.safetensors").write_bytes(b"cut")
    with pytest.raises(ModelError, match="not an adapter of this model"):
        merge_adapter(tiny_dir, tmp_path / "wrong.safetensors", models, "merged")
    assert not list(models.iterdir())


def test_a_full_disk_leaves_nothing(adapter, tiny_dir, tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    with little_room(10_000), pytest.raises(ModelError, match=r"^cannot write .*/models/merged"):
        merge_adapter(tiny_dir, adapter, models, "merged")
    assert not list(models.iterdir())
