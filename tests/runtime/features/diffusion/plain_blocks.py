"""Block diffusion as plain loops: every block from all before it and itself, computed anew at every step, in float32.

The bodies are transformers', but for LLaDA2's: plainly from its published configuration, every expert of every row.
"""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.runtime.features.diffusion.bicache.models import MASK

# Positions that attend to each other, positions that are denoised together, the shift, the threshold.
KINDS = {
    "sdar": (4, 4, 0, 0.85),
    "sdar_moe": (4, 4, 0, 0.85),
    "fast_dllm": (16, 8, 1, 0.9),
    "llada2": (8, 8, 0, 0.95),
}
# Transformers' code of the same body.
BODIES = {
    "sdar": (Qwen3Config, Qwen3ForCausalLM),
    "sdar_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "fast_dllm": (Qwen2Config, Qwen2ForCausalLM),
}
# Some steps decide several masks, and some but one.
SURE = 0.8


class PlainBlocks:
    """The published loops, without a cache."""

    def __init__(self, kind, path):
        self.attended, self.block, self.shift, _ = KINDS[kind]
        if kind == "llada2":
            self.forward = PlainLLaDA2(path).logits
            return
        config_type, model_type = BODIES[kind]
        config = json.loads((path / "config.json").read_text())
        config = config_type(**{k: v for k, v in config.items() if k not in ("architectures", "model_type")})
        model = model_type.from_pretrained(path, config=config, dtype=torch.float32, attn_implementation="eager")
        hidden = lambda seen: torch.where(seen, 0.0, -math.inf)[None, None]  # noqa: E731
        self.forward = lambda tokens, seen: model(torch.tensor([tokens]), attention_mask=hidden(seen)).logits[0]

    @torch.inference_mode()
    def probs(self, tokens):
        """Float64 [n, vocab], row i for token i as far as it is read within these tokens, and that of the next one."""
        block = torch.arange(len(tokens)) // self.attended
        logits = self.forward(tokens, block[:, None] >= block)
        logits[:, MASK] = -math.inf
        return logits.double().softmax(-1)

    def denoise(self, prompt, length, threshold=None, steps=None, block=None):
        block = block or self.block
        end = -(-(len(prompt) + length) // self.attended) * self.attended
        tokens = prompt + [MASK] * (end - len(prompt))
        undecided = [i >= len(prompt) for i in range(end)]
        for first in range(len(prompt) // self.attended * self.attended, end, self.attended):
            if self.shift and undecided[first]:
                tokens[first], undecided[first] = int(self.probs(tokens[:first])[-1].argmax()), False
            for start in range(first, first + self.attended, block):
                step = 0
                while any(undecided[start : start + block]):
                    masks = [i for i in range(start, start + block) if undecided[i]]
                    probs = self.probs(tokens[: first + self.attended])
                    best = {i: probs[i - self.shift].max(0) for i in masks}
                    masks.sort(key=lambda i: -best[i].values)
                    if threshold is None:
                        count = block // steps + (step < block % steps)
                    else:
                        count = max(sum(float(best[i].values) >= threshold for i in masks), 1)
                    for i in masks[:count]:
                        tokens[i], undecided[i] = int(best[i].indices), False
                    step += 1
        return tokens[len(prompt) : len(prompt) + length]

    def denoise_jointly(self, prompt, length, threshold, edit_threshold, most):
        """The tokens, and how often one was replaced."""
        end = -(-(len(prompt) + length) // self.attended) * self.attended
        tokens, num_edits = prompt + [MASK] * (end - len(prompt)), 0
        for first in range(len(prompt) // self.attended * self.attended, end, self.attended):
            block, post = range(max(first, len(prompt)), first + self.attended), 0
            while True:
                masks = [i for i in block if tokens[i] == MASK]
                post += not masks
                if post > most:
                    break
                found = self.probs(tokens[: block.stop]).max(-1)
                changed = [i for i in masks if found.values[i] >= threshold]
                if masks and not changed:
                    changed = [max(masks, key=lambda i: float(found.values[i]))]
                edits = [i for i in block if i not in masks and found.values[i] > edit_threshold]
                edits = [i for i in edits if found.indices[i] != tokens[i]]
                if not changed + edits:
                    break
                num_edits += len(edits)
                for i in changed + edits:
                    tokens[i] = int(found.indices[i])
        return tokens[len(prompt) : len(prompt) + length], num_edits


class PlainLLaDA2:
    """A checkpoint's logits of a whole sequence."""

    def __init__(self, directory: Path):
        self.config = json.loads((directory / "config.json").read_text())
        self.tensors = load_file(directory / "model.safetensors")

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.tensors[name]

    def mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up, down = (self.tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """[n, heads, dim]: the first part of each head by its position, half split; the rest stays."""
        turned = int(x.shape[-1] * self.config["partial_rotary_factor"])
        out = x.clone()
        for pair in range(turned // 2):
            angle = torch.arange(len(x)).double() * self.config["rope_theta"] ** (-2 * pair / turned)
            cosine, sine = angle.cos().float()[:, None], angle.sin().float()[:, None]
            a, b = x[..., pair], x[..., pair + turned // 2]
            out[..., pair], out[..., pair + turned // 2] = a * cosine - b * sine, b * cosine + a * sine
        return out

    def attention(self, x: torch.Tensor, name: str, seen: torch.Tensor) -> torch.Tensor:
        config = self.config
        heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        qkv = (x @ self.tensors[f"{name}.query_key_value.weight"].T).view(len(x), -1, dim)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        q = self.rotate(self.norm(q, f"{name}.query_layernorm.weight"))
        k = self.rotate(self.norm(k, f"{name}.key_layernorm.weight"))
        k, v = (each.repeat_interleave(heads // kv_heads, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ self.tensors[f"{name}.dense.weight"].T

    def weights(self, score: list[float], bias: list[float]) -> list[float]:
        """Of a row's experts. A bias takes part in the choice alone, first of groups, by their two best."""
        config, size = self.config, self.config["num_experts"] // self.config["n_group"]
        rank = [s + b for s, b in zip(score, bias, strict=True)]
        groups = [range(first, first + size) for first in range(0, len(rank), size)]
        groups.sort(key=lambda group: -sum(sorted((rank[i] for i in group), reverse=True)[:2]))
        open_to = [i for group in groups[: config["topk_group"]] for i in group]
        chosen = sorted(open_to, key=lambda i: -rank[i])[: config["num_experts_per_tok"]]
        total = sum(score[i] for i in chosen)
        return [config["routed_scaling_factor"] * s / total * (i in chosen) for i, s in enumerate(score)]

    def experts(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scores = torch.sigmoid(x @ self.tensors[f"{name}.gate.weight"].T).tolist()
        bias = self.tensors[f"{name}.gate.expert_bias"].tolist()
        weights = torch.tensor([self.weights(score, bias) for score in scores])
        found = torch.stack([self.mlp(x, f"{name}.experts.{i}") for i in range(len(bias))], dim=1)
        return self.mlp(x, f"{name}.shared_experts") + (weights[..., None] * found).sum(1)

    def logits(self, tokens: list[int], seen: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab]; `seen`: bool [n, n], whether a row sees a key."""
        x = self.tensors["model.word_embeddings.weight"][torch.tensor(tokens)]
        for i in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            x = x + self.attention(self.norm(x, f"{layer}.input_layernorm.weight"), f"{layer}.attention", seen)
            y = self.norm(x, f"{layer}.post_attention_layernorm.weight")
            if i < self.config["first_k_dense_replace"]:
                x = x + self.mlp(y, f"{layer}.mlp")
            else:
                x = x + self.experts(y, f"{layer}.mlp")
        return self.norm(x, "model.norm.weight") @ self.tensors["lm_head.weight"].T
