"""GGUF files of models with recurrent layers or experts: transformers' tokens, and matrices computed as stored."""

import random
from functools import partial
from itertools import chain

import pytest
import torch

from runtime.errors import ModelError
from runtime.models.gguf import convert_gguf
from tests.runtime.engine.driver import Driver, gives, greedy, make_core
from tests.runtime.execution.mixers.models import Runner, oracle, save_hybrid
from tests.runtime.features.hybrid.test_exact import STOP, Asking, conversation
from tests.runtime.models.hybrid_files import (
    DELTA_SIZES,
    EXPERT_SIZES,
    GRANITE_SIZES,
    SIZES,
    Kind,
    link,
    round_weights,
    write_hybrid,
)

# Several types in what a layer reads: queries and their gates are one tensor, of another type than keys and values.
MIXED = {
    **{"in_proj": Kind.Q5_0, "out_proj": Kind.Q4_1, "attn_q": Kind.Q5_1, "attn_k": Kind.Q8_0, "attn_v": Kind.Q4_0},
    **{"attn_qkv": Kind.Q8_0, "attn_gate": Kind.Q4_0, "ssm_alpha": Kind.Q8_0, "ssm_out": Kind.Q5_1},
    **{"ffn_gate_exps": Kind.Q5_0, "ffn_up_exps": Kind.Q5_0, "ffn_down_exps": Kind.Q4_1, "ssm_ba": Kind.Q4_0},
    **{"ffn_gate_shexp": Kind.Q8_0, "ffn_up_shexp": Kind.Q8_0, "ffn_down_shexp": Kind.Q5_0},
    **{"ffn_gate": Kind.Q4_0, "ffn_up": Kind.Q4_0, "token_embd": Kind.F16},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
YARN |= {"rope_theta": 10000.0}
OWN = ["Lfm2", "Qwen3_5", "Qwen3Next", "Qwen3Moe", "GptOss"]
TEXT = [random.Random(5).randrange(3, 320) for _ in range(70)]


def make(family, directory, kind=None, rounded=None, **more):
    """A model of transformers, and the file's directory."""
    own = {
        "Lfm2": {"block_auto_adjust_ff_dim": False},
        "Qwen3_5": DELTA_SIZES,
        "Qwen3Next": DELTA_SIZES | EXPERT_SIZES,
        "Qwen3Moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
        | {"moe_intermediate_size": 32},
        "GptOss": {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
        | {"rope_parameters": YARN},
        "GraniteMoeHybrid": GRANITE_SIZES,
    }
    source = save_hybrid(family, directory / "source", **SIZES, **own[family], **more)
    if rounded is not None:
        round_weights(source, rounded)
    return source, link(write_hybrid(source, directory / "m.gguf", kind), directory / "out")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`make`, which makes no model twice."""
    found = {}

    def made(family, *given):
        if repr((family, given)) not in found:
            found[repr((family, given))] = make(family, tmp_path_factory.mktemp(family), *given)
        return found[repr((family, given))]

    return made


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("kind", [None, Kind.Q8_0, Kind.Q4_0])
@pytest.mark.parametrize("family", OWN)
def test_greedy_tokens_are_those_of_transformers(made, family, kind, kernels):
    """Cold, warm, and the next turn, for a small chunk size and a pool that is too small for all."""
    source, target = made(family, kind, kind)
    draw, options = random.Random(3), {"kernels": kernels, "page_size": 4, "chunk_tokens": 7}
    driver, prompt = Asking(target, partial(gives, oracle(source)), pool_tokens=320, **options), conversation(draw, 3)
    answer = driver.ask(prompt)
    assert driver.ask(prompt) == answer
    assert driver.latest >= len(prompt) - 2
    for _ in range(4):
        driver.ask([*prompt, *answer, STOP, *conversation(draw, 3)])
    assert driver.core.state()["evicted_tokens"] > 0
    driver.ask(prompt)


@pytest.mark.parametrize("kind", [Kind.Q8_0, MIXED])
@pytest.mark.parametrize("family", OWN)
def test_logits_of_stored_matrices_are_near_those_of_unpacked_ones(library, made, family, kind):
    _, target = made(family, kind)
    plain, stored = Runner(target), Runner(target, library)
    wanted = plain.step((plain.start(1), TEXT))
    found = stored.step((stored.start(1), TEXT))
    # Rounded activations may choose other experts for a few rows.
    assert 0 < ((found - wanted).norm(dim=1) / wanted.norm(dim=1)).median() < 0.1
    one = stored.start(2)
    again = torch.cat([stored.step((one, TEXT[first : first + 9])) for first in range(0, len(TEXT), 9)])
    assert torch.equal(again, found), "in any chunks"


@pytest.mark.parametrize("family", OWN)
def test_an_engine_computes_what_is_stored(made, family):
    """Cold, warm and in chunks; transformers' tokens would need activations that are not rounded."""
    _, target = made(family, MIXED)
    draw = random.Random(7)
    prompt, found = conversation(draw, 3), []
    for chunk in (5, 64):
        driver = Driver(make_core(target, dtype="auto", page_size=4, chunk_tokens=chunk))
        assert driver.core.executor.decoder.quantization == "gguf"
        for _ in range(2):
            found += driver.together([prompt], max_new_tokens=8)
        assert driver.cached("r1") > 0
    assert found == [found[0]] * 4


def test_experts_of_gpt_oss_stay_in_mxfp4(library, made):
    _, target = made("GptOss", Kind.Q8_0)
    layers = Runner(target, library).forward.__self__.experts
    assert layers
    for experts in layers:
        matrices = [*chain(*experts.matrices)]
        assert {(one.bits, bool(one.is_float), bool(one.bias)) for one in matrices} == {(4, True, True)}


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    source, plain = make("Qwen3_5", tmp_path)
    more = link(write_hybrid(source, tmp_path / "more.gguf", predicting=1), tmp_path / "more")
    logits = [runner.step((runner.start(0), TEXT)) for runner in (Runner(plain), Runner(more))]
    assert torch.equal(*logits)


@pytest.mark.parametrize(("family", "name"), [("Lfm2", "lfm2"), ("GptOss", "gpt-oss")])
def test_a_file_is_not_unpacked_for_transformers(tmp_path, family, name):
    source, _ = make(family, tmp_path)
    with pytest.raises(ModelError, match=f"--model-impl transformers is not served with GGUF files of {name}"):
        convert_gguf(tmp_path / "m.gguf", source)


@pytest.mark.parametrize(("kind", "experts", "rope"), [(None, 0, None), (Kind.Q8_0, 4, None), (Kind.F16, 4, "rope")])
def test_granite_is_unpacked_for_transformers_code(tmp_path, kind, experts, rope):
    more = {"num_local_experts": experts, "num_experts_per_tok": min(experts, 2), "position_embedding_type": rope}
    source, target = make("GraniteMoeHybrid", tmp_path, kind, kind, **more)
    model, draw = oracle(source), random.Random(2)
    prompts = [draw.choices(range(3, 320), k=length) for length in (30, 17)]
    driver = Driver(make_core(target, page_size=4, chunk_tokens=7))
    assert driver.core.info.model_impl == "transformers"
    assert driver.together(prompts, max_new_tokens=6) == [greedy(model, prompt, 6) for prompt in prompts]
