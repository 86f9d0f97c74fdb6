"""A small random DiffusionGemma, and what transformers' own `generate` makes of a prompt."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from tests.tiny import vary

VOCAB, CANVAS, WINDOW, EOS = 320, 12, 9, 2
# Sliding and full layers with their own head sizes and key-value heads, and experts beside the MLP.
_TEXT: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "global_head_dim": 16, "num_global_key_value_heads": 1},
    **{"max_position_embeddings": 256, "sliding_window": WINDOW, "num_experts": 4, "top_k_experts": 2},
    **{"layer_types": ["sliding_attention", "full_attention", "full_attention"], "moe_intermediate_size": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS},
}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}


def save_gemma(directory: Path, generation: dict[str, Any] | None = None, tokenizer_from: Path | None = None) -> Path:
    """Write a model as a Hugging Face directory; with a tokenizer, for all of its tokens.

    `generation`: its generation_config.json.
    """
    torch.manual_seed(1)
    config = DiffusionGemmaConfig(
        text_config={**_TEXT, "vocab_size": VOCAB if tokenizer_from is None else 49152},
        vision_config={**_VISION, "num_key_value_heads": 2, "position_embedding_size": 16},
        canvas_length=CANVAS,
    )
    model = DiffusionGemmaForBlockDiffusion(config)
    vary(model)
    with torch.no_grad():
        # Wide enough that some of a step's distributions are sharp, and some are not.
        model.model.decoder.embed_tokens.weight.mul_(24)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps(generation or {}))
    for name in ("tokenizer.json", "tokenizer_config.json") if tokenizer_from is not None else ():
        shutil.copy(tokenizer_from / name, directory / name)
    return directory


class Published:
    """transformers' code of a model."""

    def __init__(self, path: Path):
        self.model = DiffusionGemmaForBlockDiffusion.from_pretrained(
            path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._found: dict[str, list[int]] = {}

    def generate(self, prompt: Sequence[int], length: int, seed: int, **options: Any) -> list[int]:
        """The answer as `generate` draws it after `torch.manual_seed`, up to and with an end of sequence."""
        key = repr((prompt, length, seed, options))
        if key not in self._found:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                found = self.model.generate(torch.tensor([list(prompt)]), max_new_tokens=length, **options)
            self._found[key] = found.sequences[0, len(prompt) :].tolist()[:length]
        answer = self._found[key]
        ends = options.get("eos_token_id")
        return answer[: answer.index(ends) + 1] if ends in answer else answer
