"""Submissions to the engine, and their Outputs, which are recorded in the metrics."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping

from fastapi import Request

from runtime.errors import InvalidRequest, RametError
from runtime.frontend.output import Output, Submission
from runtime.frontend.stream import OutputStream
from server.context import Context
from server.explain.inquiry import MakeConversation, plain_text, remember
from server.http.answers import write_logprobs
from server.http.sse import while_there


async def open_outputs(
    request: Request,
    context: Context,
    submissions: list[Submission],
    names: Mapping[str, str],
    timeout_s: float | None,
    conversation: MakeConversation = plain_text,
    answer: str | None = None,
) -> OutputStream:
    """Submit while the client is there; errors name the request's fields.

    Args:
        names: the request's fields by the engine's parameters, where their names differ.
        timeout_s: the request's own timeout; `--max-timeout` may be shorter.
        conversation: that a single submission renders, for reports of prompts that keep missing the cache.
        answer: the answer's id for later comparisons, unless it ends with the submission's `rid`.

    Raises:
        RametError: as `AsyncEngine.open`, Overloaded while the server stops, ClientGone.
    """
    context.gate.check()
    limits = [limit for limit in (timeout_s, context.config.scheduler.max_timeout) if limit is not None]
    began = time.monotonic()
    try:
        outputs = await while_there(request, context.engine.open(submissions, min(limits, default=None)))
    except RametError as error:
        for submission in submissions:
            context.journal.add_failed(submission, None, time.monotonic() - began, error)
        if not isinstance(error, InvalidRequest):
            raise
        param = names.get(error.param, error.param) if error.param else None
        raise InvalidRequest(error.message, param=param, code=error.code) from None
    try:
        for index, submission in enumerate(submissions):
            await remember(context, outputs, submission, conversation, None if index else answer)
    except BaseException:
        outputs.close()
        raise
    return outputs


async def follow(outputs: OutputStream, context: Context) -> AsyncIterator[Output]:
    """The Outputs, each recorded in the metrics; the journal notes the end of each completion, however it came."""
    last: dict[tuple[int, int], Output] = {}
    unended = {(index, choice) for index, one in enumerate(outputs.submissions) for choice in range(one.sampling.n)}
    failure: RametError | None = None
    began = time.monotonic()
    try:
        async for output in outputs:
            key = (output.index, output.choice)
            before = last.get(key)
            context.metrics.observe(output, None if before is None else before.e2e_s)
            if output.finish is not None:
                unended.discard(key)
                context.journal.add(outputs.submissions[output.index], output)
            if output.new_token_ids:  # an Output without tokens reports the prompt or a canvas
                last[key] = output
            yield output
    except RametError as error:
        failure = error
        raise
    finally:
        for key in sorted(unended):
            context.journal.add_failed(outputs.submissions[key[0]], last.get(key), time.monotonic() - began, failure)


async def collect(
    outputs: OutputStream, context: Context, write: Callable[[Output], None] | None = None
) -> list[Output]:
    """The last Output of every completion, by prompt, then by choice; `write` takes the log-probabilities of each."""
    done: dict[tuple[int, int], Output] = {}
    with outputs:
        async for output in follow(outputs, context):
            if write is not None:
                await write_logprobs(outputs, write, output)
            done[output.index, output.choice] = output
    return [done[key] for key in sorted(done)]
