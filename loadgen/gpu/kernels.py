"""FlashInfer's kernels, each used once, so that compilation at first use is out of the way of the other parts."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from loadgen.gpu.correctness import HEADS, attention
from loadgen.gpu.figures import Figures, Item
from loadgen.micro.timing import timed
from runtime.execution.ops import FlashInferOps
from runtime.kv.segments import Sequence
from runtime.models.rope import RotaryEmbedding
from runtime.models.rope_spec import RopeSpec
from runtime.params import SamplingParams
from runtime.protocol import AddRequest
from runtime.request import Request
from runtime.sampler_state import SamplerState
from runtime.sampling.batched import BatchedSampler


def items(device: str) -> Iterator[Item]:
    """Every kernel that the other parts use."""
    if device != "cuda":
        return
    for name, call in {"norm": _norm, "activation": _activation, "rotation": _rotation, "sampling": _sampling}.items():
        yield name, partial(_timed, call)
    for heads in HEADS:
        for kind in ("decode", "prefill", "cascade", "fp8 cascade", "fp8 decode", "masked"):
            yield (
                f"attention, {kind}, {heads[0]}/{heads[1]} heads of {heads[2]}",
                partial(_timed, partial(attention, kind, 16, heads)),
            )


def _timed(call: Callable[[], object]) -> Figures:
    def work() -> None:
        call()
        torch.cuda.synchronize()

    return {"seconds": timed(work)}


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def _ops() -> FlashInferOps:
    return FlashInferOps(64)


def _norm() -> None:
    x, ops = _random(4, 512), _ops()
    ops.rms_norm(x, _random(512), 1e-5)
    ops.add_linear_norm(x, _random(4, 512), _random(512, 512), None, _random(512), 1e-5)


def _activation() -> None:
    _ops().silu_and_mul(_random(4, 512))


def _rotation() -> None:
    ops, device = _ops(), torch.device("cuda")
    for dim in (64, 128):
        angles = ops.angles(RotaryEmbedding(RopeSpec(10000.0), dim, device), torch.arange(4, device=device))
        ops.rotate_qk(_random(4, 6, dim), 4, angles)
        ops = _ops()


def _sampling() -> None:
    sampler = BatchedSampler(4096, torch.device("cuda"))
    params = SamplingParams(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01)
    nobody: Any = None  # neither strategy nor decoding: the sampler asks for neither
    asking = Request(AddRequest("r", b"", {}), SamplerState(params), Sequence(array("i", [1])), 1, 9, nobody, nobody)
    sampler.sample(torch.randn(1, 4096, device="cuda"), [asking]).read()
