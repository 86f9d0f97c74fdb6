"""A part of a model: its first layers and tokens, small enough to be carried, with weights that were trained."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

_EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")


def cut_model(source: Path, target: Path, layers: int, vocabulary: int) -> None:
    """Write the first `layers` layers of a Llama-like model, and the first `vocabulary` tokens, in bfloat16."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {
        "num_hidden_layers": min(layers, config["num_hidden_layers"]),
        "vocab_size": min(vocabulary, config["vocab_size"]),
        "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": None, "torch_dtype": "bfloat16",
    }  # fmt: skip
    tensors: dict[str, Any] = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if _is_in(name, config["num_hidden_layers"]):
                    tensor = opened.get_tensor(name)
                    rows = config["vocab_size"] if name in _EMBEDDINGS else len(tensor)
                    tensors[name] = tensor[:rows].to(torch.bfloat16).contiguous()
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _is_in(name: str, layers: int) -> bool:
    parts = name.split(".")
    return parts[1] != "layers" or int(parts[2]) < layers
