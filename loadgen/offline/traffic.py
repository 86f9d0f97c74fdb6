"""Recorded traffic as block ids: traces with hashes, or prompts and a tokenizer."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from loadgen.http.workloads.file import read_entries
from loadgen.http.workloads.trace import read_trace

Trace = list[tuple[float, array]]  # seconds since the start and int32 block ids, for every request

_OWN = 16  # tokens of a block of prompts that are tokenized here


@dataclass(frozen=True)
class Traffic:
    """Time (seconds) and block ids of every request, in the order of arrival; ids are small and dense.

    Attributes:
        block_tokens: 0 in synthetic traces.
    """

    trace: Trace
    block_tokens: int


def read_traffic(path: Path, tokenizer: Path | None = None) -> Traffic:
    """A trace with block hashes or, with a tokenizer, a JSONL with `text`, `prompt` or `messages` a line.

    Prompts without a `timestamp` (ms) come a second after each other. Raises OSError, and ValueError, which names the
    line.
    """
    found: list[tuple[float, tuple[Any, ...]]]
    if tokenizer is None:
        rows = read_trace(path)
        found = [(row.at_s, row.blocks) for row in rows]
        sizes = {row.block_tokens for row in rows}
        if len(sizes) > 1:
            raise ValueError(f"{path} has blocks of different sizes: {sorted(sizes)}")
        if not all(row.blocks for row in rows):
            raise ValueError(f"{path} has requests without hash_ids; prompts need --tokenizer")
    else:
        found, sizes = sorted(_read_prompts(path, tokenizer), key=itemgetter(0)), {_OWN}
    numbers: dict[Any, int] = {}
    trace = [
        (at_s, array("i", [numbers.setdefault(block, len(numbers)) for block in blocks])) for at_s, blocks in found
    ]
    return Traffic(trace, sizes.pop())


def _read_prompts(path: Path, tokenizer_path: Path) -> Iterator[tuple[float, tuple[bytes, ...]]]:
    """Seconds and blocks of every prompt; a block is the tokens from the start of the prompt to its end."""
    from runtime.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(tokenizer_path if tokenizer_path.is_dir() else tokenizer_path.parent)
    for number, (where, entry) in enumerate(read_entries(path)):
        try:
            record = entry.get("body", entry)  # the form of OpenAI's batch files
            if "messages" in record:
                text = tokenizer.apply_chat_template(record["messages"], add_generation_prompt=True)
            else:
                text = str(record["text"] if "text" in record else record["prompt"])
            tokens = array("i", tokenizer.encode(text, "messages" not in record))
            blocks = tuple(tokens[:stop].tobytes() for stop in range(_OWN, len(tokens) + _OWN, _OWN))
            yield entry.get("timestamp", 1000 * number) / 1000, blocks
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where} is no request with text, prompt or messages: {error!r}") from None


def reuse_gaps(trace: Trace) -> list[float]:
    """Seconds between two uses of a block, of every second and later use, in order of length."""
    last: dict[int, float] = {}
    gaps = []
    for at_s, blocks in trace:
        gaps += [at_s - last[block] for block in blocks if block in last]
        last |= dict.fromkeys(blocks, at_s)
    return sorted(gaps)
