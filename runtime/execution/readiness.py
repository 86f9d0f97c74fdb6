"""Whether FlashInfer computes a model here: its kernels are loaded or compiled, and every kind of step is compared."""

import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from tqdm import tqdm

from runtime.batch import AttentionPlan, Span, causal_visible
from runtime.execution.attention.flashinfer import FlashInferAttention
from runtime.execution.attention.torch_attention import TorchAttention
from runtime.execution.flashinfer_kernels import kernels_for
from runtime.execution.flashinfer_package import VERSION, load_flashinfer
from runtime.execution.graphs import StepGraphs
from runtime.execution.ops import FlashInferOps, Ops
from runtime.kv.pool import KVPool
from runtime.models.rope import RotaryEmbedding
from runtime.models.spec import DecoderSpec

log = logging.getLogger("ramet.engine")

# Largest relative error of results on random data; rounding to bfloat16 gives about 0.004.
_TOLERANCE = 0.02
_ROWS = 8
# Rows of KV that each row of a step has for itself, and that all rows share.
_OWN, _SHARED = 37, 64
_CONTEXT = 4096
_REMEDIES = {
    ArithmeticError: "--kernels torch starts without it",
    ImportError: "`make extra-cuda` installs what it needs",
}
_COMPILE = (
    f"flashinfer-jit-cache=={VERSION} brings compiled kernels; compiling them needs nvcc, a C++ compiler and cuBLAS' "
    "headers"
)


def find_fault(
    spec: DecoderSpec, dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int, device: torch.device, quiet: bool
) -> str | None:
    """What keeps FlashInfer from computing a model, and what to do, on one line; None: nothing does.

    Args:
        spec: the model, or this rank's share of it.
        dtype, kv_dtype: of activations and of the pool.
        quiet: no progress bar, which terminals show otherwise.
    """
    doing = "its import"
    try:
        load_flashinfer()
        # A stand-in on a CPU has nothing to compile.
        kernels = [] if device.type == "cpu" else list(kernels_for(kv_dtype, spec.head_dim, bool(spec.windows)))
        loads = [(f"the kernels for {one.name}", lambda one=one: one.describe().build_and_load()) for one in kernels]
        trial = FlashInferTrial(spec, dtype, kv_dtype, page_size, device)
        with tqdm(total=len(loads) + len(trial.steps), desc="FlashInfer", disable=quiet or None) as bar:
            for doing, work in (*loads, *trial.steps.items()):
                bar.set_postfix_str(doing)
                work()
                bar.update()
    # Compilers, loaders and kernels raise errors of many types, and the server is to start in any case.
    except Exception as error:
        remedy = next((said for kind, said in _REMEDIES.items() if isinstance(error, kind)), _COMPILE)
        return f"FlashInfer fails at {doing} ({_brief(error)}). {remedy}"
    return None


def capture_graphs(graphs: StepGraphs, most: int, device: torch.device) -> None:
    """Capture the graphs of steps of up to `most` requests, before a request has to wait for them."""
    shapes, started, free = graphs.shapes(most), time.monotonic(), torch.cuda.mem_get_info(device)[0]
    for shape in tqdm(shapes, desc="CUDA graphs", unit="graph", disable=None):
        graphs.capture(shape)
    decode, seconds = sum(shape.rows.decodes for shape in shapes), time.monotonic() - started
    mib = (free - torch.cuda.mem_get_info(device)[0]) >> 20
    kinds = f"{decode} of decode steps and {len(shapes) - decode} of steps with prompts"
    log.info("captured %d CUDA graphs, %s, in %.1f s and %d MiB", len(shapes), kinds, seconds, mib)


