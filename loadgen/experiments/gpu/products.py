"""Products of quantised weights and of experts at the sizes of published models, beside bfloat16's."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from loadgen.experiments.micro.timing import timed
from runtime.execution.coded_products import coded_tensor
from runtime.execution.experts import Experts
from runtime.execution.ops import FlashInferOps, Ops
from runtime.models.coded import CodedWeight
from runtime.models.experts import ExpertSpec

# Weights that take turns, so that no cache holds them: of 29 MB at least, where a GPU's L2 cache has 50 MB.
_TURNS = 4
_REPEATS = 5
_CONTEXT = 4096


class ProductSizes(NamedTuple):
    """Sizes of a dense weight [n, k], and of a layer of experts."""

    n: int
    k: int
    hidden: int
    inner: int
    experts: int
    chosen: int
    rows: tuple[int, ...]
    expert_rows: tuple[int, ...]


# The MLP of Llama-3.1-8B, and a layer of Qwen3-30B-A3B.
FULL_PRODUCTS = ProductSizes(14336, 4096, 2048, 768, 128, 8, (1, 17, 32, 128, 512, 2048), (1, 32, 512))
TINY_PRODUCTS = ProductSizes(64, 256, 64, 32, 8, 2, (1, 17), (1, 32))
# Columns that share a scale of 4 bits; 0: float8 with a scale a row.
CODES = {"int4, groups of 32": 32, "int4, groups of 128": 128, "float8": 0}


def product(codes: str, rows: int, sizes: ProductSizes, device: str) -> dict[str, Any]:
    """Seconds of a product by codes and by the bfloat16 that they stand for; relative error to float32.

    Raises RuntimeError if the runtime would unpack the weight.
    """
    torch.manual_seed(0)
    coded, plain = [], []
    x = torch.randn(rows, sizes.k, device=device).bfloat16()
    for _ in range(_TURNS):
        weight = _weight(CODES[codes], sizes, device)
        made = coded_tensor(weight, torch.device(device), set())
        if made is None:
            raise RuntimeError(f"{codes}: the weight is unpacked")
        coded.append(made)
        values = weight.values()
        plain.append(values.bfloat16())
    wanted = F.linear(x.float(), values)
    error = float((F.linear(x, coded[-1]).float() - wanted).norm() / wanted.norm())
    del values, wanted
    mine, theirs = (
        _seconds([lambda weight=weight: F.linear(x, weight) for weight in weights], device)  # type: ignore[misc]
        for weights in (coded, plain)
    )
    return {"error": error, "coded": mine, "plain": theirs, "faster": median(theirs) / median(mine)}


def _weight(group: int, sizes: ProductSizes, device: str) -> CodedWeight:
    n, k = sizes.n, sizes.k
    if not group:
        codes = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
        return CodedWeight(8, codes, torch.rand(n, 1, device=device) + 0.5, (1, k))
    codes = torch.randint(16, (n, k), dtype=torch.uint8, device=device)
    scales = (torch.rand(n, k // group, device=device) * 0.01 + 0.001).half()
    return CodedWeight(4, codes, scales, (1, group), torch.full_like(scales, 8, dtype=torch.int16))


def experts(rows: int, sizes: ProductSizes, device: str) -> dict[str, Any]:
    """Seconds of a layer of experts, bytes/s of the weights that it reads, and its relative error to float32."""
    torch.manual_seed(0)
    ops = FlashInferOps(_CONTEXT) if device == "cuda" else Ops()
    spec = ExpertSpec((0,), sizes.experts, sizes.chosen, sizes.inner)
    count, hidden, inner = sizes.experts, sizes.hidden, sizes.inner
    router = torch.randn(count, hidden, device=device) / hidden**0.5
    gate_up = torch.randn(count, 2 * inner, hidden, device=device).bfloat16() / hidden**0.5
    down = torch.randn(count, hidden, inner, device=device).bfloat16() / inner**0.5
    layer = Experts(spec, ops, router, gate_up, down)
    exact = Experts(spec, Ops(), router, gate_up.float(), down.float())
    # Rows of all turns choose other experts, so that few rows find none of theirs in a cache.
    turns = [torch.randn(rows, hidden, device=device).bfloat16() for _ in range(2 * _TURNS)]
    wanted = exact(turns[0].float())
    error = float((layer(turns[0]).float() - wanted).norm() / wanted.norm())
    del exact, wanted
    times = _seconds([lambda x=x: layer(x) for x in turns], device)  # type: ignore[misc]
    read = sum(len(layer.choose(x)[0].unique()) for x in turns) / len(turns) * 3 * inner * hidden * 2
    return {"error": error, "coded": times, "read": read / median(times)}


def _seconds(calls: Sequence[Callable[[], object]], device: str) -> list[float]:
    """Mean seconds of a call where they take turns, several times; on a GPU by its own clock, in a CUDA graph.

    A graph launches as the decode steps do: without the host's time for each kernel.
    """

    def each() -> None:
        for call in calls:
            call()

    each()
    if device != "cuda":
        return [timed(each) / len(calls) for _ in range(_REPEATS)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        each()
    graph.replay()
    times = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return times
