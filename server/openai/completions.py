"""`/v1/completions`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from runtime.errors import InvalidRequest
from runtime.frontend.async_engine import OutputStream
from runtime.frontend.output import Output, Submission, new_rid, prompts_of
from runtime.models.tokenizer import Tokenizer
from runtime.protocol import TokenLogprob
from server.auth.keys import Asker, Tenant
from server.context import Context, Ctx
from server.http import examples
from server.http.follow import collect, follow, open_outputs
from server.http.sse import Events, EventStream, unless_gone
from server.openai.common import check_model, envelope, finish_reason, usage
from server.openai.types import CompletionRequest

router = APIRouter(prefix="/v1", tags=["openai"])


def submissions_of(body: CompletionRequest, tenant: Tenant) -> list[Submission]:
    """One submission for each prompt. Raises InvalidRequest."""
    if body.suffix is not None:
        raise InvalidRequest("suffix is not supported", param="suffix")
    if body.best_of is not None and body.best_of != body.n:
        raise InvalidRequest("best_of is not supported; use n", param="best_of")
    if body.echo and body.logprobs is not None and body.n > 1:
        raise InvalidRequest("echo with logprobs needs n = 1", param="echo")
    prompts, _ = prompts_of(body.prompt)
    if not prompts:
        raise InvalidRequest("prompt holds no prompts", param="prompt")
    sampling = body.sampling(body.max_tokens)
    return [
        Submission(
            prompt=prompt,
            sampling=sampling,
            account=tenant.account,
            namespace=tenant.namespace(body.cache_salt, body.cache_scope),
            logprobs=body.logprobs,
            prompt_logprobs_from=0 if body.echo and body.logprobs is not None else None,
            priority=tenant.priority(body.priority),
            diffusion=body.diffusion,
        )
        for prompt in prompts
    ]


@router.post("/completions", response_model=None, responses=examples.COMPLETIONS)
async def completions(body: CompletionRequest, request: Request, context: Ctx, tenant: Asker) -> Response:
    """Complete one prompt or several."""
    check_model(body.model, context)
    submissions = submissions_of(body, tenant)
    outputs = await open_outputs(context, submissions, body.NAMES, body.timeout_s)
    rid = f"cmpl-{new_rid()}"
    if body.stream:
        return EventStream(_events(body, rid, submissions, outputs, context), outputs.close)
    return await unless_gone(request, _answer(body, rid, submissions, outputs, context))


async def _answer(
    body: CompletionRequest, rid: str, submissions: list[Submission], outputs: OutputStream, context: Context
) -> dict[str, Any]:
    done = await collect(outputs, context.metrics)
    choices = []
    for output in done:
        writer = _Choice(body, submissions[output.index], context.engine.tokenizer)
        choices.append(writer.write(output, output.text))
    return {**envelope("text_completion", rid, context), "choices": choices, "usage": usage(done)}


async def _events(
    body: CompletionRequest, rid: str, submissions: list[Submission], outputs: OutputStream, context: Context
) -> Events:
    writers: dict[tuple[int, int], _Choice] = {}
    last: dict[tuple[int, int], Output] = {}
    async for output in follow(outputs, context.metrics):
        key = (output.index, output.choice)
        last[key] = output
        if key not in writers:
            writers[key] = _Choice(body, submissions[output.index], context.engine.tokenizer)
        event = {**envelope("text_completion", rid, context), "choices": [writers[key].write(output, output.delta)]}
        yield event | ({"usage": None} if body.with_usage else {})
    if body.with_usage:
        yield {**envelope("text_completion", rid, context), "choices": [], "usage": usage(last.values())}


class _Choice:
    """The fields of one choice, whole or for each event of a stream."""

    def __init__(self, body: CompletionRequest, submission: Submission, tokenizer: Tokenizer):
        self._body = body
        self._submission = submission
        self._tokenizer = tokenizer
        self._offset = 0
        self._started = False

    def write(self, output: Output, text: str) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._logprobs([*(output.prompt_logprobs or []), *(output.logprobs or [])])
        if self._body.echo and not self._started:
            text = self._prompt() + text
        self._started = True
        return {
            "index": output.index * self._body.n + output.choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(output),
        }

    def _prompt(self) -> str:
        prompt = self._submission.prompt
        return self._tokenizer.decode(prompt, False) if isinstance(prompt, list) else str(prompt)

    def _logprobs(self, items: list[TokenLogprob]) -> dict[str, Any]:
        tokens = [self._tokenizer.decode([item.token], False) for item in items]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        top = [{self._tokenizer.decode([t], False): value for t, value in item.top} for item in items]
        return {
            "tokens": tokens,
            "token_logprobs": [item.logprob for item in items],
            "top_logprobs": [entry or None for entry in top] if self._body.logprobs else None,
            "text_offset": offsets,
        }
