"""Model directories: what is supported loads, what is broken or unsupported is one clear error."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.config import ModelConfig
from runtime.errors import ModelError
from runtime.models.resolve import model_name, resolve_model
from runtime.models.spec import DecoderSpec
from runtime.models.weights import load_weights
from tests.tiny import save_tiny

GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 1}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
}


@pytest.fixture
def copy(tiny_dir, tmp_path):
    return shutil.copytree(tiny_dir, tmp_path / "model")


def edit(directory, drop=(), **fields):
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in drop}))
    return directory


def load(directory):
    return load_weights(directory, DecoderSpec.load(directory), torch.float32)


def test_every_expected_tensor_comes_from_one_file_or_from_shards(tmp_path, default_model_dir):
    whole = save_tiny("qwen2", tmp_path / "whole", default_model_dir)
    shards = save_tiny("qwen2", tmp_path / "shards", default_model_dir, max_shard_size="1MB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    one, many = load(whole), load(shards)
    assert set(one) == set(many) == set(DecoderSpec.load(whole).expected_tensors())
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_missing_fields_and_files(copy):
    config = json.loads((copy / "config.json").read_text())
    del config["num_hidden_layers"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="num_hidden_layers"):
        DecoderSpec.load(copy)
    (copy / "config.json").write_text("{ broken")
    with pytest.raises(ModelError, match=r"config\.json"):
        DecoderSpec.load(copy)
    (copy / "config.json").unlink()
    with pytest.raises(ModelError, match="missing"):
        DecoderSpec.load(copy)


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
    assert DecoderSpec.load(copy).eos_token_ids == (2, 0, 7)


@pytest.mark.parametrize("name", ["/no/such/dir", "./nothing", "missing.gguf", "neither-this", "a/b/c"])
def test_a_model_that_is_not_there(name):
    with pytest.raises(ModelError, match="no such directory"):
        resolve_model(ModelConfig(model=name))


def test_a_file_that_is_no_model(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    with pytest.raises(ModelError, match="is a file, but not GGUF"):
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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": [["LlamaForCausalLM"]]}, ["architectures", "list of names"]),
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["dynamic", "yarn"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["0.5"]),
        ({"hidden_size": 96}, ["shape", "96"]),
        ({"num_hidden_layers": 5}, ["model.layers.3", "no tensor"]),
        ({"attention_bias": True}, ["q_proj.bias"]),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, ["bitsandbytes", "awq (gemm)"]),
        ({"hidden_size": "48"}, ["hidden_size", "'48'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "positive"]),
        ({"num_attention_heads": None}, ["num_attention_heads", "None"]),
        ({"num_key_value_heads": 4}, ["6 query heads", "4"]),
        ({"head_dim": 7}, ["head_dim", "7"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention"]),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, ["longrope", "llama3"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["factor"]),
        ({"rms_norm_eps": []}, ["wrong kind"]),
        (GPT_OSS | {"layer_types": ["sliding_attention"]}, ["layer_types"]),
        (GPT_OSS | {"layer_types": ["linear_attention"] * 3}, ["linear_attention"]),
        (GPT_OSS | {"swiglu_limit": -1}, ["swiglu_limit -1"]),
        (GPT_OSS | {"swiglu_limit": float("nan")}, ["swiglu_limit nan"]),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, ["decoder_sparse_step 0"]),
    ],
)
def test_what_cannot_be_computed_is_named(copy, fields, words):
    with pytest.raises(ModelError) as error:
        load(edit(copy, **fields))
    assert all(word in error.value.message for word in words)


def test_both_spellings_of_rope(copy):
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    new = edit(copy, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    spec = DecoderSpec.load(new)
    old = edit(copy, drop=["rope_parameters"], rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    assert DecoderSpec.load(old) == spec
    assert (spec.rope.kind, spec.rope.theta, spec.rope.original_context) == ("llama3", 5e5, 64)


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("MistralForCausalLM", {}, (4096,) * 3),
        ("MistralForCausalLM", {"sliding_window": None}, ()),
        ("Qwen3ForCausalLM", {"use_sliding_window": True}, ()),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "max_window_layers": 1}, (None, 4096, 4096)),
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 128, "max_window_layers": 0}, ()),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (4096, None, 4096),
        ),
        ("LlamaForCausalLM", {"sliding_window": 128}, ()),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 2, "query_pre_attn_scalar": 16}, (4096, None, 4096)),
    ],
)
def test_sliding_windows(copy, architecture, fields, windows):
    edit(copy, architectures=[architecture], max_position_embeddings=9000, **fields)
    spec = DecoderSpec.load(copy)
    assert (spec.windows, spec.context_length) == (windows, 9000)
    # Keys behind a window are others: stored ones are not exchanged between two configurations of the same weights.
    edit(copy, sliding_window=None)
    assert (DecoderSpec.load(copy).fingerprint == spec.fingerprint) == (not windows)


def test_kv_of_another_configuration_of_the_same_weights_is_not_taken(copy):
    first = DecoderSpec.load(copy).fingerprint
    edit(copy, eos_token_id=1, max_position_embeddings=77)
    assert DecoderSpec.load(copy).fingerprint == first
    edit(copy, rms_norm_eps=0.5)
    assert DecoderSpec.load(copy).fingerprint != first


def test_quantised_tensors_without_their_scales_are_refused(copy):
    name, path = "model.layers.0.mlp.up_proj.weight", copy / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, path)
    with pytest.raises(ModelError, match=r"up_proj\.weight is stored as F8_E4M3"):
        load_weights(copy, DecoderSpec.load(copy), torch.float32)


def test_the_head_of_a_tied_model_stays_in_the_file(copy):
    edit(copy, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_weights(copy, DecoderSpec.load(copy), torch.bfloat16)
