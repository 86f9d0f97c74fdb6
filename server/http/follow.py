"""Opens calls to the engine, reads their Outputs and keeps the metrics up to date."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from runtime.errors import InvalidRequest
from runtime.frontend.async_engine import OutputStream
from runtime.frontend.output import Output, Submission, join_logprobs
from server.admin.metrics import Metrics
from server.context import Context


async def open_outputs(
    context: Context, submissions: list[Submission], names: Mapping[str, str], timeout_s: float | None
) -> OutputStream:
    """Submit; errors name the request's fields.

    Args:
        context: whose engine.
        submissions: what is wanted.
        timeout_s: what the request allows itself; the server may allow less.
        names: what the request calls the engine's parameters, where the names differ.

    Raises:
        RametError: as `AsyncEngine.open`, and Overloaded once the server is about to stop.
    """
    context.gate.check()
    limits = [limit for limit in (timeout_s, context.config.scheduler.max_timeout) if limit is not None]
    try:
        return await context.engine.open(submissions, min(limits, default=None))
    except InvalidRequest as error:
        param = names.get(error.param, error.param) if error.param else None
        raise InvalidRequest(error.message, param=param, code=error.code) from None


async def follow(outputs: OutputStream, metrics: Metrics) -> AsyncIterator[Output]:
    """Yield every Output, after it was booked."""
    last: dict[tuple[int, int], float] = {}
    async for output in outputs:
        key = (output.index, output.choice)
        metrics.observe(output, last.get(key))
        if output.new_token_ids:  # others tell of the prompt or of a canvas whose beginning is not decided
            last[key] = output.e2e_s
        yield output


async def collect(outputs: OutputStream, metrics: Metrics) -> list[Output]:
    """The last Output of every completion, with all its log-probabilities, by prompt, then by choice."""
    done: dict[tuple[int, int], Output] = {}
    with outputs:
        async for output in follow(outputs, metrics):
            if earlier := done.get((output.index, output.choice)):
                output.logprobs = join_logprobs(earlier.logprobs, output.logprobs)
                output.prompt_logprobs = join_logprobs(earlier.prompt_logprobs, output.prompt_logprobs)
            done[output.index, output.choice] = output
    return [done[key] for key in sorted(done)]
