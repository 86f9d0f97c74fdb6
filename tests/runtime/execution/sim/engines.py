"""Engines on the simulated device, and small models whose heads FlashInfer has kernels for."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tests.runtime.features.diffusion.bicache.models as diffusion
from runtime.features.diffusion.ask import DiffusionParams
from runtime.params import SamplingParams
from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.execution.sim.events import Events
from tests.runtime.execution.sim.tensors import Device
from tests.tiny import WITH_TOKENIZER, vary

VOCAB = 300
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
}
_LATENT = {
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "kv_lora_rank": 24, "q_lora_rank": 20,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1, "head_dim": 8,
}  # fmt: skip
# By the prefix of transformers' classes, and of a kind after a dash.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"hidden_size": 256},  # it has no `head_dim`
    "Qwen3": {},
    "Qwen3Moe": {**_EXPERTS, "norm_topk_prob": True},
    "Mistral": {"sliding_window": 24},
    "Gemma3": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    "Gemma2": {"sliding_window": 24},  # in transformers' code, as all that Ramet's own does not compute
    "GptOss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "DeepseekV3": _LATENT,
    "Qwen3Next": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 24},
    "Qwen3_5": _DELTA,
    "Lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16},
}  # fmt: skip
DIFFUSION = ("llada", "dream", "sdar")


def save(kind: str, directory: Path, tokenizer_from: Path | None = None) -> Path:
    """Write a random model of a family as a Hugging Face directory; with a tokenizer, for all of its tokens."""
    torch.manual_seed(1)
    if kind in DIFFUSION:
        with pytest.MonkeyPatch.context() as patched:  # heads that FlashInfer has kernels for
            patched.setattr(diffusion, "HIDDEN", 256)
            patched.setattr(diffusion, "HEAD_DIM", 64)
            return diffusion.save_tiny(kind, directory / kind, layers=2)
    family = getattr(transformers, f"{kind}ForCausalLM")
    vocab = VOCAB if tokenizer_from is None else WITH_TOKENIZER
    given = _BASE | FAMILIES[kind] | {"vocab_size": vocab}
    model = family(family.config_class(**given))
    vary(model)
    model.save_pretrained(directory)
    for name in () if tokenizer_from is None else ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, directory / name)
    return directory


def draw(seed: int, count: int) -> list[int]:
    """Random tokens."""
    return random.Random(seed).choices(range(3, VOCAB), k=count)


class Engine(Driver):
    """An engine core on the simulated device, in bfloat16, which FlashInfer needs, with graphs of 8 rows only."""

    def __init__(self, simulated: Device, path: Path, **options: Any):
        self.device = simulated
        usual = {"device": "cuda", "dtype": "bfloat16", "step_tokens": 128, "cuda_graph_batches": "8"}
        options = usual | options
        super().__init__(make_core(path, **options))

    def ask(self, prompt: Sequence[int], count: int = 60, **options: Any) -> None:
        """Add a request of `count` tokens to a model of any kind."""
        rid = f"{len(self.tokens)}"
        if (info := self.core.info.decoding) is None:
            options = {"max_new_tokens": count} | options
            self.add(rid, prompt, **options)
            return
        fields = {name: options.pop(name) for name in DiffusionParams.model_fields.keys() & options.keys()}
        params = DiffusionParams(gen_length=count, **fields)
        options = {"temperature": 0} | options
        filled = params.filled(info, SamplingParams(**options))
        self.send(rid, prompt, {"max_new_tokens": count, **options}, decoding=filled)

    def begin_decode(self, prompts: Sequence[Sequence[int]], **options: Any) -> None:
        """Add requests, and run until the graphs are captured and the memory that steps need is reserved."""
        for prompt in prompts:
            self.ask(prompt, **options)
        while not all(request.num_output for request in self.core.requests.values()):
            self.step()
        for _ in range(4):
            self.step()

    def watch_steps(self, steps: int) -> Events:
        """The events of some steps, in which no request ends."""
        running, failed = len(self.core.requests), self.core.counters["failed_steps"]
        with self.device.watch() as events:
            for _ in range(steps):
                self.step()
        assert len(self.core.requests) == running
        assert self.core.counters["failed_steps"] == failed
        return events
