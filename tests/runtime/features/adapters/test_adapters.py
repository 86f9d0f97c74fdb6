"""Adapters by request: each gives what transformers gives with it merged, and shares KV with nobody else."""

import asyncio
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from radix import Namespace
from runtime.calls import GetState, LoadAdapter, UnloadAdapter
from runtime.errors import InvalidRequest, ModelError
from runtime.offline import Engine
from tests.lora import merged, save_lora
from tests.runtime.engine.driver import Driver, call, greedy, make_core
from tests.runtime.execution.transformers.architectures import save_small
from tests.runtime.features.diffusion.bicache.models import save_tiny as save_diffusion

NEW = 6
CODE = {
    "native": {},
    "torch": {"kernels": "torch"},
    "transformers": {"model_impl": "transformers"},
}


@pytest.fixture(scope="module")
def base(tiny_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """One of odd rank that changes every linear layer, and one of few."""
    directory = tmp_path_factory.mktemp("adapters")
    return [
        save_lora(directory / "every", base, seed=1, rank=5),
        save_lora(directory / "some", base, seed=2, rank=8, targets=("k_proj", "up_proj", "down_proj")),
    ]


@pytest.fixture(scope="module")
def prompts():
    draw = random.Random(5)
    root = [draw.randrange(3, 49152) for _ in range(40)]
    return [root[: 20 + i] + [draw.randrange(3, 49152) for _ in range(2 + i)] for i in range(4)]


@pytest.fixture(scope="module")
def expected(base, adapters, prompts):
    """Tokens of transformers for each prompt, of the base and of each adapter."""
    models = [base, *(merged(base, adapter) for adapter in adapters)]
    found = [[greedy(model, prompt, NEW) for prompt in prompts] for model in models]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert all(a != b for a, b in zip(found[one], found[other], strict=True)), "adapters change every answer"
    return found


def load(core, path) -> str:
    return call(core, LoadAdapter(str(path))).digest


def ask_all(driver, prompts, digests) -> list[list[list[int]]]:
    """Every prompt with every adapter, as one batch; the order of arrival is mixed."""
    first = len(driver.tokens)
    for i, prompt in enumerate(prompts):
        for a, digest in enumerate(digests):
            driver.add(f"{first} {a} {i}", prompt, max_new_tokens=NEW, namespace=Namespace(adapter=digest))
    driver.run()
    return [[driver.tokens[f"{first} {a} {i}"] for i in range(len(prompts))] for a in range(len(digests))]


@pytest.mark.parametrize("code", CODE)
@pytest.mark.parametrize("page_size", [1, 16])
def test_two_adapters_and_none_in_one_batch(tiny_dir, adapters, prompts, expected, code, page_size):
    driver = Driver(make_core(tiny_dir, page_size=page_size, chunk_tokens=7, **CODE[code]))
    digests = ["", *(load(driver.core, adapter) for adapter in adapters)]
    assert ask_all(driver, prompts, digests) == expected, "cold"
    cached = driver.core.state()["cached_tokens"]
    assert ask_all(driver, prompts, digests) == expected, "warm"
    state = driver.core.state()
    if page_size == 1:
        assert state["cached_tokens"] - cached == 3 * sum(len(prompt) - 1 for prompt in prompts)
    assert state.labelled["requests_by_adapter"] == dict.fromkeys(digests[1:], 2 * len(prompts))


def test_pages_of_others_are_never_read(tiny_dir, adapters, prompts, expected):
    """Neither by an adapter those of the base, nor those of another adapter, nor those of one that had its place."""
    driver = Driver(make_core(tiny_dir, page_size=1))
    core = driver.core
    assert ask_all(driver, prompts[:1], [""]) == [expected[0][:1]]
    first = load(core, adapters[0])
    assert ask_all(driver, prompts[:1], [first]) == [expected[1][:1]]
    assert core.state()["cached_tokens"] == 0
    assert call(core, UnloadAdapter(first)) == 0
    second = load(core, adapters[1])
    assert ask_all(driver, prompts[:1], [second]) == [expected[2][:1]]
    assert core.state()["cached_tokens"] == 0
    assert load(core, adapters[0]) == first, "the same content is the same adapter"
    assert ask_all(driver, prompts[:1], [first]) == [expected[1][:1]]
    assert core.state()["cached_tokens"] == len(prompts[0]) - 1, "and reads what it left in the tree"


def test_evicting_and_retracting(tiny_dir, adapters, prompts, expected):
    driver = Driver(make_core(tiny_dir, page_size=2, pool_tokens=96))
    digests = ["", *(load(driver.core, adapter) for adapter in adapters)]
    assert ask_all(driver, prompts, digests) == expected
    state = driver.core.state()
    assert state["evicted_tokens"] > 0
    assert state["retracted_requests"] > 0


def test_unloaded_while_requests_run(tiny_dir, adapters, prompts, expected):
    """They end with it; new ones are refused by name; a second adapter is not touched."""
    driver = Driver(make_core(tiny_dir))
    core, decoder = driver.core, driver.core.executor.decoder.model
    first, second = (load(core, adapter) for adapter in adapters)
    driver.add("runs", prompts[0], max_new_tokens=NEW, namespace=Namespace(adapter=first))
    driver.step()
    assert call(core, UnloadAdapter(first)) == 1
    assert first in decoder.adapters
    driver.run()
    assert driver.tokens["runs"] == expected[1][0]
    assert list(decoder.adapters) == [second]
    driver.add("late", prompts[0], namespace=Namespace(adapter=first))
    assert (driver.finish["late"].refused, driver.finish["late"].code) == (True, "model_not_found")
    assert call(core, GetState()).labelled["requests_by_adapter"] == {second: 0}
    assert call(core, UnloadAdapter("unknown")) == 0


def test_without_a_server(tiny_dir, adapters, prompts, expected):
    """Names as the server's, on a running loop too; one that is replaced serves the request that began with it."""
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    options = {"dtype": "float32", "pool_tokens": 2048, "threads": 1, "served_model_name": "tiny"}

    async def without_blocking() -> list[int]:
        engine.load_adapter("prose", str(adapters[1]))
        (output,) = await engine.agenerate(prompts[0], sampling, adapter="tiny:prose")
        return output.token_ids

    with Engine(str(tiny_dir), lora=f"poems={adapters[0]}", **options) as engine:
        assert [output.token_ids for output in engine.generate(prompts, sampling, adapter="poems")] == expected[1]
        assert asyncio.run(without_blocking()) == expected[2][0]
        assert engine.generate(prompts[0], sampling)[0].token_ids == expected[0][0]
        stream = engine.stream(prompts[1], sampling, adapter="tiny:poems")
        first = next(stream)
        with pytest.raises(InvalidRequest, match="is loaded already"):
            engine.load_adapter("poems", str(adapters[1]))
        engine.load_adapter("poems", str(adapters[1]), replace=True)
        assert engine.generate(prompts[1], sampling, adapter="poems")[0].token_ids == expected[2][1]
        *_, last = [first, *stream]
        assert last.token_ids == expected[1][1]
        engine.unload_adapter("prose")
        for ask in (engine.unload_adapter, lambda name: engine.generate(prompts[0], sampling, adapter=name)):
            with pytest.raises(InvalidRequest, match="there is no adapter 'prose'"):
                ask("prose")
        with pytest.raises(InvalidRequest, match="did you mean 'poems'"):
            engine.stream(prompts[0], sampling, adapter="poem")
    with pytest.raises(ModelError, match=r"--lora gone=.*has no adapter_model\.safetensors"):
        Engine(str(tiny_dir), lora=f"gone={adapters[0].parent}", **options)


def test_loaded_again_while_it_leaves(tiny_dir, adapters, prompts, expected):
    driver = Driver(make_core(tiny_dir))
    digest = load(driver.core, adapters[0])
    driver.add("runs", prompts[0], max_new_tokens=NEW, namespace=Namespace(adapter=digest))
    driver.step()
    driver.core.handle(UnloadAdapter(digest))
    assert load(driver.core, adapters[0]) == digest
    driver.run()
    assert ask_all(driver, prompts[:1], [digest]) == [expected[1][:1]]


@pytest.mark.parametrize("code", CODE)
def test_one_that_does_not_fit_changes_nothing(tiny_dir, base, adapters, prompts, expected, code, tmp_path):
    driver = Driver(make_core(tiny_dir, **CODE[code]))
    digest = load(driver.core, adapters[0])
    wrong = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"embed": torch.nn.Linear(4, 4)})})
    other = save_lora(tmp_path / "other", wrong, seed=1, targets=("embed",))
    with pytest.raises(InvalidRequest, match=r"model\.embed.*no linear layer|no linear layer.*model\.embed"):
        load(driver.core, other)
    head = save_lora(tmp_path / "head", base, seed=1, targets=("lm_head",))
    with pytest.raises(InvalidRequest, match="lm_head"):
        load(driver.core, head)
    narrow = torch.nn.ModuleDict(
        {"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({"0": torch.nn.ModuleDict({})})})}
    )
    narrow["model"]["layers"]["0"]["mlp"] = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(4, 80)})
    path = save_lora(tmp_path / "narrow", narrow, seed=1)
    with pytest.raises(InvalidRequest, match=r"shape \[80, 4\]; the model's is \[80, 48\]"):
        load(driver.core, path)
    with pytest.raises(InvalidRequest, match="no adapter_model"):
        load(driver.core, tmp_path)
    assert ask_all(driver, prompts[:1], ["", digest]) == [expected[0][:1], expected[1][:1]]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory: you tried to allocate 9 bytes")])
