"""Decode steps behind an image do nothing that would hold up a GPU, whatever its rows saw and wherever they stand."""

import pytest

from runtime.features.images.client import Images
from runtime.features.images.part import ImagesPart
from tests.runtime.execution.sim.engines import Engine
from tests.runtime.features.images.seeing import file_of, picture, save_seeing, sight_of
from tests.runtime.features.images.subject import at_once

STEPS = 4
# Heads that FlashInfer has kernels for.
HEADS = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "gemma3": {"head_dim": 64},
    "qwen3_vl": {"head_dim": 64, "rope_parameters": {"rope_type": "default", "mrope_section": [12, 10, 10]}},
}


@pytest.fixture(params=MODELS)
def model(request, default_model_dir, tmp_path):
    """A directory, the tokens of a prompt with an image, and what the engine gets of it."""
    more = {**HEADS, **MODELS[request.param]}
    path = save_seeing(tmp_path / request.param, default_model_dir, request.param, **more)
    images = Images(sight_of(path), "", "messages")
    tokens = images.encode(f"What is it? {images.add(file_of(picture(1, 100, 80)))} Tell me.", False)
    images.place(tokens)
    return path, tokens, images.asked


def test_steady_decode(model, device):
    path, tokens, asked = model
    engine = Engine(device, path)
    engine.core.part(ImagesPart)._threads.submit = at_once  # no other thread is simulated
    engine.send("sees", tokens, {"max_new_tokens": 60}, images=asked)
    engine.begin_decode([tokens[:9]])
    events = engine.watch_steps(STEPS)
    assert events.stalls == []
    assert engine.core.counters["overlapped_steps"] >= STEPS
    assert events.count("download") == STEPS, "the tokens, and nothing else"
