"""`ramet bench gpu`: correctness and speed of the GPU path."""

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from pydantic import Field, PrivateAttr
from rich.console import RenderableType

from loadgen.experiments.gpu.compiled import compiled, load
from loadgen.experiments.gpu.correctness import (
    ENGINES,
    HEADS,
    KINDS,
    PAIRS,
    attention,
    compare_engines,
    greedy,
    random_model,
)
from loadgen.experiments.gpu.families import FAMILIES, compare_family
from loadgen.experiments.gpu.products import CODES, FULL_PRODUCTS, TINY_PRODUCTS, ProductSizes, experts, product
from loadgen.experiments.gpu.shapes import write_shape
from loadgen.experiments.gpu.speed import FULL, MODES, PREFILLS, SHARED_MODES, TINY, Sizes, bounds
from loadgen.experiments.gpu.steps import STEPS, ProfiledSpeed, kernel_tables
from loadgen.harness import Bench, BenchError, Cell, Figure, Results, repeats_of, warmup_of
from runtime.config import make_config
from runtime.errors import ModelError
from runtime.execution.device import is_lost
from runtime.models.resolve import resolve_model

Part = Literal[
    "kernels", "attention", "tokens", "families", "pairs", "bounds", "decode", "shared prefix", "first token", "steps",
    "prefill", "products",
]  # fmt: skip
_EXPERTS = "experts, bfloat16"
PARTS: tuple[Part, ...] = get_args(Part)


