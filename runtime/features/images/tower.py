"""The vision tower of a model, computed by transformers' code."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from runtime.errors import ModelError
from runtime.features.images.rules import Rules, TowerCode, family_of
from runtime.kv.side_stream import SideStream
from runtime.models.config_json import architecture_of, read_json
from runtime.models.tensor_files import find_files, open_file


class Tower:
    """Computes the states with which an image's rows enter the decoder's first layer."""

    def __init__(self, directory: Path, rules: Rules, dtype: torch.dtype, device: torch.device, is_random: bool):
        """Load the tower. `is_random`: with random weights. Raises ModelError if a tensor is missing."""
        self._rules, self._dtype, self._device = rules, dtype, device
        self._side = SideStream(device)
        architecture = architecture_of(read_json(directory / "config.json"))
        self._code: TowerCode = family_of(architecture).TOWERS[architecture]
        code = self._code
        config = getattr(transformers, architecture).config_class.from_pretrained(directory, local_files_only=True)
        if getattr(config, "vision_feature_layer", -1) != -1:
            raise ModelError(f"the model takes layer {config.vision_feature_layer} of its tower; supported is the last")
        self._width = config.get_text_config().hidden_size * (1 + rules.added)
        module = importlib.import_module(f"transformers.models.{code.name}.modeling_{code.name}")
        tower = getattr(module, code.tower)._from_config if code.tower else transformers.AutoModel.from_config
        with torch.random.fork_rng([]):  # no device: weights are drawn on the host
            torch.manual_seed(0)
            self._tower: Any = tower(config.vision_config, attn_implementation="sdpa")
            self._connector: Any = getattr(module, code.connector)(config) if code.connector else nn.Module()
        self._line: Any = nn.Module()
        if code.newline:
            self._line.newline = nn.Parameter(torch.zeros(config.text_config.hidden_size))
        for part, prefix in zip((self._tower, self._connector, self._line), code.prefixes, strict=False):
            if prefix and not is_random:
                _fill(part, prefix, directory)
            for weight in part.parameters():  # and no buffers, which hold angles in float32
                weight.data = weight.data.to(dtype)
            part.to(device).eval().requires_grad_(False)

    @torch.inference_mode()
    def states(self, tile: bytes, size: tuple[int, ...]) -> torch.Tensor:
        """States [rows, hidden], on the CPU in the tower's type, of a uint8 tile [height, width, 3].

        Beside the state of each row are `Rules.added` further ones. On a GPU, steps do not wait for them. `size`: see
        `Rules.tiles`. Raises ModelError if the tower gives others.
        """
        with self._side.behind_steps():
            return self._states(tile, size)

    def _states(self, tile: bytes, size: tuple[int, ...]) -> torch.Tensor:
        given = torch.from_numpy(values_of(tile, size, self._rules)).to(self._device, self._dtype)
        if not self._code.connector:
            sizes = self._tower.config
            patches = patches_of(given[0], sizes.patch_size, sizes.spatial_merge_size, sizes.temporal_patch_size)
            grid = torch.tensor([[1, size[1] // sizes.patch_size, size[0] // sizes.patch_size]], device=self._device)
            seen = self._tower(patches, grid_thw=grid)
            states = torch.cat([seen.pooler_output, *getattr(seen, "deepstack_features", ())], 1)
        elif self._code.newline:
            states = self._crops(given[0], size)
        elif self._code.sized:
            heights = [size[::-1]]
            states = self._connector(self._tower(given, image_sizes=heights).last_hidden_state[0], heights)
        else:
            (states,) = self._connector(self._tower(given).last_hidden_state)
        if (*states.shape,) != (shape := (self._rules.rows(*size), self._width)):
            raise ModelError(f"the model's tower gives {(*states.shape,)} rows and numbers of a tile, not {shape}")
        return states.to("cpu", self._dtype)

    def _crops(self, image: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        """The states [rows, hidden] of one crop, or of a grid of crops without its padding."""
        rules: Any = self._rules
        edge = rules.longest
        crops = image.unflatten(2, (-1, edge)).unflatten(1, (-1, edge)).permute(1, 3, 0, 2, 4)  # [H, W, 3, edge, edge]
        seen = self._connector(self._tower(crops.flatten(0, 1), output_hidden_states=True).hidden_states[-1])
        if len(size) == 2:
            return seen[0]
        columns, lines = size[2:]
        each = edge // rules.row
        grid = seen.view(*crops.shape[:2], each, each, -1).permute(4, 0, 2, 1, 3).flatten(3, 4).flatten(1, 2)
        top, left = (grid.shape[1] - lines) // 2, (grid.shape[2] - columns) // 2
        grid = grid[:, top : top + lines, left : left + columns]  # [hidden, lines, columns]
        width, height = rules.shown(columns, lines)
        if (width, height) != (columns, lines):
            grid = nn.functional.interpolate(grid[None], (height, width), mode="bilinear")[0]
        ends = self._line.newline[:, None, None].expand(-1, height, 1)
        return torch.cat((grid, ends), 2).flatten(1).T


def values_of(tile: bytes, size: tuple[int, ...], rules: Rules) -> np.ndarray:
    """The values float32 [1, 3, height, width] of a uint8 tile [height, width, 3], as transformers has them."""
    pixels = np.frombuffer(tile, np.uint8).reshape(1, size[1], size[0], 3)
    values = (pixels.transpose(0, 3, 1, 2) * np.float64(rules.rescale)).astype(np.float32)
    mean, std = (np.array(each, np.float32)[:, None, None] for each in (rules.mean, rules.std))
    return (values - mean) / std


def patches_of(image: torch.Tensor, size: int, merge: int, times: int) -> torch.Tensor:
    """The patches [n, 3 x times x size x size] of an image [3, height, width], those of a row beside each other.

    `merge`: edge of a row in patches; `times`: number of equal images that a patch covers.
    """
    cut = image.unflatten(2, (-1, merge, size)).unflatten(1, (-1, merge, size))  # [3, H, merge, size, W, merge, size]
    patches = cut.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5).expand(-1, -1, -1, -1, -1, times, -1, -1)
    return patches.flatten(4).flatten(0, 3)


def _fill(module: nn.Module, prefix: str, directory: Path) -> None:
    """Fill a module with the tensors of a checkpoint that have a prefix. Raises ModelError."""
    found: dict[str, torch.Tensor] = {}
    for path in find_files(directory):
        with open_file(path) as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - no dict
            # Older files of Gemma 3 have one more name in between.
            found |= {name.removeprefix(prefix).removeprefix("vision_model."): file.get_tensor(name) for name in names}
    try:
        module.load_state_dict(found)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ModelError(f"the vision tower of {directory} cannot be loaded: {reason}") from None
