"""Quantised checkpoints as they are published: weights, logits and tokens of the same weights in float32."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.config import make_config
from runtime.errors import ModelError
from runtime.models.coded import from_gptq
from runtime.models.implementation import own_spec
from runtime.models.published import PublishedTensors
from runtime.models.quantization import read_quantization
from runtime.models.shards import Shard
from runtime.models.spec import DecoderSpec
from runtime.models.weights import digest_weights, load_weights
from tests.runtime.engine.driver import Driver, greedy, make_core
from tests.runtime.execution.mixers.models import oracle
from tests.runtime.models.published_files import FORMATS, PLAIN, edit_config, is_quantised, write_published

PROMPT = [5, 9, 200, 31, 8, 77, 140, 3]
ATTENTION = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`write_published`, which writes no checkpoint twice."""
    found = {}

    def made(kind, architecture="Llama"):
        key = kind, architecture
        if key not in found:
            found[key] = write_published(FORMATS[kind], tmp_path_factory.mktemp("model"), architecture)
        return found[key]

    return made


def load(directory, shard=None, dtype=torch.float32):
    return load_weights(directory, DecoderSpec.load(directory), dtype, shard)


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_and_tokens_are_those_of_the_unpacked_checkpoint(made, kind):
    published, plain = made(kind)
    wanted = load(plain)
    found = load(published)
    assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in wanted.items()}
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    driver = Driver(make_core(published, kernels="torch"))
    assert driver.together([PROMPT], max_new_tokens=8) == [greedy(oracle(plain), PROMPT, 8)]
    assert driver.core.info.quantization.endswith(", unpacked")


@pytest.mark.parametrize("kind", ["awq", "fp8 blocks", "packed"])
@pytest.mark.parametrize("architecture", ["Qwen3Moe", "DeepseekV3", "Qwen2"])
def test_other_architectures(made, architecture, kind):
    published, plain = made(kind, architecture)
    found, wanted = load(published), load(plain)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    tokens = Driver(make_core(published)).together([PROMPT], max_new_tokens=8)
    assert tokens == [greedy(oracle(plain), PROMPT, 8)]


@pytest.mark.parametrize("kind", ["gptq in another order", "fp8 blocks", "int8"])
def test_ranks_get_their_shards(made, kind):
    published, plain = made(kind)
    for rank in range(2):
        found, wanted = load(published, Shard(rank, 2)), load(plain, Shard(rank, 2))
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("kind", FORMATS)
def test_the_kernels_codes_are_exact(made, kind):
    published, plain = made(kind)
    spec, wanted = DecoderSpec.load(published), load(plain)
    tensors = PublishedTensors.open(published, spec)
    quantised = [name for name in wanted if is_quantised(name)]
    assert tensors.count() == (len(quantised), len(quantised) if FORMATS[kind].exact else 0)
    for name in wanted:
        if not (FORMATS[kind].exact and is_quantised(name)):
            assert tensors.sample(name) is None
            continue
        rows = np.array([5, 0, 9])
        codes = tensors.reader([(name, rows), (name, rows[:1])])(np.array([3, 1, 2]))
        sample = tensors.sample(name)
        assert (sample.bits, sample.group, sample.codes.shape[1]) == (codes.bits, codes.group, codes.codes.shape[1])
        assert torch.equal(torch.from_numpy(codes.values()), wanted[name][[5, 0, 9]])


def test_zeros_of_the_first_version_of_gptq_wrap():
    """A zero of 0 is stored as 15."""
    words, scales = torch.full((1, 1), -1, dtype=torch.int32), torch.ones(1, 8).half()
    weight = from_gptq(torch.full((1, 8), 0x76543210, dtype=torch.int32), words, scales, 8, 4, 1)
    assert torch.equal(weight.values(), torch.arange(8).float().expand(8, 8))


def test_a_scale_beyond_float16_is_unpacked(made, tmp_path):
    published, _ = write_published(FORMATS["packed"], tmp_path)
    tensors = load_file(published / "model.safetensors")
    tensors[f"{ATTENTION}.weight_scale"][3, 1] = 1e-7
    save_file(tensors, published / "model.safetensors", {"format": "pt"})
    spec = DecoderSpec.load(published)
    opened = PublishedTensors.open(published, spec)
    every, exact = opened.count()
    assert (exact, opened.kind(f"{ATTENTION}.weight")) == (every - 1, "float")


