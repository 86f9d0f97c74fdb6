"""The models and their samplers written once more, plainly: float32, one sequence, no cache, nothing of runtime."""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

_ROUNDED = 2**-21  # eight steps of float32 below 1: a softmax rounds several times


class PlainModel:
    """A diffusion model straight from its checkpoint."""

    def __init__(self, directory: Path):
        config = json.loads((directory / "config.json").read_text())
        self.tensors = load_file(directory / "model.safetensors")
        self.is_llada = config["model_type"] == "llada"
        self.layers = config["n_layers" if self.is_llada else "num_hidden_layers"]
        self.heads = config["n_heads" if self.is_llada else "num_attention_heads"]
        self.kv_heads = config["n_kv_heads" if self.is_llada else "num_key_value_heads"]
        self.theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        self.eps, self.mask = config["rms_norm_eps"], config["mask_token_id"]
        self.shift = 0 if self.is_llada else 1

    def layer(self, i: int) -> dict[str, torch.Tensor]:
        """The tensors of a layer by the names of Dream's."""
        ours = {
            "attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm", "q_proj": "self_attn.q_proj",
            "k_proj": "self_attn.k_proj", "v_proj": "self_attn.v_proj", "attn_out": "self_attn.o_proj",
            "ff_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj", "ff_out": "mlp.down_proj",
        }  # fmt: skip
        prefix = f"model.transformer.blocks.{i}." if self.is_llada else f"model.layers.{i}."
        found = {}
        for name, tensor in self.tensors.items():
            if name.startswith(prefix):
                module, _, kind = name.removeprefix(prefix).rpartition(".")
                found[f"{ours[module] if self.is_llada else module}.{kind}"] = tensor
        return found

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight

    def rotate(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """[n, heads, dim] at positions from `first` on, half split."""
        n, _, dim = x.shape
        frequency = self.theta ** (-torch.arange(0, dim, 2).float() / dim)
        angle = torch.arange(first, first + n).float()[:, None, None] * frequency
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)

    def embed(self, tokens: list[int]) -> torch.Tensor:
        name = "model.transformer.wte.weight" if self.is_llada else "model.embed_tokens.weight"
        return self.tensors[name][torch.tensor(tokens)]

    def run_layer(
        self,
        i: int,
        x: torch.Tensor,
        first: int = 0,
        kept: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Layer i over rows x [n, width] at positions from `first` on; new states, and K and V.

        `kept` are K and V of all positions, of which those of x are overwritten; without, x sees x.
        """
        w = self.layer(i)
        h = self.norm(x, w["input_layernorm.weight"])
        q, k, v = (
            F.linear(h, w[f"self_attn.{n}_proj.weight"], w.get(f"self_attn.{n}_proj.bias")).view(len(x), m, -1)
            for n, m in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        q, k = self.rotate(q, first), self.rotate(k, first)
        if kept is not None:
            for old, new in zip(kept, (k, v), strict=True):
                old[first : first + len(x)] = new
            k, v = kept
        own = k, v
        each = self.heads // self.kv_heads
        k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
        weight = torch.einsum("qhd,khd->hqk", q, k).div(math.sqrt(q.shape[-1])).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", weight, v).flatten(1) @ w["self_attn.o_proj.weight"].T
        h = self.norm(x, w["post_attention_layernorm.weight"])
        inner = F.silu(h @ w["mlp.gate_proj.weight"].T) * (h @ w["mlp.up_proj.weight"].T)
        return x + inner @ w["mlp.down_proj.weight"].T, own

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the last states."""
        norm = self.tensors["model.transformer.ln_f.weight" if self.is_llada else "model.norm.weight"]
        head = self.tensors.get("model.transformer.ff_out.weight" if self.is_llada else "lm_head.weight")
        return self.norm(x, norm) @ (self.tensors["model.embed_tokens.weight"] if head is None else head).T

    def hidden(self, tokens: list[int]) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """States [n, width] before each layer and after the last, and K and V [n, kv_heads, dim] of each layer."""
        states, seen = [self.embed(tokens)], []
        for i in range(self.layers):
            x, kv = self.run_layer(i, states[-1])
            states.append(x)
            seen.append(kv)
        return states, seen

    def shifted(self, rows: torch.Tensor) -> torch.Tensor:
        """Float32 [n, vocab]: row i belongs to token i, wherever it is read; the mask cannot be said."""
        if self.shift:
            rows = torch.cat((rows[:1], rows[:-1]))
        rows[:, self.mask] = -math.inf
        return rows

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Float32 [n, vocab], all from the whole input."""
        return self.shifted(self.read(self.hidden(tokens)[0][-1]))


class PlainBiCache:
    """A model whose leading `prefix` rows are treated as in section 5.2, in the order in which it is asked.

    Layers 1 to `depth` use the K and V of the prefix alone; the others get new ones at every `interval`-th call. With a
    cache of Fast-dLLM, `block` says which block is denoised: its first call computes all rows, the others those of the
    block, and of what follows it with `prefix`; the prefix gets new K and V at beginnings of blocks alone.
    """

    def __init__(self, plain: PlainModel, prefix: int, depth: int, interval: int, cache: str = "none"):
        self.plain, self.prefix, self.depth, self.interval, self.cache = plain, prefix, depth, interval, cache
        self.mask, self.calls, self.refreshed_at = plain.mask, 0, -1
        self.block, self.last_block = (0, 0), (-1, -1)
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.alone: Any = None

    def logits(self, tokens: list[int]) -> torch.Tensor:
        plain, n = self.plain, self.prefix
        begins, self.last_block = self.block != self.last_block, self.block
        if self.cache == "none":
            due = self.calls % self.interval == 0
        else:
            due = begins and (self.refreshed_at < 0 or self.calls - self.refreshed_at >= self.interval)
        if due:
            self.refresh(tokens)
            self.refreshed_at = self.calls
            out = self.last
        else:
            start, stop = n, len(tokens)
            if self.cache != "none" and not begins:
                start = max(self.block[0] - plain.shift, n)
                stop = self.block[1] if self.cache == "dual" else stop
            x = plain.embed(tokens[start:stop])
            for i in range(plain.layers):
                x, _ = plain.run_layer(i, x, start, self.kept[i])
            out = torch.zeros(len(tokens), x.shape[1])
            out[start:stop] = x
        self.calls += 1
        return plain.shifted(plain.read(out))

    def refresh(self, tokens: list[int]) -> None:
        plain, n = self.plain, self.prefix
        self.alone = self.alone or (plain.hidden(tokens[:n])[0] if n else [])
        self.last, self.kept = plain.embed(tokens), []
        for i in range(plain.layers):
            if n and i < self.depth:
                self.last = torch.cat((self.alone[i], self.last[n:]))
            self.last, kv = plain.run_layer(i, self.last)
            self.kept.append(kv)


def naive(plain: PlainModel, prefix: int) -> PlainBiCache:
    """Reuse in all layers, as a causal model's prefix cache would do it."""
    return PlainBiCache(plain, prefix, plain.layers, 1)


def guided(model: PlainModel | PlainBiCache, x: list[int], prompt_len: int, cfg_scale: float) -> torch.Tensor:
    """Logits of a canvas, float32 [n, vocab], with LLaDA's guidance away from those without its prompt; 0: none."""
    logits = model.logits(x)
    if not cfg_scale:
        return logits
    plain = model.plain if isinstance(model, PlainBiCache) else model
    alone = plain.logits([model.mask] * prompt_len + x[prompt_len:])
    logits = alone + (cfg_scale + 1) * (logits - alone)
    logits[:, model.mask] = -math.inf
    return logits


def llada(
    model: PlainModel | PlainBiCache,
    prompt: list[int],
    gen_length: int,
    steps: int,
    block_length: int,
    threshold: float = 2,
    cfg_scale: float = 0,
) -> list[int]:
    """Low-confidence remasking at temperature 0, as LLaDA publishes it; with Fast-dLLM's parallel decoding below 1."""
    x = prompt + [model.mask] * gen_length
    blocks = gen_length // block_length
    each = steps // blocks
    for block in range(blocks):
        start, end = len(prompt) + block * block_length, len(prompt) + (block + 1) * block_length
        masks = x[start:end].count(model.mask)
        if isinstance(model, PlainBiCache):
            model.block = (start, end)
        for step in range(each):
            if model.mask not in x[start:end]:
                break
            count = masks // each + (step < masks % each)
            logits = guided(model, x, len(prompt), cfg_scale)
            confidence, x0 = logits.softmax(-1).max(-1)
            allowed = torch.tensor([i < end and x[i] == model.mask for i in range(len(x))])
            confidence[~allowed] = -math.inf
            if threshold < 1:
                count = max(int((confidence >= threshold).sum()), 1)
            for i in confidence.topk(count).indices.tolist():
                x[i] = int(x0[i])
    return x[len(prompt) :]


def check_steps(
    model: PlainModel, prompt: list[int], canvases: list[list[int]], close: float, cfg_scale: float = 0
) -> None:
    """Each step decided one mask, and the one that `llada` decides, as far as float32 can tell.

    A confidence near 1 is rounded to 1, so several masks are equally confident, and any of them may be decided.

    Args:
        canvases: the output after each step.
        close: how far logits in float32 may be apart.
    """
    before = [model.mask] * len(canvases[0])
    for step, canvas in enumerate(canvases):
        changed = [i for i, (old, new) in enumerate(zip(before, canvas, strict=True)) if old != new]
        assert [before[i] for i in changed] == [model.mask], (step, changed)
        (at,), masks = changed, [i for i, token in enumerate(before) if token == model.mask]
        logits = guided(model, prompt + before, len(prompt), cfg_scale)[len(prompt) :].double()
        behind = logits[at].max() - logits[at, canvas[at]]
        assert behind < close, (step, at, behind)
        sure = logits.softmax(-1).amax(-1)
        off = close * sure * (1 - sure) + _ROUNDED  # the slope of a confidence over its logit, and float32
        assert (sure + off)[at] >= (sure - off)[masks].max(), (step, at, sure[at], sure[masks].max())
        before = canvas


def dream(
    model: PlainModel | PlainBiCache, prompt: list[int], gen_length: int, steps: int, algorithm: str, eps: float
) -> list[int]:
    """Dream's sampler at temperature 0 and without alg_temp, as published."""
    x = prompt + [model.mask] * gen_length
    times = torch.linspace(1, eps, steps + 1)
    for step in range(steps):
        masks = [i for i, token in enumerate(x) if token == model.mask]
        probs = model.logits(x)[masks].softmax(-1)
        confidence, x0 = probs.max(-1)
        if algorithm == "topk_margin":
            top = probs.sort(descending=True).values
            confidence = top[:, 0] - top[:, 1]
        elif algorithm == "entropy":
            confidence = (probs * (probs + 1e-10).log()).sum(-1)
        share = 1 - times[step + 1] / times[step]
        count = int(len(masks) * share) if step < steps - 1 else len(masks)
        for i in confidence.topk(count).indices.tolist():
            x[masks[i]] = int(x0[i])
    return x[len(prompt) :]
