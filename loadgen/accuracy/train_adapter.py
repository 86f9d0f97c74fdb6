"""Adaptation of the default model to masked diffusion: `python -m loadgen.accuracy.train_adapter --out DIRECTORY`.

LoRA on all linear layers and a learned mask embedding; full attention; the answer's tokens masked with probability t, t
stratified over the batch; plain cross-entropy of the masked ones, each read from the row before (Dream's shift by one).
In some steps (`--stale`) the prefix's keys and values are of an earlier state of the canvas, as between refreshes.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import DynamicCache

from loadgen.accuracy.lora import LoraLlama
from loadgen.accuracy.tasks import TASKS, Source
from loadgen.accuracy.vocabulary import Vocabulary
from runtime.config import default_cache_dir
from runtime.models.adapters.merge import MASK_TOKEN_ID
from runtime.models.default_model import fetch_default

_WARMUP = 20
_DECAY_FROM = 0.6


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch: its task, tokens of the canvas, and the least number of tokens of a sequence."""

    task: str
    room: int
    length: int


def draw_tasks(rng: random.Random, mix: dict[str, float], parts: int) -> list[str]:
    """A task for each part, each as often as the mix says, to within one."""
    bounds = list(accumulate(mix.values()))
    start = rng.random()
    return [list(mix)[bisect(bounds, bounds[-1] * (start + i) / parts)] for i in range(parts)]


def draw_shape(rng: random.Random, progress: float, task: str, lengths: Sequence[int]) -> Shape:
    """Short canvases first, then longer ones; in the second half of the run, a quarter of the batches have prose."""
    rooms = [12, 16] if progress < 0.35 else [16, 24, 32] if progress < 0.65 else [24, 32, 32, 32, 48, 64]
    filled = progress > 0.5 and rng.random() < 0.25
    return Shape(task, rng.choice(rooms), rng.choice(lengths) if filled else 0)


class Trainer:
    """A run of training; an interrupted one goes on from its last checkpoint with the same data."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        base = options.base or fetch_default(options.cache_dir)
        dtype = torch.bfloat16 if options.bfloat16 or self.device.type == "cuda" else torch.float32
        self.vocabulary = Vocabulary(base)
        self.model = LoraLlama.load(base, self.device, dtype)
        self.model.adapt(options.rank, 2.0 * options.rank, MASK_TOKEN_ID, options.seed)
        self.parameters = list(self.model.learned().values())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=options.lr, betas=(0.9, 0.98), weight_decay=0.01)
        self.source = Source(self.vocabulary, ("train", options.seed))
        self.first = self.step = self.tokens = 0
        self.seconds = 0.0
        self.checkpoint = options.out / "checkpoint.pt"
        if options.start:
            about = self.model.take(options.start)
            self.first = self.step = int(about["steps"])
            self.tokens = int(about["tokens"])
        if self.checkpoint.exists():
            self._resume()

    def run(self, until: int | None = None) -> None:
        """Train to the end of the schedule, or to step `until` of it, and write the adapter."""
        saved = time.monotonic()
        losses: list[tuple[str, float]] = []
        while (progress := self._progress()) < 1 and self.step != until:
            started = time.monotonic()
            losses += self._train_step(progress)
            self.seconds += time.monotonic() - started
            if self.step % self.options.log_every == 0:
                self._report(progress, losses)
                losses.clear()
            if time.monotonic() - saved > 60 * self.options.save_minutes:
                self._save()
                saved = time.monotonic()
        self._save()

    def _progress(self) -> float:
        return min(1.0, max(self.step / self.options.steps, self.seconds / (60 * self.options.minutes)))

    def _train_step(self, progress: float) -> list[tuple[str, float]]:
        """Update the adapter once; task and loss of each part."""
        options = self.options
        rng = random.Random(repr((options.seed, self.step)))
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for part, task in enumerate(draw_tasks(rng, options.mix, options.parts)):
            shape = draw_shape(rng, progress, task, options.lengths)
            loss = self._loss(shape, self.step * options.parts + part, rng)
            (loss / options.parts).backward()
            losses.append((task, float(loss.detach())))
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.optimizer.param_groups:
            warm = (self.step - self.first + 1) / _WARMUP
            group["lr"] = options.lr * min(1.0, warm, (1 - progress) / (1 - _DECAY_FROM))
        self.optimizer.step()
        self.step += 1
        return losses

    def _loss(self, shape: Shape, number: int, rng: random.Random) -> torch.Tensor:
        """The loss of one part of a step; its number selects the examples."""
        tokens, shared, room = self._batch(shape, number)
        self.tokens += tokens.numel()
        answers = tokens[:, -room:]
        masked = self._mask(answers, rng)
        behind = self._earlier(tokens, masked, shared, number)
        hidden = self.model.hidden(hide(tokens, masked), behind)[:, -room - 1 : -1][masked]
        return F.cross_entropy(self.model.lm_head(hidden).float(), answers[masked])

    def _batch(self, shape: Shape, number: int) -> tuple[torch.Tensor, int, int]:
        """Token ids [B, T], the number of rows that are prefix in all of them, and the room of the answers at the end.

        T x B is about `batch_tokens` over the number of parts.
        """
        probe = self.source.group(shape.task, -1, shape.room)[0]
        size = max(2, self.options.batch_tokens // self.options.parts // max(shape.length, len(probe.ids)))
        examples = list(self.source.batch(shape.task, number, shape.room, size, shape.length))
        tokens = torch.tensor([example.ids for example in examples], device=self.device)
        return tokens, min(len(example.prefix) for example in examples), shape.room

    def _earlier(self, tokens: torch.Tensor, masked: torch.Tensor, shared: int, number: int) -> DynamicCache | None:
        """Keys and values of the first `shared` rows with more masked tokens; None in steps without stale rows.

        They have gradients, so that the prefix's rows learn to hold what does not change with the canvas.
        """
        rng = random.Random(repr((self.options.seed, number, "stale")))
        if rng.random() >= self.options.stale:
            return None
        generator = torch.Generator().manual_seed(rng.getrandbits(63))
        more = torch.rand(len(tokens), 1, generator=generator)
        before = masked | (torch.rand(masked.shape, generator=generator) < more).to(self.device)
        return self.model.first_rows(hide(tokens, before), shared)

    def _mask(self, answers: torch.Tensor, rng: random.Random) -> torch.Tensor:
        """The mask of the answers' hidden tokens; the first one, where chance would hide none of a row."""
        generator = torch.Generator().manual_seed(rng.getrandbits(63))
        size, room = answers.shape
        t = (torch.rand(1, generator=generator) + torch.arange(size) / size) % 1
        masked = torch.rand(size, room, generator=generator) < t[:, None]
        masked[:, 0] |= ~masked.any(1)
        return masked.to(self.device)

    def _report(self, progress: float, losses: Sequence[tuple[str, float]]) -> None:
        left = self.seconds * (1 - progress) / max(progress, 1e-9) / 60
        rate = self.tokens / self.seconds
        by_task = {task: [loss for other, loss in losses if other == task] for task in self.options.mix}
        shown = "  ".join(f"{task} {mean(found):.3f}" for task, found in by_task.items() if found)
        print(
            f"step {self.step}  loss {mean(loss for _, loss in losses):.3f} ({shown})  {progress:.0%}  "
            f"{rate:.0f} tokens/s  {left:.0f} min left",
            file=sys.stderr,
            flush=True,
        )

    def _save(self) -> None:
        self.options.out.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {
            "model": self.model.learned(),
            "optimizer": self.optimizer.state_dict(),
            "run": (self.step, self.tokens, self.seconds),
        }
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.checkpoint)
        about = {"rank": self.options.rank, "alpha": 2 * self.options.rank, "steps": self.step, "tokens": self.tokens}
        metadata = {name: str(value) for name, value in (about | {"seed": self.options.seed}).items()}
        save_file(self.model.adapter(), self.options.out / "adapter.safetensors", metadata)

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.seconds = state["run"]
        print(f"going on at step {self.step}", file=sys.stderr, flush=True)


