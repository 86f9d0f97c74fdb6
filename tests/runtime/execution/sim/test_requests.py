"""Steady decode of what requests may ask for, on the simulated device: no step waits or copies unasked."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from radix import Namespace
from runtime.calls import LoadAdapter
from runtime.features.grammars.part import Grammars
from tests.lora import save_lora
from tests.runtime.engine.driver import call
from tests.runtime.execution.sim.engines import Engine, draw, save

STEPS = 4
SAMPLINGS: dict[str, dict[str, Any]] = {
    "filters": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 3},
    "penalties": {"temperature": 0.8, "frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.1},
    "bias and log-probabilities": {"logit_bias": {5: 1.0}, "logprobs": 3},
    "allowed tokens": {"allowed_token_ids": list(range(5, 40)), "min_new_tokens": 30},
}


@pytest.fixture
def llama(saved):
    return saved("Llama")


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory, default_model_dir) -> Path:
    return save("Llama", tmp_path_factory.mktemp("tokenizer"), default_model_dir)


@pytest.fixture(scope="module")
def adapter(saved, tmp_path_factory) -> Path:
    return save_lora(tmp_path_factory.mktemp("lora"), AutoModelForCausalLM.from_pretrained(saved("Llama")), seed=1)


def prompts(shared: int = 0) -> list[list[int]]:
    return [[*draw(9, shared), *draw(i, 20 + i)] for i in range(4)]


def test_sampling(llama, device):
    engine = Engine(device, llama)
    for sampling in SAMPLINGS.values():
        engine.begin_decode(prompts()[:1], **sampling)
    events = engine.watch_steps(STEPS)
    assert events.stalls == []
    assert events.count("launch") == STEPS
    assert events.count("wait") == 3 * STEPS, "for a plan, for tokens, and for their log-probabilities, which came too"


def test_shared_pages_that_are_read_once(llama, device, monkeypatch):
    monkeypatch.setattr("runtime.execution.attention.flashinfer._MERGE_BYTES", 1)
    engine = Engine(device, llama)
    engine.begin_decode(prompts(shared=64))
    assert engine.watch_steps(STEPS).stalls == []


def test_drafts(llama, device):
    """A step with drafts is not launched ahead, and its tokens are read at once."""
    engine = Engine(device, llama, overlap="off", drafts="auto")
    for i in range(3):
        engine.ask(draw(i, 6) * 8, 40)
    engine.step()
    with device.watch() as events:
        engine.run()
    assert engine.core.counters["drafted_tokens"]
    assert events.of("sync", "pageable") == []


def test_a_step_with_a_grammar_is_launched_before_the_tokens_of_the_last_are_waited_for(with_tokenizer, device):
    """The next mask depends on the token, and is made while the device computes logits: no step waits twice."""
    engine = Engine(device, with_tokenizer)
    engine.begin_decode(prompts())
    for i, more in enumerate(({"regex": "[0-9]{50,60}"}, {"grammar": 'start: "xy"', "lazy": {"triggers": ["xy"]}})):
        engine.ask(draw(5 + i, 20), **more, frequency_penalty=0.1)
    for future in list(engine.core.part(Grammars).compiler.open.values()):
        future.result()
    while engine.requests["5"].num_output < 6:
        engine.step()
    ahead = engine.core.counters["overlapped_steps"]
    events = engine.watch_steps(STEPS)
    assert events.stalls == []
    order = [event.kind for event in events.of("launch", "wait")]
    assert order == ["wait", "launch", "wait"] * STEPS, "for a plan, and behind the launch for the tokens before"
    assert engine.core.counters["overlapped_steps"] == ahead + STEPS


def test_an_adapter_ends_the_graphs(llama, adapter, device):
    engine = Engine(device, llama)
    digest = call(engine.core, LoadAdapter(str(adapter))).digest
    engine.begin_decode(prompts()[:3])
    engine.begin_decode(prompts()[3:], namespace=Namespace(adapter=digest))
    events = engine.watch_steps(STEPS)
    assert events.stalls == []
    assert events.count("launch") == 0
