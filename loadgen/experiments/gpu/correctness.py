"""Correctness of the GPU path: attention against the reference, models against transformers and themselves."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from loadgen.experiments.gpu.watched import WatchedDrive
from runtime.batch import AttentionPlan, Span, causal_visible
from runtime.execution.attention.torch_attention import TorchAttention
from runtime.kv.pool import KVPool
from runtime.models.rope import RotaryEmbedding
from runtime.models.rope_spec import RopeSpec

_LENGTHS = (5, 40, 131, 300)
_NEW = 32
# Heads, key-value heads and their size, as of Llama-3.1-8B and of SmolLM2.
HEADS = {"32/8 of 128": (32, 8, 128), "9/3 of 64": (9, 3, 64)}
KINDS = ("decode", "prefill", "cascade", "not causal", "shifted", "masked", "thinned", "fp8 cascade", "fp8 decode")
ENGINES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, without graphs": {"dtype": "bfloat16", "cuda_graph_batches": "0"},
    "bfloat16, fp8 KV": {"dtype": "bfloat16", "kv_dtype": "fp8"},
}
_ALWAYS = 1
# Options of two engines whose tokens should be the same. `shared`: `Planner.least_saved_tokens`.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one step ahead, single steps": ({"overlap": "on"}, {"overlap": "off"}),
    "shared pages read once, by each": ({"shared": _ALWAYS}, {"shared": 1 << 60}),
    "with and without graphs": ({}, {"cuda_graph_batches": "0"}),
    "pages of 1 and of 16": ({"page_size": 1}, {"page_size": 16}),
}


def attention(kind: str, page_size: int, heads: tuple[int, int, int]) -> dict[str, float]:
    """Relative error of FlashInfer on bfloat16 against the reference, computed in float32 on the same numbers."""
    # Not at the top: FlashInfer is there on a GPU alone.
    from runtime.execution.attention.flashinfer import FlashInferAttention

    device = torch.device("cuda")
    num_heads, kv_heads, dim = heads
    dtype = torch.float8_e4m3fn if kind.startswith("fp8") else torch.bfloat16
    pool = KVPool(1, 16384 // page_size, page_size, kv_heads, dim, dtype, device)
    pool.k.copy_(torch.randn(pool.k.shape, device=device))
    pool.v.copy_(torch.randn(pool.v.shape, device=device))
    exact = KVPool(1, pool.num_pages, page_size, kv_heads, dim, torch.float32, device)
    exact.k.copy_(pool.k)
    exact.v.copy_(pool.v)
    rope = RotaryEmbedding(RopeSpec(10000.0), dim, device)
    ours, reference = FlashInferAttention(pool, rope, num_heads), TorchAttention(exact, rope)
    plan = _plan(kind, _Pages(pool.num_pages, page_size))
    q = torch.randn(plan.num_rows, num_heads, dim, device=device).bfloat16()
    (prepared,) = ours.prepare_step([plan])
    got = ours.run(prepared, q, 0).float()
    wanted = reference.run(reference.prepare(plan), q.float(), 0)
    return {"error": float((got - wanted).norm() / wanted.norm())}


class _Pages:
    """Spans of random pages."""

    def __init__(self, num_pages: int, page_size: int):
        self._free, self._page_size = list(range(num_pages)), page_size
        random.shuffle(self._free)

    def span(self, length: int) -> Span:
        pages = [self._free.pop() for _ in range(-(-length // self._page_size))]
        return Span(np.array(pages, dtype=np.int32), length)


def _plan(kind: str, pages: _Pages) -> AttentionPlan:
    draw = random.randrange
    plan = AttentionPlan(0)

    def add(rows: int, length: int, visible: np.ndarray | None = None) -> None:
        plan.add(slice(plan.num_rows, plan.num_rows + rows), pages.span(length), visible)
        plan.num_rows += rows

    if kind.endswith("decode"):
        for _ in range(17):
            add(1, draw(1, 700))
    elif kind == "not causal":
        for _ in range(5):
            add(draw(1, 300), draw(1, 1500))
    elif kind in ("shifted", "thinned"):
        for _ in range(5):
            rows = draw(1, 40)
            plan.add(slice(plan.num_rows, plan.num_rows + rows), pages.span(draw(1, 900)))
            if kind == "shifted":
                plan.spans[-1].shift = draw(-2000, 2000)
            else:
                plan.spans[-1].keep = torch.rand(plan.spans[-1].length) < 0.5
            add(rows, rows + 3, causal_visible(rows + 3, rows))
    elif kind == "masked":
        add(33, 777, np.random.default_rng(0).integers(500, 778, size=33).astype(np.int32))
        plan.spans[0].shift = 321
    elif kind == "prefill":
        for _ in range(5):
            rows = draw(1, 300)
            length = rows + draw(1, 1200)
            add(rows, length, causal_visible(length, rows))
    else:
        for _ in range(9):
            rows = draw(1, 4)
            length = rows + draw(0, 200)
            add(rows, length, causal_visible(length, rows))
        ends = [edge.rows.stop for edge in plan.edges if isinstance(edge.rows, slice)]
        plan.add(slice(0, plan.num_rows), pages.span(16 * draw(1, 200)))
        plan.add(slice(0, ends[3]), pages.span(16 * draw(1, 40)))
    return plan


def greedy(path: Path, device: str, options: dict[str, Any]) -> dict[str, float]:
    """The share of greedy tokens equal to transformers', and the share that is equal with a cached prompt."""
    prompts = _prompts(path)
    cold, warm, ran = _ours(path, {"device": device, **options}, prompts)
    theirs, gap = _transformers(path, device, getattr(torch, options["dtype"]), prompts, cold)
    return {"theirs": _agreement(cold, theirs), "gap": gap, "warm": _agreement(warm, cold)} | ran


