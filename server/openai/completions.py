"""`/v1/completions`."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from fastapi import Request, Response

from runtime.errors import InvalidRequest
from runtime.frontend.output import Output, Submission, new_rid, prompts_of
from runtime.models.tokenizer import Offsets
from server.auth.keys import CurrentTenant, EveryKey, Tenant
from server.explain.reason import Explanation
from server.generation.service import Generation, Service
from server.http.answers import JsonList
from server.http.context import Context
from server.http.limits import MOST_BYTES
from server.openai.common import ChoicesWriter, finish_reason
from server.openai.formats import only
from server.openai.infill import infill_prompt
from server.openai.types import CompletionRequest

router = EveryKey(prefix="/v1", tags=["openai"])


def submissions_of(body: CompletionRequest, tenant: Tenant, context: Context) -> list[Submission]:
    """One submission for each prompt. Raises InvalidRequest, NotFound."""
    if body.best_of is not None and body.best_of != body.n:
        raise InvalidRequest("best_of is not supported; use n", param="best_of")
    scored = body.echo and body.logprobs is not None
    if scored and body.n > 1:
        raise InvalidRequest("log-probabilities of a prompt need n = 1", param="n")
    prompts, is_list = prompts_of(body.prompt)
    if not prompts:
        raise InvalidRequest("prompt holds no prompts", param="prompt")
    if body.suffix:
        if body.echo or not all(isinstance(prompt, str) for prompt in prompts):
            raise InvalidRequest("suffix needs prompts as texts, without echo", param="suffix")
        if len(prompts) * len(body.suffix) > MOST_BYTES:
            raise InvalidRequest(f"suffix and prompts have more than {MOST_BYTES} characters together", param="suffix")
        prompts = [infill_prompt(context.engine.tokenizer, str(prompt), body.suffix) for prompt in prompts]
    sampling = body.sampling(body.max_tokens, only(body.constraints()))
    rid = body.request_id or new_rid()
    rids = [f"{rid}-{i}" if is_list else rid for i in range(len(prompts))]
    top = body.most_top(body.logprobs)
    first = {"prompt_logprobs_from": 0} if scored else {}
    return [
        body.submission(prompt, sampling, tenant, context, rid=own, logprobs=top, **first)
        for prompt, own in zip(prompts, rids, strict=True)
    ]


@router.post("/completions", response_model=None)
async def completions(body: CompletionRequest, request: Request, service: Service, tenant: CurrentTenant) -> Response:
    """Complete one prompt or several."""
    service.context.check_model(body.model)
    submissions = submissions_of(body, tenant, service.context)
    rid = f"cmpl-{body.request_id or submissions[0].rid}"
    generation = await service.submit(request, body, submissions, answer=rid)
    writer = CompletionWriter(rid, body, generation, service.context)
    return await generation.respond(request, writer, body.stream)


class CompletionWriter(ChoicesWriter):
    """The answer to completions."""

    def __init__(self, rid: str, body: CompletionRequest, generation: Generation, context: Context):
        super().__init__("text_completion", rid, body, generation.outputs.prompts, context)
        self._body = body
        self._submissions = generation.outputs.submissions
        self._tokenizer = context.engine.tokenizer
        self._logprobs: dict[tuple[int, int], dict[str, JsonList | None]] = defaultdict(self._empty)
        # By prompt and choice, what counts the characters of the tokens whose log-probabilities were added.
        self._offsets: dict[tuple[int, int], Offsets] = defaultdict(lambda: Offsets(self._tokenizer))

    def _empty(self) -> dict[str, JsonList | None]:
        top = JsonList() if self._body.logprobs else None
        return {"tokens": JsonList(), "token_logprobs": JsonList(), "top_logprobs": top, "text_offset": JsonList()}

    def add_logprobs(self, output: Output) -> None:
        key, text_of = (output.index, output.choice), self.text_of
        self.add_prompt_logprobs(output)
        if self._body.logprobs is None:
            return
        echoed = (output.prompt_logprobs or []) if self._body.echo else []
        hidden = self._tokenizer.special_ids if self._body.skip_special_tokens else frozenset()
        own = output.logprobs or []
        for i, item in enumerate([*echoed, *own]):
            text = text_of(item.token)
            is_shown = i >= self._num_added(output.index) if i < len(echoed) else item.token not in hidden
            offset = self._offsets[key].push(item.token, is_shown)
            entry: dict[str, Any] = {"tokens": text, "token_logprobs": item.logprob, "text_offset": offset}
            entry["top_logprobs"] = {text_of(token): value for token, value in item.top[: self._body.logprobs]} or None
            for name, values in self._logprobs[key].items():
                if values is not None:
                    values.append(entry[name])

    def write(self, output: Output, why: Explanation | None) -> Iterable[dict[str, Any]]:
        left_out = self._left_out if self.begins(output) else {}
        yield self.chunk(output, self._choice(output, output.delta, output.new_token_ids, why), **left_out)

    async def answer(self, generation: Generation) -> dict[str, Any]:
        done = await generation.collect(self.add_logprobs)
        choices = [self._choice(one, one.text, one.token_ids, await generation.explain(one)) for one in done]
        return self.whole(done, choices)

    def _choice(self, output: Output, text: str, tokens: list[int], why: Explanation | None) -> dict[str, Any]:
        """A choice with the given text and tokens: the new ones in a stream, otherwise all."""
        body, key = self._body, (output.index, output.choice)
        logprobs = self._logprobs.pop(key, self._empty())
        ids: dict[str, Any] = {"token_ids": tokens} if body.return_token_ids else {}
        if self.begins(output):
            text = self._prompt(output.index) + text if body.echo else text
            ids |= {"prompt_token_ids": self.prompts[output.index]} if body.return_token_ids else {}
        explained = {} if why is None else {"explain": why.describe()}
        return {
            "index": output.index * body.n + output.choice,
            "text": text,
            "logprobs": None if body.logprobs is None else logprobs,
            "finish_reason": finish_reason(output),
            **self.prompt_logprobs_of(output),
            **ids,
            **explained,
        }

    def _num_added(self, index: int) -> int:
        """Number of tokens before a prompt's text."""
        is_text = not isinstance(self._submissions[index].prompt, list)
        return len(self._tokenizer.leading_ids) if is_text and self._body.add_special_tokens else 0

    def _prompt(self, index: int) -> str:
        prompt = self._submissions[index].prompt
        return self._tokenizer.decode(prompt, False) if isinstance(prompt, list) else str(prompt)