def hide(tokens: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """Token ids [B, T] with the mask's id in place of the last `room` where `masked` [B, room] is true."""
    noisy = tokens.clone()
    noisy[:, -masked.shape[1] :][masked] = MASK_TOKEN_ID
    return noisy


def main() -> int:
    """Train; returns the exit code."""
    options = parse_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    Trainer(options).run()
    print(f"{options.out / 'adapter.safetensors'}", file=sys.stderr)
    return 0


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a run, from `arguments` or else the command line."""
    parser = argparse.ArgumentParser("train_adapter", description=(__doc__ or "").split(":")[0] + ".")
    parser.add_argument("--out", type=Path, required=True, help="directory of the adapter and of the checkpoint")
    parser.add_argument("--steps", type=int, default=400, help="length of the schedule")
    parser.add_argument("--minutes", type=float, default=1e6, help="end the schedule after that training time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--parts", type=int, default=1, help="tasks that share a step's tokens")
    parser.add_argument("--stale", type=float, default=0.0, help="share of steps with stale prefix rows")
    parser.add_argument("--mix", type=_mix, default={"keep": 1.0}, help="tasks and weights, as keep=3,lookup=1")
    lengths = [128, 160, 192, 256, 400]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="tokens of sequences filled with prose")
    parser.add_argument("--device", help="cpu or cuda; the GPU where there is one")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; torch's default with 0")
    parser.add_argument("--bfloat16", action="store_true", help="base and arithmetic on the CPU, too")
    parser.add_argument("--save-minutes", type=float, default=5.0)
    parser.add_argument("--log-every", type=int, default=5, help="steps between two lines")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="where the default model lies")
    parser.add_argument("--start", type=Path, help="go on from this adapter, at the step at which it was written")
    parser.add_argument("--base", type=Path, help="directory of another base model with the same vocabulary")
    return parser.parse_args(arguments)


def _mix(text: str) -> dict[str, float]:
    mix = {name: float(weight or 1) for name, _, weight in (part.partition("=") for part in text.split(","))}
    if unknown := set(mix) - set(TASKS):
        raise argparse.ArgumentTypeError(f"no such task: {', '.join(sorted(unknown))}; tasks are {', '.join(TASKS)}")
    return mix


if __name__ == "__main__":
    sys.exit(main())