@dataclass(slots=True)
class FlashInferTrial:
    """One step of each kind on random data, by FlashInfer and by torch.

    Attributes:
        steps: by name; each raises ArithmeticError if the results differ.
    """

    spec: DecoderSpec
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    device: torch.device
    steps: dict[str, Callable[[], None]] = field(init=False)
    _random: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(0)
        kinds = {f"a {kind} step": lambda plan=plan: self._attend(plan) for kind, plan in self._plans()}
        self.steps = {**kinds, "norms": self._norms, "activations": self._activations, "rotation": self._rotation}
        self.steps["filters of tokens"] = self._filters

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random).to(self.device, self.dtype)

    def _span(self, length: int, first: int = 0) -> Span:
        """A span whose pages begin behind row `first` of the pool."""
        start = -(-first // self.page_size)
        pages = np.arange(start, start - (-length // self.page_size), dtype=np.int32)[::-1].copy()
        return Span(pages, length)

    def _plans(self) -> Iterator[tuple[str, AttentionPlan]]:
        def own(plan: AttentionPlan) -> AttentionPlan:
            for row in range(_ROWS):
                plan.add(slice(row, row + 1), self._span(_OWN, _SHARED + row * (_OWN + self.page_size)))
            return plan

        def shared(shift: int = 0, keep: torch.Tensor | None = None) -> AttentionPlan:
            plan = AttentionPlan(_ROWS)
            plan.add(slice(0, _ROWS), replace(self._span(_SHARED), shift=shift, keep=keep))
            return plan

        prompt = AttentionPlan(_ROWS)
        prompt.add(slice(0, _ROWS), self._span(_SHARED), causal_visible(_SHARED, _ROWS))
        yield "decode", own(AttentionPlan(_ROWS))
        yield "prefill", prompt
        yield "cascade", own(shared())
        yield "masked", own(shared(keep=torch.arange(_SHARED) % 3 > 0))
        yield "shifted", own(shared(shift=11))
        if self.spec.windows:
            for rows in (1, _ROWS):
                plan, visible = AttentionPlan(rows), causal_visible(_SHARED, rows)
                hidden = np.arange(_SHARED - rows, _SHARED, dtype=np.int32) + np.int32(1 - _OWN)
                plan.add(slice(0, rows), self._span(_SHARED), visible, hidden)
                yield f"windowed {'decode' if rows == 1 else 'prefill'}", plan

    @torch.inference_mode()
    def _attend(self, plan: AttentionPlan) -> None:
        spec, tokens = self.spec, _SHARED + _ROWS * (_OWN + 2 * self.page_size)
        shape = (1, -(-tokens // self.page_size), self.page_size, spec.num_kv_heads, spec.head_dim)
        pool = KVPool(*shape, self.kv_dtype, self.device)
        for half in (pool.k, pool.v):
            half.copy_(self._draw(*half.shape).to(self.kv_dtype))
        rope = RotaryEmbedding(spec.rope, spec.head_dim, self.device)
        ours = FlashInferAttention(pool, rope, spec.num_heads, self.dtype)
        reference, q = TorchAttention(pool, rope), self._draw(plan.num_rows, spec.num_heads, spec.head_dim)
        (planned,) = ours.prepare_step([plan])
        _compare(ours.run(planned, q, 0), reference.run(reference.prepare(plan), q, 0))

    @torch.inference_mode()
    def _norms(self) -> None:
        size, eps = self.spec.hidden_size, self.spec.rms_norm_eps
        x, y, weight, norm = self._draw(_ROWS, size), self._draw(_ROWS, 64), self._draw(size, 64), self._draw(size)
        ours, plain = FlashInferOps(_CONTEXT), Ops()
        _compare(ours.rms_norm(x, norm, eps), plain.rms_norm(x, norm, eps))
        # Norms of queries and keys read a part of each row, by another kernel.
        head_dim, heads = self.spec.head_dim, self.spec.num_heads
        queries, of_heads = self._draw(_ROWS, 2 * heads, head_dim)[:, heads:], self._draw(head_dim)
        _compare(ours.rms_norm(queries, of_heads, eps), plain.rms_norm(queries, of_heads, eps))
        wanted = plain.add_linear_norm(x.clone(), y, weight, None, norm, eps)
        for one, other in zip(ours.add_linear_norm(x.clone(), y, weight, None, norm, eps), wanted, strict=True):
            _compare(one, other)

    @torch.inference_mode()
    def _activations(self) -> None:
        gate_up = self._draw(_ROWS, 2 * self.spec.intermediate_size)
        _compare(FlashInferOps(_CONTEXT).silu_and_mul(gate_up), Ops().silu_and_mul(gate_up))

    @torch.inference_mode()
    def _rotation(self) -> None:
        spec, both = self.spec, (FlashInferOps(_CONTEXT), Ops())
        rope = RotaryEmbedding(spec.rope, spec.head_dim, self.device)
        positions = torch.arange(_ROWS, device=self.device) * 97
        qk = self._draw(_ROWS, spec.num_heads + spec.num_kv_heads, spec.head_dim)
        found = [ops.rotate_qk(qk.clone(), spec.num_heads, ops.angles(rope, positions)) for ops in both]
        for one, other in zip(*found, strict=True):
            _compare(one, other)

    @torch.inference_mode()
    def _filters(self) -> None:
        # In float32, because equal probabilities would leave the choice open.
        probs = torch.randn(_ROWS, self.spec.vocab_size, generator=self._random).mul(4).softmax(-1).to(self.device)
        top_k = torch.arange(1, _ROWS + 1, dtype=torch.int32, device=self.device)
        values, tokens = probs.sort(descending=True)
        least = values.gather(1, top_k.long()[:, None] - 1)
        kept = probs.where(probs >= least, 0)
        _compare(load_flashinfer().sampling.top_k_renorm_probs(probs, top_k), kept / kept.sum(-1, keepdim=True))
        top_p = torch.linspace(0.1, 0.9, _ROWS, device=self.device)
        values = values.where(values.cumsum(-1) - values < top_p[:, None], 0)
        kept = torch.zeros_like(probs).scatter_(1, tokens, values / values.sum(-1, keepdim=True))
        _compare(load_flashinfer().sampling.top_p_renorm_probs(probs, top_p, is_deterministic=True), kept)


def _compare(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raise ArithmeticError if results differ by more than rounding explains. Waits for the device."""
    error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    if not error <= _TOLERANCE:
        raise ArithmeticError(f"results differ from torch's by {error:.1%}")


def _brief(error: Exception) -> str:
    """The line of a message that says what failed: compilers print many others."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    telling = re.compile(r"\berror\b|not found|could not|no such", re.IGNORECASE)
    return next((line for line in lines if telling.search(line)), lines[0])[:200]
