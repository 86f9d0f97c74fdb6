"""The vision tower of a model, computed by transformers' code."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import nn

from runtime.errors import ModelError
from runtime.features.images.rules import Rules
from runtime.models.config_json import architecture_of, read_json
from runtime.models.tensor_files import find_files

# By architecture: the modules of transformers, the class of the tower, and that of what follows it.
_CLASSES = {
    "Idefics3ForConditionalGeneration": ("idefics3", "Idefics3VisionTransformer", "Idefics3Connector"),
    "SmolVLMForConditionalGeneration": ("smolvlm", "SmolVLMVisionTransformer", "SmolVLMConnector"),
}
# Prefixes of their tensors.
_TOWER, _CONNECTOR = "model.vision_model.", "model.connector."


class Tower:
    """Computes the states with which an image's rows enter the decoder's first layer."""

    def __init__(self, directory: Path, rules: Rules, dtype: torch.dtype, device: torch.device, is_random: bool):
        """Load the tower. `is_random`: with random weights. Raises ModelError if a tensor is missing."""
        self._rules, self._dtype, self._device = rules, dtype, device
        name, tower, connector = _CLASSES[architecture_of(read_json(directory / "config.json"))]
        base = f"transformers.models.{name}"
        code = importlib.import_module(f"{base}.modeling_{name}")
        kind = getattr(importlib.import_module(f"{base}.configuration_{name}"), tower.split("Vision")[0] + "Config")
        config = kind.from_pretrained(directory, local_files_only=True)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self._tower = getattr(code, tower)._from_config(config.vision_config, attn_implementation="sdpa")
            self._connector: nn.Module = getattr(code, connector)(config)
        if not is_random:
            _fill(self._tower, _TOWER, directory)
            _fill(self._connector, _CONNECTOR, directory)
        for module in (self._tower, self._connector):
            module.to(device, dtype).eval().requires_grad_(False)

    @torch.inference_mode()
    def states(self, tiles: list[bytes]) -> torch.Tensor:
        """States float32 [tiles, rows, hidden], on the CPU, of uint8 tiles [edge, edge, 3]."""
        given = torch.from_numpy(values_of(tiles, self._rules)).to(self._device, self._dtype)
        states = self._connector(self._tower(pixel_values=given).last_hidden_state)
        if states.shape[1] != self._rules.rows:
            raise ModelError(f"the model's tower gives {states.shape[1]} rows of a tile, not {self._rules.rows}")
        return states.float().cpu()


def values_of(tiles: list[bytes], rules: Rules) -> np.ndarray:
    """The values float32 [tiles, 3, edge, edge] of uint8 tiles [edge, edge, 3], to the bit as transformers has them."""
    pixels = np.stack([np.frombuffer(tile, np.uint8).reshape(rules.tile, rules.tile, 3) for tile in tiles])
    values = (pixels.transpose(0, 3, 1, 2) * np.float64(rules.rescale)).astype(np.float32)
    mean, std = (np.array(each, np.float32)[:, None, None] for each in (rules.mean, rules.std))
    return (values - mean) / std


def _fill(module: nn.Module, prefix: str, directory: Path) -> None:
    """Fill a module with the tensors of a checkpoint that have a prefix. Raises ModelError."""
    found: dict[str, torch.Tensor] = {}
    for path in find_files(directory):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - no dict
            found |= {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    try:
        module.load_state_dict(found)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ModelError(f"the vision tower of {directory} cannot be loaded: {reason}") from None
