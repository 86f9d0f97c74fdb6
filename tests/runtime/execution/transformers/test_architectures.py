"""Greedy output of transformers' code over pages is that of transformers alone, for many architectures."""

import random
from pathlib import Path

import pytest
import torch
import transformers

import runtime.models
from runtime.engine.core import EngineCore
from runtime.execution.native.library import load_best
from tests.runtime.engine.driver import Driver, gives, make_core
from tests.runtime.execution.transformers.architectures import ARCHITECTURES, VOCAB, save_small

NEW = 6


@pytest.fixture(scope="module")
def prompts():
    draw = random.Random(3)
    root = [draw.randrange(3, VOCAB) for _ in range(40)]
    lengths = [(draw.randrange(2, 41), draw.randrange(1, 9)) for _ in range(4)]
    return [root[:shared] + [draw.randrange(3, VOCAB) for _ in range(own)] for shared, own in lengths]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers(architecture, prompts, tmp_path):
    """Cold, warm and evicting; in batches and alone; in pages of 1 and of 16."""
    check_greedy(save_small(architecture, tmp_path), prompts, model_impl="transformers")


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("Qwen3Moe", {}),
        ("Qwen3Moe", {"decoder_sparse_step": 2, "norm_topk_prob": True, "use_sliding_window": True}),
        ("Qwen3Moe", {"mlp_only_layers": [0]}),
        ("GptOss", {}),
        ("DeepseekV2", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}),
        ("DeepseekV2", {"q_lora_rank": None, "routed_scaling_factor": 1.5}),
        ("DeepseekV3", {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}),
        ("DeepseekV3", {"rope_interleave": False, "first_k_dense_replace": 3, "norm_topk_prob": False}),
        ("GptOss", {"swiglu_limit": 0.5, "swiglu_alpha": 3.0, "attention_bias": False}),
    ],
)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_experts_in_the_own_code(architecture, fields, kernels, prompts, tmp_path):
    path = save_small(architecture, tmp_path, **fields)
    core = check_greedy(path, prompts, model_impl="auto", kernels=kernels)
    assert core.info.model_impl == "ramet"
    assert (core.executor.decoder.attention == "torch") == (kernels == "torch" or load_best() is None)


def check_greedy(path, prompts, **options) -> EngineCore:
    options["chunk_tokens"] = 7
    driver = Driver(make_core(path, page_size=1, **options))
    cold = driver.together(prompts, max_new_tokens=NEW)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    assert [gives(model, *pair) for pair in zip(prompts, cold, strict=True)] == [True] * len(prompts)
    assert len({*map(tuple, cold)}) > 1, "the model says the same to everything"
    assert driver.together(prompts, max_new_tokens=NEW) == cold
    assert driver.cached("r4") == len(prompts[0]) - 1
    core = make_core(path, page_size=16, pool_tokens=80, **options)
    driver = Driver(core)
    for i in (0, 1, 2, 3, 2, 0):
        driver.add(f"{i} {driver.steps}", prompts[i], max_new_tokens=NEW)
        driver.step()
        if i > 2:
            driver.run()
    driver.run()
    assert all(tokens == cold[int(rid.split()[0])] for rid, tokens in driver.tokens.items())
    assert core.state()["evicted_tokens"] > 0
    return core


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("architecture", ["Mistral", "Qwen2", "Gemma3", "GptOss"])
def test_windows_in_the_own_code(architecture, kernels, prompts, tmp_path):
    path = save_small(architecture, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for page_size in (1, 16):
        core = make_core(path, page_size=page_size, chunk_tokens=7, kernels=kernels)
        assert (core.info.model_impl, core.executor.has_windows) == ("ramet", True)
        driver = Driver(core)
        cold = driver.together(prompts, max_new_tokens=NEW)
        assert [gives(model, *pair) for pair in zip(prompts, cold, strict=True)] == [True] * len(prompts)
        assert driver.together(prompts, max_new_tokens=NEW) == cold
    assert {*core.strategies} == {"prefix"}
    # A window as long as the context hides nothing, but Gemma rotates those layers otherwise.
    assert len(make_core(path, context_length=9).strategies) == (1 if architecture == "Gemma3" else 4)


def test_the_table_of_the_readme_is_what_is_tested():
    room = Path(runtime.models.__file__).parent
    table = (room / "README.md").read_text(encoding="utf-8").split("<!-- architectures -->")[1]
    assert table.split() == ", ".join(ARCHITECTURES).split()
    assert f"[{len(ARCHITECTURES)} architectures" in (room.parents[1] / "README.md").read_text(encoding="utf-8")
