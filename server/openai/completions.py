"""`/v1/completions`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from runtime.errors import InvalidRequest
from runtime.frontend.output import Output, Submission, prompts_of
from runtime.frontend.stream import OutputStream
from runtime.models.tokenizer import Tokenizer
from server.auth.keys import Asker, Tenant
from server.context import Context, Ctx
from server.explain.inquiry import Inquiry, ask, explained
from server.http import examples
from server.http.answers import JsonList, write_logprobs
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
    inquiry = ask(context, submissions, body.explain, body.comparison_response_id)
    outputs = await open_outputs(request, context, submissions, body.NAMES, body.timeout_s)
    writers = {
        (index, choice): _Choice(body, submission, context.engine.tokenizer, inquiry)
        for index, submission in enumerate(submissions)
        for choice in range(body.n)
    }
    rid = f"cmpl-{submissions[0].rid}"
    if body.stream:
        return EventStream(_events(body, rid, writers, outputs, context), outputs.close)
    return await unless_gone(request, _answer(rid, writers, outputs, context))


_Writers = dict[tuple[int, int], "_Choice"]


async def _answer(rid: str, writers: _Writers, outputs: OutputStream, context: Context) -> dict[str, Any]:
    done = await collect(outputs, context.metrics, lambda output: writers[output.index, output.choice].add(output))
    choices = [await writers[output.index, output.choice].write(outputs, output, output.text) for output in done]
    return {**envelope("text_completion", rid, context), "choices": choices, "usage": usage(done)}


async def _events(
    body: CompletionRequest, rid: str, writers: _Writers, outputs: OutputStream, context: Context
) -> Events:
    last: dict[tuple[int, int], Output] = {}
    async for output in follow(outputs, context.metrics):
        key = (output.index, output.choice)
        last[key] = output
        await write_logprobs(outputs, writers[key].add, output)
        choice = await writers[key].write(outputs, output, output.delta)
        event = {**envelope("text_completion", rid, context), "choices": [choice]}
        yield event | ({"usage": None} if body.with_usage else {})
    if body.with_usage:
        yield {**envelope("text_completion", rid, context), "choices": [], "usage": usage(last.values())}


class _Choice:
    """The fields of one choice, whole or for each event of a stream."""

    def __init__(self, body: CompletionRequest, submission: Submission, tokenizer: Tokenizer, inquiry: Inquiry | None):
        self._body = body
        self._submission = submission
        self._tokenizer = tokenizer
        self._inquiry = inquiry
        self._offset = 0
        self._started = False
        self._fields = self._empty()

    def _empty(self) -> dict[str, JsonList | None]:
        top = JsonList() if self._body.logprobs else None
        return {"tokens": JsonList(), "token_logprobs": JsonList(), "top_logprobs": top, "text_offset": JsonList()}

    def add(self, output: Output) -> None:
        """Add log-probabilities to those that are written next."""
        text_of = self._tokenizer.token_text
        for item in [*(output.prompt_logprobs or ()), *(output.logprobs or ())]:
            text = text_of(item.token)
            entry = {"tokens": text, "token_logprobs": item.logprob, "text_offset": self._offset}
            entry["top_logprobs"] = {text_of(token): value for token, value in item.top} or None
            for name, values in self._fields.items():
                if values is not None:
                    values.append(entry[name])
            self._offset += len(text)

    async def write(self, outputs: OutputStream, output: Output, text: str) -> dict[str, Any]:
        """The fields with `text`, and the log-probabilities that were added since the last call."""
        fields, self._fields = self._fields, self._empty()
        if self._body.echo and not self._started:
            text = self._prompt() + text
        self._started = True
        choice = {
            "index": output.index * self._body.n + output.choice,
            "text": text,
            "logprobs": fields if self._body.logprobs is not None else None,
            "finish_reason": finish_reason(output),
        }
        return choice | await explained(self._inquiry, outputs, output)

    def _prompt(self) -> str:
        prompt = self._submission.prompt
        return self._tokenizer.decode(prompt, False) if isinstance(prompt, list) else str(prompt)