class Gpu(Bench):
    """The GPU path beside references, and beside what the memory and the matrix units of the GPU allow.

    Targets: attention within a relative error of 0.01; in float32 the tokens of transformers, of every family; one step
    ahead the tokens of single steps; 70 % of the bandwidth bound for decoding 32 requests; 50 % of the matrix bound for
    prefill; a cached first token in 1.5 times its ideal share; behind a shared prefix, 1.3 times as fast as without
    cascade.
    """

    sections = "part"
    figures = (
        Figure("mib", "MiB", ".1f"),
        Figure("error", "relative error", ".5f", plotted=True),
        Figure("theirs", "tokens as transformers, %", factor=100, plotted=True),
        Figure("gap", "logits apart where they part", ".4f"),
        Figure("warm", "cached as uncached, %", factor=100),
        Figure("same", "same tokens, %", factor=100),
        Figure("copy", "copy, TB/s", ".2f", 1e-12),
        Figure("product", "matrix product, TFLOP/s", ".0f", 1e-12),
        Figure("ttft", "first token, ms", ".1f", 1e3),
        Figure("cached", "all but the question cached", ".1f", 1e3),
        Figure("over", "times its ideal share", ".2f"),
        Figure("step", "step, ms", ".2f", 1e3, versus="ratio"),
        Figure("share", "of the bound, %", factor=100, plotted=True),
        Figure("rate", "tokens/s", ".0f"),
        Figure("graphs", "steps in graphs, %", ".0f", 100),
        Figure("sharing", "steps that share reads, %", ".0f", 100),
        Figure("busy", "device busy, %", factor=100),
        Figure("rest", "longest rest, ms", ".2f", 1e3),
        Figure("kernel_s", "kernels of a step, ms", ".2f", 1e3),
        Figure("host_s", "calls of the host, ms", ".2f", 1e3),
        Figure("coded", "product, us", factor=1e6),
        Figure("plain", "in bfloat16, us", factor=1e6),
        Figure("faster", "times as fast", ".2f"),
        Figure("read", "weights read, TB/s", ".2f", 1e-12),
        *(Figure(part, part, ".3f", 1e3) for part in ("schedule", "plan", "launch", "sample", "book")),
    )

    repeats: int = repeats_of(1)
    warmup: int = warmup_of(0)
    parts: tuple[Part, ...] = Field(PARTS, description=f"of {', '.join(PARTS)}")
    model: str | None = Field(None, description="for tokens and pairs (default: the default model, or a random one)")
    device: Literal["cuda", "cpu"] = Field("cuda", description="cpu tries the bench with a tiny model")

    _directory: Path = PrivateAttr()
    _path: Path = PrivateAttr()
    _drive: ProfiledSpeed | None = PrivateAttr(None)
    _options: dict[str, Any] = PrivateAttr(default_factory=dict)

    def baseline(self) -> tuple[str, str]:
        return "mode", "default"

    @contextmanager
    def session(self) -> Iterator[None]:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise BenchError("torch finds no CUDA device")
        with tempfile.TemporaryDirectory() as directory:
            self._directory = Path(directory)
            self._path = self._tokens_path()
            try:
                yield
            finally:
                self._close()

    def _tokens_path(self) -> Path:
        if self.model is None and self.device == "cpu":
            return random_model(self._directory, 2)
        given = {} if self.model is None else {"model": self.model}
        try:
            return resolve_model(make_config(**given).model)
        except ModelError:
            if self.model is not None:
                raise
            return random_model(self._directory, 8)

    @property
    def _sizes(self) -> Sizes:
        return FULL if self.device == "cuda" else TINY

    @property
    def _products(self) -> ProductSizes:
        return FULL_PRODUCTS if self.device == "cuda" else TINY_PRODUCTS

    def cells(self) -> Iterator[Cell]:
        on_gpu = self.device == "cuda"
        here = PREFILLS[: 2 if on_gpu and torch.cuda.get_device_capability() == (9, 0) else 1]
        every: dict[Part, list[Cell]] = {
            "kernels": [{"library": name} for name in compiled()],
            "attention": [
                {"heads": heads, "page size": size, "kind": kind}
                for heads in HEADS for size in (1, 16) for kind in KINDS if on_gpu
            ],
            "tokens": [{"engine": name} for name, options in ENGINES.items() if on_gpu or options.keys() == {"dtype"}],
            "families": [{"family": name, **options} for name, (_, options, _) in FAMILIES.items()],
            "pairs": [{"engines": name} for name in PAIRS if on_gpu or "graphs" not in name],
            "bounds": [{}],
            "decode": [{"requests": batch, "mode": mode} for mode in MODES for batch in self._sizes.batches],
            "shared prefix": [{"mode": mode} for mode in SHARED_MODES],
            "first token": [{}],
            "steps": [{"steps": kind} for kind in STEPS],
            "prefill": [
                {"kernels": kernels, "rows of a step": rows} for kernels in PREFILLS for rows in self._sizes.chunks
                if kernels in here
            ],
            "products": [
                *({"weights": codes, "rows": rows} for codes in CODES for rows in self._products.rows),
                *({"weights": _EXPERTS, "rows": rows} for rows in self._products.expert_rows),
            ],
        }  # fmt: skip
        return ({"part": part, **cell} for part in self.parts for cell in every[part])

    def lost(self) -> bool:
        return is_lost(torch.device(self.device))

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, Any]:
        match cell["part"]:
            case "kernels":
                return load(cell["library"])
            case "attention":
                return attention(cell["kind"], cell["page size"], HEADS[cell["heads"]])
            case "tokens":
                return greedy(self._path, self.device, ENGINES[cell["engine"]])
            case "families":
                return compare_family(cell["family"], self._directory, self.device)
            case "pairs":
                return compare_engines(self._path, self.device, *PAIRS[cell["engines"]])
            case "bounds":
                return bounds(self.device)
            case "decode":
                options = {"kv_dtype": "fp8"} if cell["mode"] == "fp8 KV" else {}
                return self._open(**options).decode(cell["requests"], MODES[cell["mode"]])
            case "shared prefix":
                return self._open().shared(SHARED_MODES[cell["mode"]])
            case "first token":
                return self._open().first_token()
            case "steps":
                return self._open().kernels(cell["steps"])
            case "products" if cell["weights"] == _EXPERTS:
                return experts(cell["rows"], self._products, self.device)
            case "products":
                return product(cell["weights"], cell["rows"], self._products, self.device)
            case _:
                return self._open(step_tokens=cell["rows of a step"]).prefill(cell["kernels"])

    def _open(self, **options: Any) -> ProfiledSpeed:
        """The engine with these options. It replaces another one, because a GPU has room for one."""
        if self._drive is None or self._options != options:
            self._close()
            path = write_shape(self._sizes.shape, self._directory)
            self._drive, self._options = ProfiledSpeed(path, self._sizes, self.device, **options), options
        return self._drive

    def details(self, results: Results) -> Iterator[RenderableType]:
        return kernel_tables(results)

    def _close(self) -> None:
        if self._drive is not None:
            self._drive.close()
            self._drive = None