def test_groups_have_their_own_bits_and_formats(made, tmp_path):
    config = json.loads(json.dumps(FORMATS["packed"].config))
    group = config["config_groups"]["group_0"]
    of_8_bits = {"targets": ["re:.*q_proj"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    config["config_groups"] |= {"group_1": of_8_bits | {"format": "float-quantized"}}
    config["config_groups"] |= {"group_2": group | {"targets": ["model.layers.1.self_attn.q_proj"]}}
    found = read_quantization({"quantization_config": config})
    assert found.scheme("model.layers.0.self_attn.q_proj").is_float
    assert [found.scheme(f"model.layers.{i}.self_attn.k_proj").bits for i in range(2)] == [4, 4]
    assert not found.scheme("model.layers.1.self_attn.q_proj").is_float
    assert found.scheme(PLAIN) is None
    assert found.scheme("model.layers.0.mlp.gate") is None
    assert read_quantization({"compression_config": config}) == found


def test_digests_differ_by_content(made):
    published, plain = made("awq")
    spec = DecoderSpec.load(published)
    assert digest_weights(published, spec) != digest_weights(made("gptq")[0], spec) != digest_weights(plain, spec)


COMPRESSED = FORMATS["packed"].config
GROUP = COMPRESSED["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            ["'bitsandbytes'", "awq (gemm)", "compressed-tensors"],
        ),
        ({"quant_method": "hqq"}, ["'hqq'"]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ["'modelopt'"]),
        ("odd", ["'odd'"]),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, ["version 'gemv'"]),
        ({"quant_method": "awq", "bits": 4}, ["group_size None"]),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, ["3 bits"]),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, ["group_size 0"]),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, ["'marlin'"]),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*down": {"bits": 8}}}, ["+:.*down"]),
        ({"quant_method": "fp8", "fmt": "e5m2"}, ["'e5m2'"]),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ["weight_block_size [128]"]),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, ["nvfp4-pack-quantized"]),
        (COMPRESSED | {"format": "mxfp8-quantized"}, ["mxfp8-quantized"]),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, ["kv_cache_scheme"]),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparse-24-bitmask"]),
        (COMPRESSED | {"transform_config": {"config_groups": {}}}, ["transform_config"]),
        (COMPRESSED | {"quantization_status": "frozen"}, ["frozen"]),
        (COMPRESSED | {"config_groups": {"a": GROUP | {"targets": ["Embedding"]}}}, ["Embedding"]),
        (COMPRESSED | {"config_groups": {"a": GROUP | {"weights": None}}}, ["without a scheme"]),
        (COMPRESSED | {"config_groups": 3}, ["wrong kind"]),
    ],
)
def test_other_quantisations_are_refused(made, tmp_path, given, words):
    _, plain = made("awq")
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text((plain / "config.json").read_text())
    edit_config(target, quantization_config=given)
    for impl in ("auto", "transformers"):
        with pytest.raises(ModelError) as error:
            own_spec(make_config(model=str(target), model_impl=impl).model, target)
        assert all(word in error.value.message for word in words), error.value.message


def test_transformers_code_does_not_read_them(made):
    published, _ = made("awq")
    with pytest.raises(ModelError, match=r"quantised \(awq\)"):
        own_spec(make_config(model=str(published), model_impl="transformers").model, published)


@pytest.mark.parametrize(
    ("kind", "suffix", "change", "words"),
    [
        ("awq", "qzeros", None, ["no tensor", "qzeros"]),
        ("awq", "scales", lambda t: t[:1], ["scales has shape [1, 64]", "[2, 64]"]),
        ("gptq", "qweight", lambda t: t.t().contiguous(), ["qweight has shape [64, 8]", "[8, 64]"]),
        ("gptq", "g_idx", lambda t: t + 2, ["g_idx", "group 3"]),
        ("packed", "weight_packed", lambda t: t[:, :4].contiguous(), ["weight_packed has shape [64, 4]"]),
        ("packed", "weight_packed", None, ["no tensor", f"{ATTENTION}.weight"]),
        ("packed asymmetric", "weight_zero_point", lambda t: t.t().contiguous(), ["weight_zero_point has shape"]),
        ("int8", "weight_scale", lambda t: t.int(), ["weight_scale is stored as I32", "BF16"]),
        ("fp8 blocks", "weight_scale_inv", lambda t: t[:, :1].contiguous(), ["weight_scale_inv has shape [2, 1]"]),
        ("fp8 blocks", "weight", lambda t: t.float().to(torch.float8_e5m2), ["F8_E5M2", "F8_E4M3"]),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, kind, suffix, change, words):
    published, _ = write_published(FORMATS[kind], tmp_path)
    tensors = load_file(published / "model.safetensors")
    name = f"{ATTENTION}.{suffix}"
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name])
    save_file(tensors, published / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError) as error:
        load(published)
    assert all(word in error.value.message for word in words), error.value.message


def test_codes_without_a_scheme_are_no_weights(tmp_path):
    published, _ = write_published(FORMATS["float8 channels"], tmp_path)
    config = FORMATS["float8 channels"].config
    edit_config(published, quantization_config=config | {"ignore": ["re:.*q_proj"]})
    with pytest.raises(ModelError, match=r"q_proj\.weight is quantised, but config.json does not say how"):
        load(published)
