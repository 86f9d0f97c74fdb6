"""`python -m loadgen.experiments.gpu.shapes DIRECTORY [MODEL]`: models of known shapes, for `random_weights`.

Only a configuration and a tokenizer are written: that of the directory MODEL, or of the default model.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from runtime.config import make_config
from runtime.models.resolve import resolve_model

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "eos_token_id": 2}
_LLADA = {
    "architectures": ["LLaDAModelLM"], "model_type": "llada", "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    "weight_tying": False, "mask_token_id": 126336, "eos_token_id": 126081, "vocab_size": 126464,
    "embedding_size": 126464, "mlp_ratio": 4,
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0,
    },
    "llama-tiny": _LLAMA | {
        "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": 8192,
    },
    "llada-8b": _LLADA | {
        "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288,
        "max_sequence_length": 4096,
    },
    "llada-tiny": _LLADA | {
        "d_model": 64, "n_layers": 4, "n_heads": 2, "n_kv_heads": 2, "mlp_hidden_size": 96,
        "max_sequence_length": 4096, "vocab_size": 300, "embedding_size": 300, "mask_token_id": 299,
        "eos_token_id": 298,
    },
}  # fmt: skip


def write_shape(name: str, directory: Path) -> Path:
    """Write a model directory without weights, for `--random-weights`."""
    path = directory / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[name]), encoding="utf-8")
    return path


def write_shapes(directory: Path, tokenizer: Path | None = None) -> None:
    """Write all shapes with the tokenizer of a model's directory, or of the default model. Raises ModelError."""
    source = resolve_model(make_config().model) if tokenizer is None else tokenizer
    for name in SHAPES:
        path = write_shape(name, directory)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(source / file, path / file)


if __name__ == "__main__":
    write_shapes(*map(Path, sys.argv[1:3]))
