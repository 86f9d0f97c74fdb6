"""Checkpoints of gpt-oss in MXFP4 against transformers' dequantiser."""

import ctypes
import json
from itertools import chain

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from runtime.errors import ModelError
from runtime.execution.experts import take_fused
from runtime.execution.native.library import load_best
from runtime.execution.ops import Ops
from runtime.models.mxfp4 import PackedExperts, unpack
from runtime.models.spec import DecoderSpec
from runtime.models.weights import load_weights
from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.execution.native.mixtures import mix
from tests.runtime.execution.transformers.architectures import save_small

PROMPT = [5, 9, 200, 31, 8, 77]


def random_packed(count: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rows)
    blocks = torch.randint(256, (count, rows, columns // 32, 16), generator=draw, dtype=torch.uint8)
    return blocks, torch.randint(120, 127, blocks.shape[:3], generator=draw, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_number_is_that_of_transformers(dtype):
    blocks, scales = random_packed(3, 8, 64)
    blocks[0] = torch.arange(256, dtype=torch.uint8).view(8, 2, 16)
    found = unpack(blocks, scales, dtype)
    assert found.dtype == dtype
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2))


@pytest.fixture
def packed(tmp_path):
    """A packed checkpoint, and the same one unpacked by transformers."""
    plain = save_small("GptOss", tmp_path / "plain", hidden_size=32, intermediate_size=64)
    packed = save_small("GptOss", tmp_path / "packed", hidden_size=32, intermediate_size=64)
    given = load_file(plain / "model.safetensors")
    both = [dict(given), dict(given)]
    for name in [name for name in given if name.endswith(("gate_up_proj", "down_proj"))]:
        count, columns, rows = both[1].pop(name).shape
        blocks, scales = random_packed(count, rows, columns)
        both[0][name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        both[1] |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    for path, tensors in zip((plain, packed), both, strict=True):
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_packed_checkpoint_says_what_the_unpacked_one_says(packed, kernels):
    one, other = (
        Driver(make_core(path, kernels=kernels)).together([PROMPT, PROMPT[3:]], max_new_tokens=8) for path in packed
    )
    assert one == other
    assert one[0] != one[1]
    assert make_core(packed[0], random_weights=True).info.model_impl == "ramet"


def test_codes_are_exact():
    blocks, scales = random_packed(2, 8, 64)
    blocks[0] = torch.arange(256, dtype=torch.uint8).view(8, 2, 16)
    scales[1, 2], scales[1, 3, 0], blocks[1, 3, 0] = 104, 0, 0x80  # the least; zeros with a scale beyond float16
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    found = [one.codes(slice(8)).values() for one in PackedExperts(blocks, scales).each()]
    assert torch.equal(torch.from_numpy(np.stack(found)), wanted)
    scales[0, 0, 0] = 90
    with pytest.raises(ModelError, match="--quantization none"):
        PackedExperts(blocks, scales).each()[0].codes(slice(8))


def test_experts_stay_packed(packed):
    """With the defaults, the kernels multiply codes: the products differ from the exact ones by rounded activations."""
    path, _ = packed
    if load_best() is None:
        pytest.skip("there are no native kernels for this processor")
    core = make_core(path, dtype="auto", quantization="auto")
    assert core.executor.decoder.quantization == "mxfp4"
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(40, 32, generator=draw)
    tensors = load_file(path / "model.safetensors")
    decoder = core.executor.decoder.model
    assert len(decoder.experts) == core.executor.spec.num_layers
    for index, experts in enumerate(decoder.experts):
        weights = {name: weight for name, weight in tensors.items() if f"layers.{index}.mlp" in name}
        like = torch.empty(0)
        exact = take_fused(weights, f"model.layers.{index}.mlp.", decoder.spec.experts, like, Ops(), keeps_codes=False)
        wanted, found = exact(x), mix(decoder.team, experts, x)
        assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.02
        assert all(torch.equal(mix(decoder.team, experts, x[i : i + 1])[0], found[i]) for i in range(0, 40, 7))
        matrices = [*chain(*experts.matrices)]
        panels = [load_best().matrix_bytes(ctypes.byref(one)) for one in matrices]
        # 4 bits and a scale of 16 bits for each 32, where the file has 4 and 8.
        assert sum(panels) <= sum(-(-one.n // 64) * 64 * one.k for one in matrices) * 4.5 / 8


@pytest.mark.parametrize(
    ("architecture", "quantization"), [("GptOss", "auto"), ("Qwen3Moe", "int4"), ("Qwen3Moe", "int8")]
)
def test_answers_are_the_same_in_any_company_and_from_the_cache(packed, tmp_path, architecture, quantization):
    path = packed[0] if architecture == "GptOss" else save_small(architecture, tmp_path / "model")
    core = make_core(path, dtype="auto", quantization=quantization)
    asked = [PROMPT * 40, PROMPT * 40 + [3], PROMPT[1:] * 4]  # 192 rows and more are computed by each thread alone
    alone = [Driver(core).together([one], max_new_tokens=8)[0] for one in asked]
    assert Driver(core).together(asked, max_new_tokens=8) == alone
    fresh = make_core(path, dtype="auto", quantization=quantization, prefix_cache=False, chunk_tokens=16)
    assert Driver(fresh).together(asked, max_new_tokens=8) == alone


def test_what_is_not_served_is_named(packed):
    path, _ = packed
    with pytest.raises(ModelError, match="quantised with 'mxfp4'"):
        make_core(path, model_impl="transformers")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({**tensors, name: tensors[name].float()}, path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{name} is stored as F32; supported are U8"):
        load_weights(path, DecoderSpec.load(path), torch.float32)
    del tensors[name]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=f"no tensor {name}"):
        make_core(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    with pytest.raises(ModelError, match="has 48 columns, no multiple of 32"):
        make_core(path)
    (path / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    with pytest.raises(ModelError, match="activation is 'relu'"):
        make_core(path)
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(ModelError, match="quantised with 'bitsandbytes'"):
        make_core(path)
