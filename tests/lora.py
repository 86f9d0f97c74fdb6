"""Random low-rank adapters in PEFT's files, and models with these merged into their weights."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_lora(
    directory: Path, model: nn.Module, seed: int, rank: int = 4, targets: tuple[str, ...] = EVERY, **config: Any
) -> Path:
    """Write an adapter that changes the target modules of a model as much as their own weights do."""
    directory.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets:
            out, inner = module.weight.shape
            size = float(module.weight.detach().std()) / 2
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inner, generator=draw) * size
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, rank, generator=draw) / rank**0.5
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(targets), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(fields | config))
    return directory


@torch.no_grad()
def merged(model: nn.Module, adapter: Path) -> nn.Module:
    """A copy of a model with W + scale B A in place of W."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    tensors, model = load_file(adapter / "adapter_model.safetensors"), copy.deepcopy(model)
    for name in [name for name in tensors if "lora_A" in name]:
        module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        module.weight += scale * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
    return model
