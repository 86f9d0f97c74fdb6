"""Engines on the simulated device, and small models whose heads FlashInfer has kernels for."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.execution.sim.events import Events
from tests.runtime.execution.sim.tensors import Device
from tests.tiny import vary

VOCAB = 512
_BASE: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False},
}

MODELS: dict[str, PretrainedConfig] = {"llama": LlamaConfig(**_BASE, head_dim=64)}


def save(kind: str, directory: Path) -> Path:
    """Write a random model as a Hugging Face directory without a tokenizer."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(MODELS[kind])
    vary(model)
    model.save_pretrained(directory)
    return directory


def draw(seed: int, count: int) -> list[int]:
    """Random tokens."""
    return random.Random(seed).choices(range(3, VOCAB), k=count)


class Engine(Driver):
    """An engine core on the simulated device, in bfloat16, which FlashInfer needs."""

    def __init__(self, device: Device, path: Path, **options: Any):
        self.device = device
        super().__init__(make_core(path, **{"device": "cuda", "dtype": "bfloat16", "step_tokens": 128, **options}))

    def begin_decode(self, prompts: Sequence[Sequence[int]], **options: Any) -> None:
        """Add requests, and run until the graphs are captured and the memory that steps need is reserved."""
        for prompt in prompts:
            self.add(f"{len(self.tokens)}", prompt, **{"max_new_tokens": 60, **options})
        while not all(request.num_output for request in self.core.requests.values()):
            self.step()
        for _ in range(4):
            self.step()

    def watch_steps(self, steps: int) -> Events:
        """The events of some steps, in which no request ends."""
        running = len(self.core.requests)
        with self.device.watch() as events:
            for _ in range(steps):
                self.step()
        assert len(self.core.requests) == running
        return events
