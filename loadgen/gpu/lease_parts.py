"""The parts of a lease, the most valuable first: commands of `python -m loadgen`, and the seconds that they take."""

from dataclasses import dataclass

from loadgen.gpu.lease_page import BICACHE, NO_CACHE

# The cell of BiCache's paper: a prefix of 512 tokens, canvases of 256, 128 steps, 16 between refreshes, batches of 8.
_BICACHE = (
    *("bicache", "--cost", "--batch", "8", "--room", "256", "--steps", "128", "--refresh-interval", "16"),
    *("--block", "32", "--repeats", "1", "--warmup", "0", "--only", f"case={NO_CACHE}", f"case={BICACHE}"),
)
_BICACHE_ENGINE = (
    *("--model", "shapes/llada-8b", "--engine", "device=cuda", "random_weights=true"),
    "depth_table=runtime/reuse/bicache/depth_tables/llada-8b-instruct.json",
)
_REHEARSED_BICACHE = (
    *("bicache", "--cost", "--prefix", "32", "--prompt", "4", "--batch", "2", "--room", "8", "--steps", "4"),
    *("--refresh-interval", "2", "--block", "4", "--depth", "2", "--repeats", "1", "--warmup", "0"),
    *("--only", f"case={NO_CACHE}", f"case={BICACHE}", "--model", "shapes/llada-tiny"),
    *("--engine", "device=cpu", "random_weights=true", "pool_tokens=1024"),
)


@dataclass(frozen=True, slots=True)
class Part:
    """A bench that runs in a process of its own.

    Attributes:
        command: arguments of Python. `shapes/` in it stands for the directory of shapes.
        seconds: that it takes, by estimate; with less left, it is not begun.
        most: seconds after which it is killed.
        stall: seconds without a new measurement after which it is killed.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    most: float
    stall: float = 75


def parts(rehearse: bool, model: str | None) -> list[Part]:
    """All parts; `rehearse`: on a CPU with tiny models. `model`: for tokens and pairs."""
    device = ("--device", "cpu") if rehearse else ()
    given = () if model is None else ("--model", model)

    def gpu(name: str, seconds: float, *only: str, of: str | None = None) -> Part:
        filters = ("--only", *only) if only else ()
        command = ("-m", "loadgen", "gpu", "--parts", of or name, *device, *given, *filters)
        return _trial(name, command) if rehearse else Part(name, command, seconds, 60 + 2 * seconds)

    chunks = [f"rows of a step={rows}" for rows in ((64,) if rehearse else (512, 1024, 4096, 8192))]
    bicache = "-m", "loadgen", *(_REHEARSED_BICACHE if rehearse else _BICACHE + _BICACHE_ENGINE)
    return [
        gpu("kernels", 20),
        gpu("attention", 45),
        gpu("tokens", 45),
        gpu("pairs", 60),
        gpu("bounds", 12),
        gpu("decode", 75, "mode=default", "mode=eager"),
        gpu("shared prefix", 45),
        gpu("first token", 25),
        gpu("prefill", 35, f"rows of a step={256 if rehearse else 2048}"),
        _trial("BiCache", bicache) if rehearse else Part("BiCache", bicache, 70, 200),
        gpu("decode, one step at a time", 40, "mode=one step at a time", of="decode"),
        gpu("prefill, other steps", 70, *chunks, of="prefill"),
        gpu("decode, fp8 KV", 40, "mode=fp8 KV", of="decode"),
    ]


def _trial(name: str, command: tuple[str, ...]) -> Part:
    """A part of a rehearsal, on a machine that may be slow."""
    return Part(name, command, 1, 600, 300)
