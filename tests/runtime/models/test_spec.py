"""Configurations that would be computed wrongly are refused, and the two spellings of rope mean the same."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.errors import ModelError
from runtime.models.spec import LlamaSpec
from runtime.models.weights import load_weights


@pytest.fixture
def copy(tiny_dir, tmp_path):
    return shutil.copytree(tiny_dir, tmp_path / "model")


def edit(directory, drop=(), **fields):
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in drop}))
    return directory


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, ["gptq", "bfloat16"]),
        ({"hidden_size": "48"}, ["hidden_size", "'48'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "positive"]),
        ({"num_attention_heads": None}, ["num_attention_heads", "None"]),
        ({"num_key_value_heads": 4}, ["6 query heads", "4"]),
        ({"head_dim": 7}, ["head_dim", "7"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention"]),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, ["longrope", "llama3"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["factor"]),
        ({"rms_norm_eps": []}, ["wrong kind"]),
        (
            {
                "architectures": ["GptOssForCausalLM"],
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
                "layer_types": ["sliding_attention"],
            },
            ["layer_types"],
        ),
        (
            {
                "architectures": ["GptOssForCausalLM"],
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
                "layer_types": ["linear_attention"] * 3,
            },
            ["linear_attention"],
        ),
        *(
            (
                {
                    "architectures": ["GptOssForCausalLM"],
                    "num_local_experts": 2,
                    "num_experts_per_tok": 1,
                    "swiglu_limit": limit,
                },
                [f"swiglu_limit {limit}"],
            )
            for limit in (-1, float("nan"))
        ),
        (
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_experts": 2,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 8,
                "decoder_sparse_step": 0,
            },
            ["decoder_sparse_step 0"],
        ),
    ],
)
def test_what_cannot_be_computed_is_named(copy, fields, words):
    with pytest.raises(ModelError) as error:
        LlamaSpec.load(edit(copy, **fields))
    assert all(word in error.value.message for word in words)


def test_both_spellings_of_rope(copy):
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    new = edit(copy, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    spec = LlamaSpec.load(new)
    old = edit(copy, drop=["rope_parameters"], rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    assert LlamaSpec.load(old) == spec
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
    ],
)
def test_sliding_windows(copy, architecture, fields, windows):
    edit(copy, architectures=[architecture], max_position_embeddings=9000, **fields)
    spec = LlamaSpec.load(copy)
    assert (spec.windows, spec.context_length) == (windows, 9000)
    # Keys behind a window are others: stored ones are not exchanged between two configurations of the same weights.
    edit(copy, drop=["sliding_window", "use_sliding_window", "layer_types"], architectures=["Qwen3ForCausalLM"])
    assert (LlamaSpec.load(copy).fingerprint == spec.fingerprint) == (not windows)


def test_quantised_tensors_without_their_scales_are_refused(copy):
    name, path = "model.layers.0.mlp.up_proj.weight", copy / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, path)
    with pytest.raises(ModelError, match=r"up_proj\.weight is stored as F8_E4M3"):
        load_weights(copy, LlamaSpec.load(copy), torch.float32)


def test_the_head_of_a_tied_model_stays_in_the_file(copy):
    edit(copy, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_weights(copy, LlamaSpec.load(copy), torch.bfloat16)
