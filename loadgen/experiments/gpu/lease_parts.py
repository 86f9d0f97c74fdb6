"""The parts of a lease, the most valuable first: commands of `python -m loadgen`, and the seconds that they take."""

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.experiments.gpu.lease_page import BICACHE, NO_CACHE

# The cell of BiCache's paper: a prefix of 512 tokens, canvases of 256, 128 steps, 16 between refreshes, batches of 8.
_BICACHE = (
    "bicache", "--cost", "--batch", "8", "--room", "256", "--steps", "128", "--refresh-interval", "16",
    "--block", "32", "--repeats", "1", "--warmup", "0", "--only", f"case={NO_CACHE}", f"case={BICACHE}",
)  # fmt: skip
_BICACHE_ENGINE = (
    "--model",
    "shapes/llada-8b",
    "--engine",
    "device=cuda",
    "random_weights=true",
    "depth_table=runtime/features/diffusion/bicache/depth_tables/llada-8b-instruct.json",
)
_REHEARSED_BICACHE = (
    "bicache", "--cost", "--prefix", "32", "--prompt", "4", "--batch", "2", "--room", "8", "--steps", "4",
    "--refresh-interval", "2", "--block", "4", "--depth", "2", "--repeats", "1", "--warmup", "0",
    "--only", f"case={NO_CACHE}", f"case={BICACHE}", "--model", "shapes/llada-tiny",
    "--engine", "device=cpu", "random_weights=true", "pool_tokens=1024",
)  # fmt: skip


_MODES = ("default", "eager", "no cascade", "eager, no cascade")
_OTHER_MODES = ("one step at a time", "fp8 KV")
_TINY_LOAD = ("--clients", "32", "--duration", "1", "--prompt-tokens", "16", "--output-tokens", "4")


@dataclass(frozen=True, slots=True)
class Part:
    """Parts of a bench that run in a process of their own: a start alone takes some 15 s, with all imports.

    Attributes:
        command: arguments of Python. `shapes/` in it stands for the directory of shapes.
        seconds: that it takes, by an estimate: measured on an H200, or a guess.
        least: seconds with which it is worth to begin; it goes on until there are none left.
        most: seconds after which it is killed.
        stall: seconds without a new measurement after which it is killed, and another process goes on.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    least: float
    most: float
    stall: float = 75


def parts(rehearse: bool, model: str | None) -> list[Part]:
    """All parts; `rehearse`: on a CPU with tiny models. `model`: for tokens and pairs."""
    device = ("--device", "cpu") if rehearse else ()
    given = () if model is None else ("--model", model)

    def part(name: str, seconds: float, least: float, *words: str, stall: float = 60) -> Part:
        command = ("-m", "loadgen", *words)
        if rehearse:  # on a machine that may be slow
            return Part(name, command, 1, 1, 900, 300)
        return Part(name, command, seconds, least, 40 + 2 * seconds, stall)

    def gpu(name: str, seconds: float, *names: str, modes: Sequence[str] = (), rows: Sequence[int] = ()) -> Part:
        only = [*(f"mode={mode}" for mode in modes), *(f"rows of a step={count}" for count in rows)]
        filters = ("--only", *only) if only else ()
        return part(name, seconds, 25, "gpu", "--parts", *names, *device, *given, *filters)

    load = _TINY_LOAD if rehearse else ("--model", "shapes/llama-8b")
    user = ("user", *device, *load)
    bicache = _REHEARSED_BICACHE if rehearse else _BICACHE + _BICACHE_ENGINE
    return [
        gpu("kernels", 26, "kernels", "attention"),
        gpu("tokens", 75, "tokens", "families", "pairs"),
        part("user", 90, 60, *user, stall=90),
        gpu(
            "speed", 85, "bounds", "decode", "shared prefix", "first token", "steps", "prefill", modes=_MODES,
            rows=(256 if rehearse else 2048,),
        ),
        gpu("products", 30, "products"),
        part("BiCache", 70, 70, *bicache, stall=75),
        gpu(
            "other ways", 90, "decode", "prefill", modes=_OTHER_MODES,
            rows=(64,) if rehearse else (512, 1024, 4096, 8192),
        ),
    ]  # fmt: skip
