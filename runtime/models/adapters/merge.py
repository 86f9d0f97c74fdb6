"""Base checkpoint + low-rank adapter -> the checkpoint of a diffusion model, in the cache beside the default model."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from runtime.errors import ModelError
from runtime.models.default_model import fetch_default
from runtime.models.publishing import publish
from runtime.models.spec import ModelSpec, read_json

if TYPE_CHECKING:
    from torch import Tensor

# `<empty_output>`: reserved in SmolLM2's vocabulary, and in no text.
MASK_TOKEN_ID = 16
MASK_EMBEDDING = "mask_embedding"

# A table of this name in a model's directory belongs to the model; BiCache reads it.
DEPTH_TABLE_FILE = "depth_table.json"

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def build_adapted(name: str, cache_dir: Path) -> Path:
    """The directory of an adapted default model below `cache_dir`; merged the first time.

    Raises:
        ModelError: if the default model cannot be had, the adapter does not fit it, or the disk is full.
    """
    adapter = Path(__file__).with_name(f"{name}.safetensors")
    return merge_adapter(fetch_default(cache_dir), adapter, cache_dir / "models", name)


def merge_adapter(base: Path, adapter: Path, models: Path, name: str) -> Path:
    """`models`/`name`-(digest of the adapter's files), which appears only when it is whole.

    Args:
        base: directory of the causal model that the adapter was trained on.
        adapter: safetensors file with `TENSOR.lora_A.weight` [rank, in] and `TENSOR.lora_B.weight` [out, rank] for
            weights of the base, `mask_embedding` [hidden], and rank and alpha as metadata. A depth table of its own
            may lie beside ADAPTER.safetensors, as ADAPTER.depth_table.json.
        models: where merged models lie.
        name: how the directory's name begins.

    Raises:
        ModelError: as `build_adapted`.
    """
    table = adapter.with_suffix(f".{DEPTH_TABLE_FILE}")
    tables = [table] if table.exists() else []
    target = models / f"{name}-{_digest([adapter, *tables])}"
    if (target / "config.json").exists():
        return target
    # Here, as who only asks for the names does without torch.
    import torch
    from safetensors.torch import save_file

    from runtime.models.weights import load_weights

    print(f"merging {adapter.name} with {base.name} into {target} (once)", file=sys.stderr, flush=True)
    weights = load_weights(base, ModelSpec.load(base), torch.float32)
    _add_adapter(weights, adapter)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=models) as directory:
            work = Path(directory) / "model"
            work.mkdir()
            save_file(weights, work / "model.safetensors", {"format": "pt"})
            (work / "config.json").write_text(json.dumps(diffusion_config(read_json(base / "config.json")), indent=2))
            for file_name in _TOKENIZER_FILES:
                shutil.copyfile(base / file_name, work / file_name)
            for table in tables:
                shutil.copyfile(table, work / DEPTH_TABLE_FILE)
            publish(work, target)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write {target}: {getattr(error, 'strerror', None) or error}") from None
    return target


def diffusion_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a causal Llama, as that of the masked diffusion model made of it."""
    own = {"architectures": ["LlamaDiffusionModel"], "model_type": "llama_diffusion"}
    return config | own | {"mask_token_id": MASK_TOKEN_ID, "logits_shift": 1}


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _add_adapter(weights: dict[str, Tensor], path: Path) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            scale = float(about["alpha"]) / float(about["rank"])
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                if name.endswith(".lora_A.weight"):
                    module = name.removesuffix(".lora_A.weight")
                    a, b = file.get_tensor(name), file.get_tensor(f"{module}.lora_B.weight")
                    weights[f"{module}.weight"] += scale * (b.float() @ a.float())
            weights["model.embed_tokens.weight"][MASK_TOKEN_ID] = file.get_tensor(MASK_EMBEDDING).float()
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise ModelError(f"{path} is not an adapter of this model: {error}") from None
