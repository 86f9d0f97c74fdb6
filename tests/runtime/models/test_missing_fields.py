"""What a configuration leaves out means what its publisher takes it to mean: whole results are compared."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from runtime.errors import ModelError
from runtime.models.gguf import _config
from runtime.models.gguf_tokenizer import build_tokenizer
from runtime.models.pre_tokenizers import _NAMED
from runtime.models.quantization import Quantization, Scheme, read_quantization
from runtime.models.spec import DecoderSpec, _from_config

KINDS = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe", "GptOssForCausalLM": "gpt_oss",
    "Gemma3ForCausalLM": "gemma3_text", "DeepseekV2ForCausalLM": "deepseek_v2", "Lfm2ForCausalLM": "lfm2",
    "DeepseekV3ForCausalLM": "deepseek_v3", "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3NextForCausalLM": "qwen3_next",
}  # fmt: skip
# Few layers and experts; and a number where transformers' own default is none.
GIVEN = {"num_hidden_layers": 8, "num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16}
GIVEN_V2 = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
# The kind of the model, and the end of answers, which other files name as well.
OWN = {"architectures", "model_type", "eos_token_id"}

# Sizes, without which a model is refused, or what its checkpoint does not fit.
NEEDED = {
    "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
    "vocab_size", "num_key_value_heads", "head_dim", "moe_intermediate_size", "num_experts_per_tok", "num_experts",
    "num_local_experts", "n_routed_experts", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "first_k_dense_replace", "n_group", "topk_group",
}  # fmt: skip


def read(config: dict) -> DecoderSpec | None:
    """None: it is refused."""
    try:
        return _from_config(config, {})
    except (ModelError, KeyError):
        return None


def fits(spec: DecoderSpec, published: DecoderSpec) -> bool:
    """Whether a checkpoint has all tensors that a spec expects: else loading refuses it."""
    return spec.expected_tensors().items() <= published.expected_tensors().items()


@pytest.mark.parametrize(("architecture", "kind"), KINDS.items())
def test_a_missing_field_is_refused_or_means_what_transformers_takes_it_to_mean(architecture, kind):
    theirs, given = AutoConfig.for_model(kind), GIVEN | (GIVEN_V2 if kind == "deepseek_v2" else {})
    given = {name: value for name, value in given.items() if hasattr(theirs, name)}
    every = {**AutoConfig.for_model(kind, **given).to_dict(), "architectures": [architecture]}
    wanted, optional = _from_config(every, {}), set()
    for name in every.keys() - OWN:
        found = read({other: value for other, value in every.items() if other != name})
        if found is not None and fits(found, wanted):
            optional.add(name)
            assert found == wanted, name
    assert every.keys() - OWN - optional <= NEEDED
    assert _from_config({name: value for name, value in every.items() if name not in optional}, {}) == wanted


SMALL = {
    "block_count": 4,
    "context_length": 99,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
DELTA = {
    "rope.dimension_count": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 32,
}
# What files of an architecture always have beside SMALL.
ALWAYS: dict[str, dict] = {
    "llama": {},
    "gpt-oss": {
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
        "attention.sliding_window": 128,
    },
    "lfm2": {"attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3},
    "qwen35": DELTA,
    "granitehybrid": {
        "attention.head_count_kv": [0, 2, 0, 2],
        "expert_shared_feed_forward_length": 32,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 8,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 64,
    },
}
# What llama.cpp takes fields for that a file lacks, and another value.
DEFAULTS = [
    ("llama", "attention.head_count_kv", 4, 2),
    ("llama", "attention.key_length", 16, 8),
    ("llama", "nextn_predict_layers", 0, 1),
    ("llama", "rope.freq_base", 10000.0, 10001.0),
    ("llama", "rope.scaling.type", "none", "linear"),
    ("llama", "attention.sliding_window", 0, 16),
    ("gpt-oss", "rope.freq_base", 10000.0, 150000.0),
    ("lfm2", "attention.sliding_window", 0, None),
    ("qwen35", "full_attention_interval", 4, 2),
    ("qwen35", "attention.recurrent_layers", [True, True, True, False], [True, False, True, False]),
    *(("granitehybrid", f"{name}_scale", 1.0, 2.0) for name in ("embedding", "residual", "logit")),
    ("granitehybrid", "attention.scale", 0.25, 1.0),
    ("granitehybrid", "expert_count", 0, 4),
    ("granitehybrid", "expert_used_count", 0, 2),
    ("granitehybrid", "rope.scaling.finetuned", True, False),
]


def gguf_config(architecture: str, **fields) -> dict:
    given = {**SMALL, **ALWAYS[architecture], **fields}
    return _config(Path("m.gguf"), {f"{architecture}.{name}": value for name, value in given.items()}, architecture, [])


@pytest.mark.parametrize(("architecture", "name", "default", "other"), DEFAULTS)
def test_a_missing_field_of_a_file_means_what_llama_cpp_takes_it_to_mean(architecture, name, default, other):
    assert gguf_config(architecture) == gguf_config(architecture, **{name: default})
    if other is None:
        with pytest.raises(ModelError, match=name):
            gguf_config(architecture, **{name: 16})
    else:
        assert gguf_config(architecture) != gguf_config(architecture, **{name: other})


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"type": "linear"}, {"rope_type": "linear", "factor": 1.0}),
        ({"type": "linear", "factor": 2.0, "attn_factor": 0.5}, {"rope_type": "linear", "factor": 2.0}),
        ({"type": "yarn", "factor": 4.0, "attn_factor": 1.0}, {"rope_type": "yarn", "factor": 4.0}),
        # Half of the temperature 1 + 0.1 ln 4.
        ({"type": "yarn", "factor": 4.0, "attn_factor": 0.5}, {"factor": 4.0, "attention_factor": 0.569314718055995}),
        ({"type": "yarn", "factor": 0.5, "attn_factor": 0.5}, {"factor": 0.5, "attention_factor": 0.5}),
        (
            {"type": "yarn", "factor": 4.0, "yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0, "original_context_length": 9},
            {"factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0, "original_max_position_embeddings": 9},
        ),
    ],
)
def test_fields_of_scaling(fields, scaling):
    found = gguf_config("llama", **{f"rope.scaling.{name}": value for name, value in fields.items()})["rope_scaling"]
    assert found == pytest.approx({"rope_type": "yarn", **scaling})


WORDS = {"tokens": ["<unk>", "<s>", "</s>", "\N{LOWER ONE EIGHTH BLOCK}", "a", "b"], "bos_token_id": 1}
TOKENIZERS = [
    ("llama", "add_space_prefix", True, False),
    ("llama", "unknown_token_id", 0, 4),
    ("llama", "token_type", [1] * 6, [1, 3, 3, 1, 1, 1]),
    ("llama", "scores", [0.0] * 6, None),
    ("llama", "add_bos_token", True, False),
    ("gpt2", "pre", "default", "gpt-2"),
    ("gpt2", "merges", [], ["a b"]),
    ("gpt2", "token_type", [1] * 6, [1, 3, 3, 1, 1, 1]),
    ("gpt2", "add_bos_token", False, True),
]


def gguf_tokenizer(**words) -> tuple[str, dict]:
    fast, settings = build_tokenizer(Path("m.gguf"), {f"tokenizer.ggml.{k}": v for k, v in {**WORDS, **words}.items()})
    return fast.to_str(), settings


@pytest.mark.parametrize(("model", "name", "default", "other"), TOKENIZERS)
def test_a_missing_field_of_a_tokenizer_means_what_llama_cpp_takes_it_to_mean(model, name, default, other):
    words = {"tokens": [*WORDS["tokens"], "ab"], "token_type": [1] * 7} if name == "merges" else {}
    # What the field `unknown_token_id` means for text, apart from the name of the token in the settings.
    parts = slice(0, 1) if name == "unknown_token_id" else slice(None)
    missing, given = gguf_tokenizer(model=model, **words), gguf_tokenizer(model=model, **words, **{name: default})
    assert missing[parts] == given[parts]
    if other is not None:
        assert missing != gguf_tokenizer(model=model, **words, **{name: other})


def test_which_pre_tokenizers_begin_prompts_merge_no_whole_tokens_and_compose_text():
    """As llama.cpp's table says it, for files without the field for the BOS."""
    like_llama3 = {"llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1", "pixtral", "midm-2.0"}
    names = _NAMED.items()
    assert {name for name, cuts in names if cuts.begins} == {*like_llama3, "tekken"}
    assert {name for name, cuts in names if cuts.whole} == {*like_llama3, "tekken", "minicpm5", "youtu"}
    assert {name for name, cuts in names if cuts.composed} == {"qwen2", "deepseek-r1-qwen", "qwen35"}


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": GROUP}}
INT = {**PACKED, "format": "int-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": {}}}}
# A quantization_config, a field that it lacks, what its publishers take it to be, and a value that means something else
# or is refused.
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
QUANTIZED = [
    ({"quant_method": "fp8"}, "fmt", "e4m3", "e5m2"),
    ({"quant_method": "fp8"}, "expert_dtype", "fp8", "int4"),
    ({"quant_method": "fp8"}, "weight_block_size", None, [128, 64]),
    ({"quant_method": "awq", "bits": 4, "group_size": 32}, "version", "gemm", "gemv"),
    (GPTQ, "checkpoint_format", "gptq", "gptq_v2"),
    (GPTQ, "pack_dtype", "int32", "int16"),
    (GPTQ, "is_marlin_format", False, True),
    (GPTQ, "dynamic", {}, {"+:a": {"bits": 8}}),
    (PACKED, "quantization_status", "compressed", "frozen"),
    (PACKED, "sparsity_config", {"format": "dense"}, {"format": "sparse-24-bitmask"}),
    (PACKED, "kv_cache_scheme", None, {"num_bits": 8}),
    (PACKED, "transform_config", {}, {"config_groups": {}}),
    (PACKED, "ignore", [], ["lm_head"]),
    (PACKED, "config_groups.group_0.format", "pack-quantized", "int-quantized"),
    (INT, "config_groups.group_0.weights.num_bits", 8, 4),
    (INT, "config_groups.group_0.weights.type", "int", "float"),
    (INT, "config_groups.group_0.weights.strategy", "tensor", "channel"),
]


def with_field(config: dict, name: str, value: object) -> dict:
    first, _, rest = name.partition(".")
    return {**config, first: with_field(config.get(first, {}), rest, value) if rest else value}


def read_quantized(config: dict) -> object:
    """None: it is refused."""
    try:
        return read_quantization({"quantization_config": config})
    except ModelError:
        return None


@pytest.mark.parametrize(("config", "name", "default", "other"), QUANTIZED)
def test_a_missing_field_of_a_quantised_checkpoint_means_its_default(config, name, default, other):
    found = read_quantized(config)
    assert found is not None
    assert found == read_quantized(with_field(config, name, default))
    assert found != read_quantized(with_field(config, name, other))


@pytest.mark.parametrize(("group_size", "blocks"), [(None, (None, None)), (-1, (1, None)), (32, (1, 32))])
def test_without_a_strategy_the_size_of_groups_says_it(group_size, blocks):
    weights = {"num_bits": 8} | ({} if group_size is None else {"group_size": group_size})
    config = with_field(INT, "config_groups.group_0.weights", weights)
    assert read_quantized(config) == Quantization("int-quantized", ((("Linear",), Scheme("plain", 8, blocks)),))
