"""Recorded traffic as block ids: traces with hashes, or prompts and a tokenizer."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Trace = list[tuple[float, array]]  # seconds since the start and int32 block ids, for every request

# Tokens of a block of Mooncake's traces, and of prompts that are tokenized here.
MOONCAKE, _OWN = 512, 16


@dataclass(frozen=True)
class Traffic:
    """Time (seconds) and block ids of every request, in the order of arrival; ids are small and dense.

    Attributes:
        block_tokens: 0 in synthetic traces.
    """

    trace: Trace
    block_tokens: int


def read_traffic(path: Path, tokenizer: Path | None = None) -> Traffic:
    """A JSONL with `timestamp` (ms) and `hash_ids` a line; or, with a tokenizer, with `text`, `prompt` or `messages`.

    Prompts without a timestamp come a second after each other. Raises ValueError, which names the line, OSError.
    """
    cut = None if tokenizer is None else _cutter(tokenizer)
    numbers: dict[Any, int] = {}
    trace, sizes = [], {_OWN} if cut else set()
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if cut is None:
                blocks, at_s = record["hash_ids"], record["timestamp"] / 1000
                sizes.add(int(record.get("block_tokens", MOONCAKE)))
                if not isinstance(blocks, list) or min(sizes) < 1:
                    raise ValueError("hash_ids is a list, block_tokens at least 1")
            else:
                blocks, at_s = cut(record), record.get("timestamp", 1000 * number) / 1000
            trace.append((at_s, array("i", [numbers.setdefault(block, len(numbers)) for block in blocks])))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            wanted = "timestamp and hash_ids (prompts need --tokenizer)" if cut is None else "text, prompt or messages"
            raise ValueError(f"{path}, line {number}: not a request with {wanted}: {error!r}") from None
    if not trace:
        raise ValueError(f"{path} has no requests")
    if len(sizes) > 1:
        raise ValueError(f"{path} has blocks of different sizes: {sorted(sizes)}")
    return Traffic(sorted(trace, key=lambda request: request[0]), sizes.pop())


def _cutter(path: Path) -> Callable[[dict[str, Any]], list[bytes]]:
    """A function from a line's prompt to its blocks, each with all before it."""
    from runtime.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(path if path.is_dir() else path.parent)

    def cut(record: dict[str, Any]) -> list[bytes]:
        record = record.get("body", record)  # the form of OpenAI's batch files
        if "messages" in record:
            text = tokenizer.apply_chat_template(record["messages"], add_generation_prompt=True)
        else:
            text = str(record["text"] if "text" in record else record["prompt"])
        tokens = array("i", tokenizer.encode(text, "messages" not in record))
        return [tokens[:stop].tobytes() for stop in range(_OWN, len(tokens) + _OWN, _OWN)]

    return cut


def reuse_gaps(trace: Trace) -> list[float]:
    """Seconds between two uses of a block, of every second and later use, in order of length."""
    last: dict[int, float] = {}
    gaps = []
    for at_s, blocks in trace:
        gaps += [at_s - last[block] for block in blocks if block in last]
        last |= dict.fromkeys(blocks, at_s)
    return sorted(gaps)
