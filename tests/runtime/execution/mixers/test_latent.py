"""Engines of models with latent attention: half a pool, tiers, documents that move, adapters, and what is refused."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from radix import Namespace
from runtime.calls import LoadAdapter
from runtime.errors import InvalidRequest, ModelError
from runtime.features.tiers.tiering import Tiering
from runtime.models.shards import split_spec
from runtime.models.spec import DecoderSpec
from tests.lora import merged, save_lora
from tests.runtime.engine.driver import Driver, call, greedy, make_core
from tests.runtime.execution.transformers.architectures import VOCAB, save_small
from tests.runtime.features.chunks.asks import build
from tests.runtime.features.tiers.engines import NEW, evict, loaded, open_core, options_of
from tests.runtime.reuse.contract.subject import World
from tests.runtime.reuse.contract.subjects import Fusion, best

DENSE = {"first_k_dense_replace": 3}
CODE = [{"kernels": "torch"}, {"kernels": "auto"}]


def drawn(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_small("DeepseekV3", tmp_path_factory.mktemp("latent"), **DENSE)


def test_a_token_takes_one_row_of_latent_and_rotated_key(path):
    ours, theirs = (make_core(path, model_impl=code).executor.pool for code in ("ramet", "transformers"))
    layers, rank, rotated, heads, plain = 3, 8, 4, 4, 8
    assert ours.page_bytes // ours.page_size == layers * (rank + rotated) * 4
    assert theirs.page_bytes // theirs.page_size == layers * 2 * heads * (plain + rotated) * 4
    assert ours.v.data_ptr() == ours.k.data_ptr()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_evicted_blocks_come_back(path, tmp_path, tier):
    prompts = [drawn(0, 70) + drawn(i, 40 + 10 * i) for i in (1, 2)]
    model = load(path)
    expected = [greedy(model, prompt, NEW) for prompt in prompts]
    core = open_core(path, **options_of(tier, tmp_path))
    driver = Driver(core)
    assert driver.together(prompts, max_new_tokens=NEW) == expected
    evict(core)
    assert driver.together(prompts, max_new_tokens=NEW) == expected
    assert loaded(driver, "r2") == {tier: 64}
    assert core.part(Tiering).tiers.loaded_tokens[tier] > 0
    core.close()


@pytest.mark.parametrize("code", CODE)
@pytest.mark.parametrize("interleaved", [True, False])
def test_documents_are_read_at_other_places(tmp_path, code, interleaved):
    """A single layer's rows depend on their tokens and places alone, so that reuse is exact wherever they stand."""
    path = save_small("DeepseekV3", tmp_path, num_hidden_layers=1, rope_interleave=interleaved, **DENSE)
    draw = random.Random(4)
    texts, world = [drawn(5, 33), drawn(6, 20)], World(Fusion(path), page_size=16, **code)
    for i, (order, system) in enumerate([(texts, 5), (texts[::-1], 40)]):
        ask = build(draw, order, system, 7, method="pie")
        ask = type(ask)(tuple(t % (VOCAB - 3) + 3 for t in ask.prompt), ask.documents, method="pie", ratio=None)
        world.one(str(i), ask, 4)
        assert world.tokens[str(i)] == best(path, [*ask.prompt], world.tokens[str(i)])
    assert world.report("1")["reused_tokens"] > 50


@pytest.mark.parametrize("code", CODE)
def test_adapters_of_outputs_and_mlps_are_served_and_others_refused(path, tmp_path, code):
    model, prompt = load(path), drawn(7, 20)
    served = save_lora(tmp_path / "one", model, 3, targets=("o_proj", "gate_proj", "up_proj", "down_proj"))
    refused = save_lora(tmp_path / "other", model, 3, targets=("kv_b_proj", "o_proj"))
    core = make_core(path, **code)
    driver = Driver(core)
    digest = call(core, LoadAdapter(str(served))).digest
    driver.add("a", prompt, max_new_tokens=NEW, namespace=Namespace(adapter=digest))
    driver.run()
    with pytest.raises(InvalidRequest, match=r"kv_b_proj, which no adapter may change"):
        call(core, LoadAdapter(str(refused)))
    assert driver.tokens["a"] == greedy(merged(model, served), prompt, NEW) != greedy(model, prompt, NEW)


def test_several_ranks_are_refused(path):
    with pytest.raises(ModelError, match="served by one rank"):
        split_spec(DecoderSpec.load(path), 2)
