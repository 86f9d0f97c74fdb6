"""`ramet bench step`: cost of decode steps and of prompts by parts of the engine, in process."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pydantic import Field, PositiveInt, PrivateAttr
from safetensors.torch import save_file

from loadgen.experiments.micro.model_bench import ModelBench
from loadgen.harness import BenchError, Cell, Figure
from loadgen.offline.drive import ClockedDrive, answer
from radix import Namespace
from runtime.calls import LoadAdapter
from runtime.execution import building
from runtime.execution.native.library import Library, load_best, open_library
from runtime.features.drafts.part import Drafts
from runtime.models.spec import DecoderSpec
from runtime.protocol import StepEvents, encode

_OWN, _QUESTION, _WARM = 64, 64, 4
PARTS = ("schedule", "drafts", "plan", "launch", "kernels", "sampling", "choosing", "booking", "events", "other")
_PEOPLE = {
    "type": "array",
    "items": {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}},
    "minItems": 1000,
}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 40},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.2,
    },
    "bias": {"temperature": 0.8, "logit_bias": {token: 1.0 for token in range(300)}},
    "grammar": {"temperature": 0.8, "json_schema": json.dumps(_PEOPLE)},
    "logprobs": {"temperature": 0.8, "logprobs": 20},
}
CODE: dict[str, dict[str, Any]] = {
    "native": {},
    "int8": {"quantization": "int8"},
    "torch": {"kernels": "torch"},
    "transformers": {"model_impl": "transformers"},
}


class Step(ModelBench):
    """Decode steps and prompts on an engine core."""

    sections = "work"
    figures = (
        Figure("step", "step, ms", ".2f", 1e3, plotted=True),
        Figure("host", "beside the kernels", ".2f", 1e3),
        Figure("ttft", "TTFT, ms", ".1f", 1e3, plotted=True),
        Figure("cached", f"all but {_QUESTION} cached", ".1f", 1e3),
        Figure("cpu", "CPU, ms", ".1f", 1e3, versus="ratio"),
        Figure("rate", "tokens/s", ".0f", interval=False),
        *(Figure(part, part, ".2f", 1e3, interval=False) for part in PARTS),
    )

    code: tuple[str, ...] = Field(
        ("native",), description=f"{', '.join(CODE)}, or NAME=FILE: CPU kernels of another build"
    )
    batches: tuple[PositiveInt, ...] = Field((1, 8, 32), description="requests that decode together")
    choices: tuple[str, ...] = Field(("greedy", "drawn", "top-p"), description=f"of tokens: {', '.join(CHOICES)}")
    adapters: tuple[int, ...] = Field((0,), description="LoRA adapters that the requests share")
    rank: PositiveInt = Field(16, description="rank of the adapters, in every linear layer but experts")
    shared: int = Field(2000, ge=0, description="tokens of the prefix that the requests share")
    steps: PositiveInt = Field(32, description="decode steps in a measurement")
    prompts: tuple[PositiveInt, ...] = Field((1024,), description="tokens in the prompts")

    _drives: dict[str, _Steps] = PrivateAttr(default_factory=dict)

    def baseline(self) -> tuple[str, Any]:
        return ("adapters", 0) if len(self.adapters) > 1 else ("code", self.code[0].partition("=")[0])

    @contextmanager
    def session(self) -> Iterator[None]:
        if unknown := set(self.choices) - set(CHOICES):
            raise BenchError(f"--choices: {min(unknown)} is none of {', '.join(CHOICES)}")
        path, most = self.path(), max(self.adapters, default=0)
        batch = max(self.batches, default=1)
        tokens = 2 * self.shared * (1 + most) + batch * (3 * _OWN + self.steps + batch)
        pool = tokens + 2 * max(self.prompts, default=0) + 4096
        options = self.options(threads=2, max_running=batch, pool_tokens=pool)
        with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
            adapters = [_save_adapter(Path(directory) / f"{i}", path, self.rank, i) for i in range(most)]
            for code in self.code:
                name, _, file = code.partition("=")
                if not file and name not in CODE:
                    raise BenchError(f"--code: {name} is none of {', '.join(CODE)}")
                library, given = _open(name, Path(file)) if file else load_best(), options | CODE.get(name, {})
                with _kernels(library):
                    drive = _Steps(path, library, adapters, **given)
                stack.callback(drive.close)
                self._drives[name] = drive
            yield

    def cells(self) -> Iterator[Cell]:
        for code in self._drives:
            for choice in self.choices:
                for batch in self.batches:
                    for count in (count for count in self.adapters if count <= batch):
                        yield {"work": "decode", "code": code, "choice": choice, "adapters": count, "requests": batch}
        for code in self._drives:
            for count in (count for count in self.adapters if count < 2):
                for tokens in self.prompts:
                    yield {"work": "prompt", "code": code, "adapters": count, "tokens": tokens}

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, Any]:
        drive = self._drives[cell["code"]]
        drive.reseed(draw)
        if cell["work"] == "prompt":
            return drive.prompt(cell["tokens"], cell["adapters"])
        return drive.decode(self.shared, cell["choice"], cell["requests"], cell["adapters"], self.steps)


class _Steps(ClockedDrive):
    """An engine core whose parts have clocks."""

    def __init__(self, path: Path, library: Library | None, adapters: list[Path], **options: Any):
        super().__init__(path, **options)
        core = self.core
        self.clock(core.scheduler, "schedule", "schedule")
        self.clock(core.planner, "plan", "plan")
        self.clock(core.executor, "run", "launch")
        self.clock(core.decoding, "choose", "sampling")
        self.clock(core, "_book", "booking")
        for drafts in (part for part in core.parts if isinstance(part, Drafts)):
            self.clock(drafts.drafter, "extend", "drafts")
        if library is not None:
            self.clock(library, "decoder_forward", "kernels")
            for name in ("argmax", "choose", "measure"):
                self.clock(library, name, "choosing")
        self._adapters = [answer(core, LoadAdapter(str(path))).digest for path in adapters]
        self._prefixes: dict[int, Any] = {}

    def decode(self, shared: int, choice: str, batch: int, adapters: int, steps: int) -> dict[str, Any]:
        """Medians over steps in seconds: of each part, of the step, and of the CPU time of all cores."""
        prefix = self._prefixes.setdefault(shared, self.text(shared))
        for number in range(max(adapters, 1) if shared else 0):
            self.add(prefix, 1, namespace=self._namespace(number, adapters))
        self.first_tokens()
        for number in range(batch):
            own = self.text(_OWN + number % 16)  # different lengths, so that pages end in different steps
            namespace = self._namespace(number, adapters)
            self.add(prefix + own, steps + _OWN + batch, sampling=CHOICES[choice], namespace=namespace)
        self.first_tokens()
        for _ in range(_WARM):
            self.step()
        found = [self._one_step() for _ in range(steps)]
        self.abort_all()
        medians = {name: median(one[name] for one in found) for name in found[0]}
        host = medians["host"] if medians["kernels"] else None  # torch's code runs within `launch`
        return medians | {"rate": batch / medians["step"], "host": host}

    def _one_step(self) -> dict[str, float]:
        self.reset()
        started, cores = time.perf_counter(), time.process_time()
        events = self.events()
        written = time.perf_counter()
        encode(StepEvents(events))
        ended = time.perf_counter()
        parts = dict.fromkeys(PARTS, 0.0) | self.spent | {"events": ended - written}
        parts["other"] = ended - started - sum(parts.values())
        step = ended - started
        host = step - parts["kernels"] - parts["choosing"]
        return parts | {"step": step, "host": host, "cpu": time.process_time() - cores}

    def prompt(self, length: int, adapters: int) -> dict[str, float]:
        """Seconds to the first token of a new prompt, and of one that goes on from it."""
        prompt = self.text(length)
        self.add(prompt, 1, namespace=self._namespace(0, adapters))
        cpu = time.process_time()
        cold = self.first_tokens()
        cpu = time.process_time() - cpu
        self.add(prompt + self.text(_QUESTION), 1, namespace=self._namespace(0, adapters))
        warm = self.first_tokens()
        self.abort_all()
        return {"ttft": cold, "cached": warm, "cpu": cpu, "rate": length / cold}

    def _namespace(self, number: int, adapters: int) -> Namespace:
        return Namespace(adapter=self._adapters[number % adapters]) if adapters else Namespace()


def _open(name: str, path: Path) -> Library:
    if (library := open_library(name, path)) is None:
        raise BenchError(f"{path} was not built for this version or this processor")
    return library


@contextmanager
def _kernels(library: Library | None) -> Iterator[None]:
    """A context in which new executors compute with these kernels."""
    before = building.load_best
    building.load_best = lambda: library
    try:
        yield
    finally:
        building.load_best = before


def _save_adapter(directory: Path, model: Path, rank: int, seed: int) -> Path:
    """Write a random adapter of every linear layer but experts, as PEFT does."""
    directory.mkdir()
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in DecoderSpec.load(model).expected_tensors().items():
        if name.endswith("_proj.weight") and ".experts." not in name:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, shape[1], generator=draw) / shape[1]
            tensors[f"{module}.lora_B.weight"] = torch.randn(shape[0], rank, generator=draw) / rank
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