def test_one_that_memory_has_no_room_for_is_refused(tiny_dir, adapters, prompts, expected, error, monkeypatch):
    driver = Driver(make_core(tiny_dir))

    def float_(tensor):
        raise error

    monkeypatch.setattr(torch.Tensor, "float", float_)
    with pytest.raises(InvalidRequest, match="does not fit into memory"):
        load(driver.core, adapters[0])
    monkeypatch.undo()
    digest = load(driver.core, adapters[0])
    assert ask_all(driver, prompts[:1], [digest]) == [expected[1][:1]]


def test_models_that_take_none(tiny_dir, adapters, tmp_path, default_model_dir):
    denoiser = make_core(save_diffusion("llada", tmp_path, tokenizer_from=default_model_dir))
    with pytest.raises(InvalidRequest, match="not served with a bidirectional model"):
        load(denoiser, adapters[0])


@pytest.mark.parametrize(
    ("architecture", "code"),
    [
        *(("Gemma3", code) for code in CODE),
        *(("GptOss", code) for code in CODE),
        ("Qwen3Moe", "native"),
        ("Qwen3Moe", "torch"),
        ("Phi3", "transformers"),
    ],
)
def test_other_architectures(architecture, code, prompts, tmp_path):
    """Norms behind products, windows, experts, fused projections and sinks."""
    path = save_small(architecture, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    targets = ("q_proj", "o_proj", "qkv_proj", "gate_proj", "gate_up_proj", "down_proj")
    adapter = save_lora(tmp_path / "adapter", model, seed=3, targets=targets)
    driver = Driver(make_core(path, **CODE[code]))
    asked = [[token % 100 + 7 for token in prompt] for prompt in prompts[:2]]
    found = ask_all(driver, asked, ["", load(driver.core, adapter)])
    assert found == [[greedy(one, prompt, NEW) for prompt in asked] for one in (model, merged(model, adapter))]
    assert found[0] != found[1]
