"""Merges a causal checkpoint and a low-rank adapter into the checkpoint of a diffusion model."""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from runtime.errors import ModelError
from runtime.models.config_json import read_json
from runtime.models.default_model import fetch_default
from runtime.models.publishing import FORMAT, provide
from runtime.models.spec import DecoderSpec

if TYPE_CHECKING:
    from torch import Tensor

# `<empty_output>`: a token that SmolLM2's vocabulary reserves, and that text never contains.
MASK_TOKEN_ID = 16
MASK_EMBEDDING = "mask_embedding"
_SUFFIX, _SCALE = ".safetensors.xz", ".lora_scale"

# The depth table in a model's directory, which BiCache reads.
DEPTH_TABLE_FILE = "depth_table.json"

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def build_adapted(name: str, cache_dir: Path) -> Path:
    """The directory in `cache_dir` of the default model with the adapter `name`. The first call merges them.

    Raises:
        ModelError: if the default model cannot be fetched, the adapter does not fit it, or the disk is full.
    """
    adapter = Path(__file__).with_name(f"{name}{_SUFFIX}")
    return merge_adapter(fetch_default(cache_dir), adapter, cache_dir / "models", name)


def merge_adapter(base: Path, adapter: Path, models: Path, name: str) -> Path:
    """The directory `models`/`name`-DIGEST-FORMAT with the merged model. The first call merges it.

    Args:
        base: directory of the causal model that the adapter was trained on.
        adapter: ADAPTER.safetensors.xz with `TENSOR.lora_A.weight` [rank, in], `TENSOR.lora_B.weight` [out, rank] and
            `TENSOR.lora_scale` [rank] for weights of the base, which become W + B diag(scale) A, and `mask_embedding`
            [hidden]. A and B may be integers. Its optional depth table is ADAPTER.depth_table.json in the same
            directory.
        models: directory of merged models.
        name: prefix of the directory's name.

    Raises:
        ModelError: see `build_adapted`.
    """
    table = adapter.with_name(f"{adapter.name.removesuffix(_SUFFIX)}.{DEPTH_TABLE_FILE}")
    tables = [table] if table.exists() else []
    target = models / f"{name}-{_digest([adapter, *tables])}-{FORMAT}"

    def make(work: Path) -> None:
        # Imported here, because the server process imports this module without torch.
        import torch
        from safetensors.torch import save_file

        from runtime.models.weights import load_weights

        print(f"merging {adapter.name} with {base.name} into {target} (once)", file=sys.stderr, flush=True)
        weights = load_weights(base, DecoderSpec.load(base), torch.float32)
        _add_adapter(weights, adapter)
        try:
            save_file(weights, work / "model.safetensors", {"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from None
        (work / "config.json").write_text(json.dumps(diffusion_config(read_json(base / "config.json")), indent=2))
        for file_name in _TOKENIZER_FILES:
            shutil.copyfile(base / file_name, work / file_name)
        for table in tables:
            shutil.copyfile(table, work / DEPTH_TABLE_FILE)

    return provide(target, make)


def diffusion_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the masked diffusion model, from that of the causal Llama model."""
    own = {"architectures": ["LlamaDiffusionModel"], "model_type": "llama_diffusion"}
    return config | own | {"mask_token_id": MASK_TOKEN_ID, "logits_shift": 1}


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _add_adapter(weights: dict[str, Tensor], path: Path) -> None:
    import safetensors.torch

    from runtime.models.adapters.lora import low_rank_pairs

    try:
        tensors = safetensors.torch.load(lzma.decompress(path.read_bytes()))
        weights["model.embed_tokens.weight"][MASK_TOKEN_ID] = tensors.pop(MASK_EMBEDDING).float()
        scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith(_SCALE)}
        for module, a, b in low_rank_pairs({name: tensor.float() for name, tensor in tensors.items()}, path):
            weights[f"{module}.weight"] += b * scales[f"{module}{_SCALE}"] @ a
    except (SafetensorError, lzma.LZMAError, EOFError, KeyError, RuntimeError) as error:
        raise ModelError(f"{path} is not an adapter of this model: {error}") from None
