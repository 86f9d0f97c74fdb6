"""Models with recurrent layers in transformers' code: greedy output is that of transformers alone."""

import random

import pytest
import torch
import transformers

from tests.runtime.engine.driver import Driver, gives, make_core
from tests.runtime.features.drafts.test_exact import run
from tests.tiny import vary

VOCAB, NEW = 320, 8
_SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "pad_token_id": 0,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "mamba_d_head": 16,
    "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 1, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_CONV = {"layer_types": ["conv", "full_attention", "conv"]}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_KINDS = {
    "Bamba": {"attn_layer_indices": [1]},
    "FalconH1": {"mamba_d_ssm": 64},
    "GraniteMoeHybrid": {
        "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 48, "mamba_n_groups": 2, "position_embedding_type": "rope",
    },
    "Jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 4},
    "Lfm2Moe": {**_CONV, **_EXPERTS, "num_dense_layers": 1},
    "Lfm3": _CONV,
    "NemotronH": {
        "layers_block_type": ["mamba", "mlp", "attention", "mamba"], "num_hidden_layers": 4, "head_dim": 8,
        "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1,
    },
    "OlmoHybrid": _DELTA,
    "Qwen3_5Moe": {**_DELTA, **_EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 16},
    "Zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba"], "hybrid_layer_ids": [1], "n_mamba_heads": 4,
        "mamba_headdim": 16, "mamba_ngroups": 1, "adapter_rank": 4, "num_mem_blocks": 1, "attention_head_dim": 16,
    },
}  # fmt: skip


@pytest.fixture(params=_KINDS)
def path(request, tmp_path):
    torch.manual_seed(1)
    kind = getattr(transformers, f"{request.param}ForCausalLM")
    given = _SMALL | _KINDS[request.param]
    model = kind(kind.config_class(**given))
    vary(model)
    model.save_pretrained(tmp_path)
    return tmp_path


def test_greedy_tokens_are_those_of_transformers(path, monkeypatch):
    """Cold, warm, in chunks, branched within a page, and with guesses that are right or wrong."""
    draw = random.Random(2)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(length)] for length in (30, 17)]
    prompts.append(prompts[0][:21] + prompts[1])
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    core = make_core(path, page_size=4, chunk_tokens=7)
    assert core.info.model_impl == "transformers"
    driver = Driver(core)
    cold = driver.together(prompts, max_new_tokens=NEW)
    assert [gives(model, *pair) for pair in zip(prompts, cold, strict=True)] == [True] * 3
    assert cold[0] != cold[1]
    assert driver.together(prompts, max_new_tokens=NEW) == cold
    assert [driver.cached(rid) for rid in [*driver.requests][-3:]] == [len(prompt) - 1 for prompt in prompts]
    known = {str(i): tokens for i, tokens in enumerate(Driver(core).together(prompts, max_new_tokens=24))}
    drafted = run(make_core(path, page_size=4, drafts="auto"), prompts, monkeypatch, known, right=0.6)
    assert all(known[rid][: len(tokens)] == tokens for rid, tokens in drafted.tokens.items())
