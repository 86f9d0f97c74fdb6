"""Reads the Outputs of a call and keeps the metrics up to date."""

from __future__ import annotations

from collections.abc import AsyncIterator

from runtime.client import OutputStream
from runtime.output import Output
from server.metrics import Metrics


async def follow(outputs: OutputStream, metrics: Metrics) -> AsyncIterator[Output]:
    """Yield every Output, after it was booked."""
    last: dict[tuple[int, int], float] = {}
    async for output in outputs:
        key = (output.index, output.choice)
        metrics.observe(output, last.get(key))
        last[key] = output.e2e_s
        yield output


async def collect(outputs: OutputStream, metrics: Metrics) -> list[Output]:
    """The last Output of every completion, with all its log-probabilities, by prompt, then by choice."""
    done: dict[tuple[int, int], Output] = {}
    with outputs:
        async for output in follow(outputs, metrics):
            if earlier := done.get((output.index, output.choice)):
                output.logprobs = _joined(earlier.logprobs, output.logprobs)
                output.prompt_logprobs = _joined(earlier.prompt_logprobs, output.prompt_logprobs)
            done[output.index, output.choice] = output
    return [done[key] for key in sorted(done)]


def _joined(first: list | None, second: list | None) -> list | None:
    return second if first is None else first if second is None else [*first, *second]