def compare_engines(path: Path, device: str, one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """The share of two engines' greedy tokens before their first difference, with uncached and cached prompts."""
    prompts = _prompts(path)
    options = {"device": device, "dtype": "float32" if device == "cpu" else "bfloat16"}
    (*mine, ran), (*theirs, _) = (_ours(path, options | more, prompts) for more in (one, other))
    return {"same": _agreement([*mine[0], *mine[1]], [*theirs[0], *theirs[1]])} | ran


def _prompts(path: Path) -> list[list[int]]:
    """Random tokens; the last two prompts share their first 96."""
    draw, vocabulary = random.Random(1), json.loads((path / "config.json").read_text("utf-8"))["vocab_size"]
    prompts = [[draw.randrange(3, min(4000, vocabulary)) for _ in range(length)] for length in _LENGTHS]
    prompts[-1][:96] = prompts[-2][:96]
    return prompts


def _ours(
    path: Path, options: dict[str, Any], prompts: list[list[int]]
) -> tuple[list[list[int]], list[list[int]], dict[str, float]]:
    """The greedy tokens with nothing cached and with cached prompts, and how the steps ran, by `WatchedDrive.share`.

    Raises RuntimeError if they did not run as the options say.
    """
    on_gpu = options["device"] != "cpu"
    options = {"pool_tokens": 4096} | options
    if not on_gpu:
        options["kernels"] = "torch"
    shared = options.pop("shared", None)
    by_flashinfer = on_gpu and options["dtype"] != "float32" and options.get("kernels") != "torch"
    drive = WatchedDrive(path, **options)
    if shared is not None:
        drive.core.planner.least_saved_tokens = shared
    try:
        if by_flashinfer:
            drive.demand_backend()
        cold, warm = drive.tokens(prompts, _NEW), drive.tokens(prompts, _NEW)
        if shared is not None:
            drive.demand("sharing", shared == _ALWAYS)
        if by_flashinfer and shared != _ALWAYS:
            drive.demand("graphs", options.get("cuda_graph_batches") != "0")
        return cold, warm, {kind: drive.share(kind) for kind in ("graphs", "sharing")}
    finally:
        drive.close()


def _transformers(
    path: Path, device: str, dtype: torch.dtype, prompts: list[list[int]], ours: list[list[int]]
) -> tuple[list[list[int]], float]:
    """transformers' greedy tokens, and the largest gap of its logits at the first token where `ours` differ."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model = model.to(device).eval()
    # No token ends a request, as `ignore_eos` says to ours; `min_new_tokens` would also forbid to choose it.
    model.generation_config.eos_token_id = None
    found, gap = [], 0.0
    with torch.inference_mode():
        for prompt, mine in zip(prompts, ours, strict=True):
            ids = torch.tensor([prompt], device=device)
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=_NEW, pad_token_id=0
            )
            theirs = out[0, len(prompt) :].tolist()
            same = _common(mine, theirs)
            if same < len(theirs):
                logits = model(out[:, : len(prompt) + same]).logits[0, -1].float()
                gap = max(gap, float(logits[theirs[same]] - logits[mine[same]]))
            found.append(theirs)
    return found, gap


def _common(one: list[int], other: list[int]) -> int:
    """The number of tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(one, other, strict=True)) if x != y), len(one))


def _agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The share of tokens before the first difference."""
    return sum(_common(a, b) for a, b in zip(ours, theirs, strict=True)) / sum(map(len, theirs))


def random_model(directory: Path, layers: int) -> Path:
    """Write a checkpoint of a small Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=72 * layers, intermediate_size=192 * layers, num_hidden_layers=layers,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64, max_position_embeddings=2048, eos_token_id=2,
        bos_token_id=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Wide enough that greedy continuations differ from prompt to prompt.
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    model.save_pretrained(directory / "llama-random")
    return directory / "llama-random"
