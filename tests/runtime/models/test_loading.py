"""Model directories: what is supported loads, what is broken or unsupported is one clear error."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.config import ModelConfig
from runtime.errors import ModelError
from runtime.models.resolve import model_name, resolve_model
from runtime.models.spec import LlamaSpec
from runtime.models.weights import load_weights
from tests.tiny import save_tiny


@pytest.fixture
def copy(tiny_dir, tmp_path):
    return shutil.copytree(tiny_dir, tmp_path / "model")


def edit(directory, **fields):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def load(directory):
    return load_weights(directory, LlamaSpec.load(directory), torch.float32)


def test_every_expected_tensor_comes_from_one_file_or_from_shards(tmp_path, default_model_dir):
    whole = save_tiny("qwen2", tmp_path / "whole", default_model_dir)
    shards = save_tiny("qwen2", tmp_path / "shards", default_model_dir, max_shard_size="1MB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    one, many = load(whole), load(shards)
    assert set(one) == set(many) == set(LlamaSpec.load(whole).expected_tensors())
    assert all(torch.equal(one[name], many[name]) for name in one)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["dynamic", "yarn"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["0.5"]),
        ({"hidden_size": 96}, ["shape", "96"]),
        ({"num_hidden_layers": 5}, ["model.layers.3", "no tensor"]),
        ({"attention_bias": True}, ["q_proj.bias"]),
    ],
)
def test_a_config_that_does_not_fit_is_named(copy, fields, words):
    edit(copy, **fields)
    with pytest.raises(ModelError) as error:
        load(copy)
    assert all(word in error.value.message for word in words)


def test_missing_fields_and_files(copy):
    config = json.loads((copy / "config.json").read_text())
    del config["num_hidden_layers"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="num_hidden_layers"):
        LlamaSpec.load(copy)
    (copy / "config.json").write_text("{ broken")
    with pytest.raises(ModelError, match=r"config\.json"):
        LlamaSpec.load(copy)
    (copy / "config.json").unlink()
    with pytest.raises(ModelError, match="missing"):
        LlamaSpec.load(copy)


def test_a_missing_tensor_is_named(copy):
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(copy)


def test_a_truncated_file_is_named(copy):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a complete"):
        load(copy)


def test_a_pickle_is_never_loaded(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickle"):
        load(copy)


def test_end_of_sequence_ids_are_joined(copy):
    edit(copy, eos_token_id=[2, 0])
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert LlamaSpec.load(copy).eos_token_ids == (2, 0, 7)


@pytest.mark.parametrize("name", ["/no/such/dir", "./nothing", "missing.gguf", "neither-this", "a/b/c"])
def test_a_model_that_is_not_there(name):
    with pytest.raises(ModelError, match="no such directory"):
        resolve_model(ModelConfig(model=name))


def test_a_file_that_is_no_model(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    with pytest.raises(ModelError, match=r"\.gguf"):
        resolve_model(ModelConfig(model=str(path)))


def test_an_unreachable_hub_is_one_clear_error(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="could not be fetched from the hub"):
        resolve_model(ModelConfig(model="ramet-tests/no-such-model"))


def test_served_names(tiny_dir):
    assert model_name(ModelConfig(model=str(tiny_dir)), tiny_dir) == tiny_dir.name
    assert model_name(ModelConfig(model=str(tiny_dir), served_model_name="mine"), tiny_dir) == "mine"
    assert model_name(ModelConfig(), tiny_dir) == "smollm2-135m-instruct"
