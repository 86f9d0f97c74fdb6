"""`/v1/completions`."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from runtime.errors import InvalidRequest
from runtime.frontend.output import Output, Submission, new_rid, prompts_of
from runtime.frontend.stream import OutputStream
from runtime.models.tokenizer import Tokenizer
from server.auth.keys import Asker, EveryKey, Tenant
from server.context import Context, Ctx
from server.explain.inquiry import Inquiry, ask, explained
from server.http import examples
from server.http.answers import JsonList, write_logprobs
from server.http.follow import collect, follow, open_outputs
from server.http.sse import Events, EventStream, unless_gone
from server.openai.common import add_prompt_logprobs, envelope, finish_reason, most_logprobs, reuse_of, usage
from server.openai.formats import only
from server.openai.types import CompletionRequest

router = EveryKey(prefix="/v1", tags=["openai"])


def submissions_of(body: CompletionRequest, tenant: Tenant, context: Context) -> list[Submission]:
    """One submission for each prompt. Raises InvalidRequest, NotFound."""
    if body.best_of is not None and body.best_of != body.n:
        raise InvalidRequest("best_of is not supported; use n", param="best_of")
    scored = (body.echo and body.logprobs is not None) or body.prompt_logprobs is not None
    if scored and body.n > 1:
        raise InvalidRequest("log-probabilities of a prompt need n = 1", param="n")
    prompts, is_list = prompts_of(body.prompt)
    if not prompts:
        raise InvalidRequest("prompt holds no prompts", param="prompt")
    sampling = body.sampling(body.max_tokens, only(body.constraints()))
    rid = body.request_id or new_rid()
    return [
        Submission(
            prompt=prompt,
            sampling=sampling,
            rid=f"{rid}-{i}" if is_list else rid,
            account=tenant.account,
            namespace=context.namespace(tenant, body),
            logprobs=most_logprobs(body.logprobs, body.prompt_logprobs),
            prompt_logprobs_from=0 if scored else None,
            priority=tenant.priority(body.priority),
            add_special_tokens=body.add_special_tokens,
            diffusion=body.diffusion,
            store=body.cache.store,
            reuse=body.reuse,
            last_tokens=body.truncate_prompt_tokens,
            show_tokens=body.return_token_ids,
        )
        for i, prompt in enumerate(prompts)
    ]


@router.post("/completions", response_model=None, responses=examples.COMPLETIONS)
async def completions(body: CompletionRequest, request: Request, context: Ctx, tenant: Asker) -> Response:
    """Complete one prompt or several."""
    model, submissions = context.check_model(body.model), submissions_of(body, tenant, context)
    inquiry = ask(context, submissions, body.explain, body.comparison_response_id)
    rid = f"cmpl-{body.request_id or submissions[0].rid}"
    outputs = await open_outputs(request, context, submissions, body.NAMES, body.timeout_s, answer=rid)
    writers = {
        (index, choice): _Choice(body, submission, outputs, context.engine.tokenizer, inquiry)
        for index, submission in enumerate(submissions)
        for choice in range(body.n)
    }
    head = envelope("text_completion", rid, context, model)
    if body.stream:
        return EventStream(_events(body, head, writers, outputs, context), outputs.close)
    return await unless_gone(request, _answer(head, writers, outputs, context))


_Writers = dict[tuple[int, int], "_Choice"]


async def _answer(head: dict[str, Any], writers: _Writers, outputs: OutputStream, context: Context) -> dict[str, Any]:
    done = await collect(outputs, context, lambda output: writers[output.index, output.choice].add(output))
    choices = [
        await writers[output.index, output.choice].write(output, output.text)
        | (reuse_of(output) if len(done) > 1 else {})
        for output in done
    ]
    answer = {**head, "choices": choices, "usage": usage(done)}
    return answer | reuse_of(done[0])


async def _events(
    body: CompletionRequest, head: dict[str, Any], writers: _Writers, outputs: OutputStream, context: Context
) -> Events:
    last: dict[tuple[int, int], Output] = {}
    extra: dict[str, Any] = {"usage": None} if body.with_usage else {}
    async for output in follow(outputs, context):
        key = (output.index, output.choice)
        last[key] = output
        await write_logprobs(outputs, writers[key].add, output)
        choice = await writers[key].write(output, output.delta)
        if body.return_token_ids:
            choice["token_ids"] = output.new_token_ids
        yield {**head, "choices": [choice], **(reuse_of(output) if output.finish is not None else {}), **extra}
    if body.with_usage:
        yield {**head, "choices": [], "usage": usage(last.values())}


class _Choice:
    """The fields of one choice, whole or for each event of a stream."""

    def __init__(
        self,
        body: CompletionRequest,
        submission: Submission,
        outputs: OutputStream,
        tokenizer: Tokenizer,
        inquiry: Inquiry | None,
    ):
        self._body = body
        self._submission = submission
        self._outputs = outputs
        self._inquiry = inquiry
        self._prompt_logprobs = JsonList()
        self._tokenizer = tokenizer
        self._offset = 0
        self._started = False
        self._fields = self._empty()

    def _empty(self) -> dict[str, JsonList | None]:
        if self._body.logprobs is None:
            return {}
        top = JsonList() if self._body.logprobs else None
        return {"tokens": JsonList(), "token_logprobs": JsonList(), "top_logprobs": top, "text_offset": JsonList()}

    def add(self, output: Output) -> None:
        """Add log-probabilities to those that are written next."""
        text_of = self._tokenizer.token_text
        add_prompt_logprobs(self._prompt_logprobs, output, self._body.prompt_logprobs, text_of)
        echoed = (output.prompt_logprobs or ()) if self._body.echo else ()
        for item in [*echoed, *(output.logprobs or ())]:
            text = text_of(item.token)
            entry = {"tokens": text, "token_logprobs": item.logprob, "text_offset": self._offset}
            entry["top_logprobs"] = {text_of(token): value for token, value in item.top[: self._body.logprobs]} or None
            for name, values in self._fields.items():
                if values is not None:
                    values.append(entry[name])
            self._offset += len(text)

    async def write(self, output: Output, text: str) -> dict[str, Any]:
        """The fields with `text`, and the log-probabilities that were added since the last call."""
        fields, self._fields = self._fields, self._empty()
        if self._body.echo and not self._started:
            text = self._prompt() + text
        ids: dict[str, Any] = {}
        if self._body.return_token_ids:
            first = {} if self._started else {"prompt_token_ids": self._outputs.prompts[output.index]}
            ids = first | {"token_ids": output.token_ids}
        if self._body.prompt_logprobs is not None:
            ids["prompt_logprobs"] = self._prompt_logprobs
        self._started = True
        return {
            "index": output.index * self._body.n + output.choice,
            "text": text,
            "logprobs": fields or None,
            "finish_reason": finish_reason(output),
            **ids,
            **await explained(self._inquiry, self._outputs, output),
        }

    def _prompt(self) -> str:
        prompt = self._submission.prompt
        return self._tokenizer.decode(prompt, False) if isinstance(prompt, list) else str(prompt)
