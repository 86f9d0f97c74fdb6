"""Adapters: the merged checkpoint is the base plus the adapter; it appears whole, once, and only if it fits."""

import lzma

import pytest
import torch
from safetensors.torch import load_file, save

from runtime.errors import ModelError
from runtime.features.diffusion.published import read_spec
from runtime.models.adapters.merge import MASK_TOKEN_ID, merge_adapter
from runtime.models.spec import DecoderSpec
from tests.full_disk import little_room


def write(tensors, path):
    path.write_bytes(lzma.compress(save(tensors)))


@pytest.fixture(scope="module")
def base(tiny_dir):
    return load_file(tiny_dir / "model.safetensors")


@pytest.fixture(scope="module")
def tensors(base):
    """An adapter of every linear layer."""
    draw = torch.Generator().manual_seed(1)
    hidden = base["model.embed_tokens.weight"].shape[1]
    found = {"mask_embedding": torch.randn(hidden, generator=draw).bfloat16()}
    for name in (name for name in base if name.endswith("_proj.weight")):
        module, (outer, inner) = name.removesuffix(".weight"), base[name].shape
        for part, shape in (("A", (4, inner)), ("B", (outer, 4))):
            codes = torch.randint(-127, 128, shape, generator=draw, dtype=torch.int8)
            found[f"{module}.lora_{part}.weight"] = codes
        found[f"{module}.lora_scale"] = torch.rand(4, generator=draw) / 1000
    return found


@pytest.fixture
def adapter(tensors, tmp_path):
    write(tensors, tmp_path / "adapter.safetensors.xz")
    return tmp_path / "adapter.safetensors.xz"


def test_the_merged_weights_are_the_base_plus_the_scaled_products(base, tensors, adapter, tiny_dir, tmp_path):
    (tmp_path / "models").mkdir()
    merged = load_file(merge_adapter(tiny_dir, adapter, tmp_path / "models", "merged") / "model.safetensors")
    assert merged.keys() == base.keys()
    for name, weight in base.items():
        expected, module = weight.float().clone(), name.removesuffix(".weight")
        if (a := tensors.get(f"{module}.lora_A.weight")) is not None:
            b = tensors[f"{module}.lora_B.weight"].float() * tensors[f"{module}.lora_scale"]
            expected += b @ a.float()
        elif name == "model.embed_tokens.weight":
            expected[MASK_TOKEN_ID] = tensors["mask_embedding"].float()
        torch.testing.assert_close(merged[name].float(), expected)


def test_it_is_a_diffusion_model_with_the_base_models_tokenizer(adapter, tiny_dir, tmp_path):
    (tmp_path / "models").mkdir()
    path = merge_adapter(tiny_dir, adapter, tmp_path / "models", "merged")
    spec = DecoderSpec.load(path)
    assert spec.sees == "all"
    diffusion = read_spec(path)
    assert (diffusion.mask_token_id, diffusion.logits_shift) == (MASK_TOKEN_ID, 1)
    assert spec.eos_token_ids == DecoderSpec.load(tiny_dir).eos_token_ids
    assert (path / "tokenizer.json").read_bytes() == (tiny_dir / "tokenizer.json").read_bytes()


def test_merged_once_and_again_for_another_adapter(adapter, tiny_dir, tmp_path, tensors):
    models = tmp_path / "models"
    models.mkdir()
    path = merge_adapter(tiny_dir, adapter, models, "merged")
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    assert merge_adapter(tiny_dir, adapter, models, "merged") == path
    assert (path / "model.safetensors").stat().st_mtime_ns == stamp
    write(tensors | {"mask_embedding": 2 * tensors["mask_embedding"]}, adapter)
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


def test_what_does_not_fit_is_refused_and_leaves_nothing(tensors, tiny_dir, tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    narrow = {name: tensor[..., :8].contiguous() for name, tensor in tensors.items()}
    unmasked = {name: tensor for name, tensor in tensors.items() if name != "mask_embedding"}
    unscaled = {name: tensor for name, tensor in tensors.items() if not name.endswith("scale")}
    path = tmp_path / "wrong.safetensors.xz"
    for wrong in (narrow, unmasked, unscaled):
        write(wrong, path)
        with pytest.raises(ModelError, match="not an adapter of this model"):
            merge_adapter(tiny_dir, path, models, "merged")
    whole = lzma.compress(save(tensors))
    for wrong in (b"no xz", whole[: len(whole) // 2], lzma.compress(b"no safetensors")):
        path.write_bytes(wrong)
        with pytest.raises(ModelError, match="not an adapter of this model"):
            merge_adapter(tiny_dir, path, models, "merged")
    assert not list(models.iterdir())


def test_a_full_disk_leaves_nothing(adapter, tiny_dir, tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    with little_room(10_000), pytest.raises(ModelError, match=r"^cannot write .*/models/merged"):
        merge_adapter(tiny_dir, adapter, models, "merged")
    assert not list(models.iterdir())
