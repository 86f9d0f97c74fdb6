"""SGLang's `/generate`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from fastapi import Request, Response
from pydantic import Field

from runtime.errors import InvalidRequest
from runtime.frontend.output import Output, Prompt, Submission, new_rid, prompts_of
from runtime.frontend.stream import OutputStream
from runtime.models.tokenizer import Tokenizer
from runtime.params import ReuseParams, SamplingParams
from runtime.protocol import TokenLogprob
from server.auth.keys import Asker, EveryKey, Tenant
from server.context import Context, Ctx
from server.documents.wire import SegmentPrompts, compile_segments, count_characters
from server.explain.inquiry import Inquiry, ask, explained
from server.http import examples, fields
from server.http.answers import JsonList, write_logprobs
from server.http.follow import collect, follow, open_outputs
from server.http.sse import Events, EventStream, unless_gone
from server.http.wire import (
    AnswerId,
    Diffusion,
    IdPrompts,
    OneOrMany,
    OwnFields,
    Reuse,
    Rid,
    Sampling,
    Text,
    example,
)

router = EveryKey(tags=["generate"])

MAX_TOP_LOGPROBS = 128
# Log-probabilities in an event; each event repeats the earlier ones, and large events delay all streams.
MAX_REPEATED = 1 << 16


class GenerateRequest(OwnFields):
    """One prompt or several; exactly one of `text`, `input_ids`, `segments` and `pml`."""

    IGNORED = fields.OPERATION
    NEUTRAL: ClassVar[Mapping[str, fields.Values]] = fields.MODEL
    ALIASES: ClassVar[Mapping[str, str]] = {"extra_key": "cache_salt", "return_prompt_token_ids": "return_token_ids"}

    model_config = example(text="The capital of France is", sampling_params={"max_new_tokens": 16, "temperature": 0})

    model: Text | None = Field(None, description="default: the one that is served")
    text: OneOrMany[Text] | None = None
    input_ids: IdPrompts | None = None
    pml: OneOrMany[Text] | None = Field(
        None, description="prompts that import modules of a schema: <prompt schema=...>"
    )
    segments: SegmentPrompts | None = Field(None, description="prompts of texts and documents, in order")
    reuse: Reuse | None = Field(
        None, description="of documents, or of reasoning steps; default: --document-reuse or --reasoning-cache"
    )
    sampling_params: OneOrMany[Sampling] = Field(default_factory=Sampling)
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = Field(-1, ge=-1, description="position from which prompt tokens are reported; -1: none")
    top_logprobs_num: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    return_text_in_logprobs: bool = False
    return_token_ids: bool = Field(False, description="the prompt's tokens in meta_info")
    rid: OneOrMany[Rid] | None = None
    comparison_response_id: AnswerId | None = None
    diffusion: Diffusion | None = None

    def names(self) -> dict[str, str]:
        """The request's fields by the engine's names for them."""
        sampling = {name: f"sampling_params.{name}" for name in SamplingParams.model_fields}
        return {**sampling, "prompt": self.given[0], "prompt_logprobs_from": "logprob_start_len"}

    @property
    def given(self) -> list[str]:
        """The fields that hold prompts."""
        return [name for name in ("text", "input_ids", "segments", "pml") if getattr(self, name) is not None]

    @property
    def prompt_logprobs_from(self) -> int | None:
        """The first prompt position with log-probabilities; None: none."""
        return self.logprob_start_len if self.return_logprob and self.logprob_start_len >= 0 else None


def submissions_of(body: GenerateRequest, tenant: Tenant, context: Context) -> tuple[list[Submission], bool]:
    """The submissions of a request, and whether it was a list. Raises InvalidRequest."""
    if len(body.given) != 1:
        raise InvalidRequest("exactly one of text, input_ids, segments and pml must be given", param="text")
    prompts, characters, is_list = _prompts(body, tenant.account, context)
    if not prompts:
        raise InvalidRequest("a batch has at least one prompt", param="text")
    sampling = _for_each(body.sampling_params, len(prompts), "sampling_params")
    if isinstance(body.rid, str) and is_list:
        raise InvalidRequest("a batch needs a list of request ids", param="rid")
    rids = _for_each(body.rid, len(prompts), "rid")
    submissions = [
        Submission(
            prompt=prompt,
            num_characters=count,
            sampling=params.plain(),
            rid=rid or new_rid(),
            account=tenant.account,
            namespace=context.namespace(tenant, body),
            logprobs=body.top_logprobs_num if body.return_logprob else None,
            prompt_logprobs_from=body.prompt_logprobs_from,
            priority=tenant.priority(body.priority),
            diffusion=body.diffusion,
            reuse=body.reuse,
            store=body.cache.store,
            show_tokens=body.return_token_ids,
        )
        for prompt, count, params, rid in zip(prompts, characters, sampling, rids, strict=True)
    ]
    return submissions, is_list or any(s.sampling.n > 1 for s in submissions)


def _prompts(
    body: GenerateRequest, account: str, context: Context
) -> tuple[Sequence[Prompt | Callable[[], Prompt]], list[int], bool]:
    """The prompts, the characters of each (0: they are known), and whether it was a list. Raises InvalidRequest."""
    if body.pml is not None and isinstance(body.reuse, ReuseParams):
        raise InvalidRequest("reuse is for prompts with documents, and pml has none", param="reuse")
    if body.segments is not None:
        is_list = isinstance(body.segments[0], list) if body.segments else True
        several: list[Any] = body.segments if is_list else [body.segments]
        compiled = [partial(compile_segments, segments, account, context.documents) for segments in several]
        return compiled, [count_characters(segments) for segments in several], is_list
    given, is_list = prompts_of(getattr(body, body.given[0]))
    characters = [len(text) if isinstance(text, str) else 0 for text in given]
    if body.pml is None:
        return given, characters, is_list
    return [partial(context.schemas.compile, account, str(text)) for text in given], characters, is_list


def _for_each(value: Any, count: int, param: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{count} prompts, but {len(value)} {param}", param=param)
    return value


@router.post("/generate", response_model=None, responses=examples.GENERATE)
async def generate(body: GenerateRequest, request: Request, context: Ctx, tenant: Asker) -> Response:
    """Complete one prompt or several; with `stream`, as server-sent events that end with `[DONE]`."""
    context.check_model(body.model)
    submissions, is_list = submissions_of(body, tenant, context)
    if body.stream and not context.config.server.incremental_output:
        for submission in submissions:
            _check_repeated(body, submission.sampling.max_new_tokens or 0)
    inquiry = ask(context, submissions, body.explain, body.comparison_response_id)
    outputs = await open_outputs(request, context, submissions, body.names(), body.timeout_s)
    if body.stream:
        return EventStream(_events(body, submissions, is_list, outputs, context, inquiry), outputs.close)
    return await unless_gone(request, _answer(body, is_list, outputs, context, inquiry))


async def _answer(
    body: GenerateRequest, is_list: bool, outputs: OutputStream, context: Context, inquiry: Inquiry | None
) -> dict[str, Any] | list[dict[str, Any]]:
    logprobs: dict[tuple[int, int], _Logprobs] = defaultdict(lambda: _Logprobs(body, context.engine.tokenizer))
    done = await collect(outputs, context, lambda output: logprobs[output.index, output.choice].add(output))
    answers = [_result(o, o.text, o.token_ids, logprobs[o.index, o.choice], outputs.prompts) for o in done]
    for output, answer in zip(done, answers, strict=True):
        answer["meta_info"] |= await explained(inquiry, outputs, output)
    return answers if is_list else answers[0]


def _check_repeated(body: GenerateRequest, tokens: int) -> None:
    """Raise InvalidRequest if an event would hold more than MAX_REPEATED log-probabilities."""
    if body.return_logprob and tokens * (1 + body.top_logprobs_num) > MAX_REPEATED:
        raise InvalidRequest(
            f"{tokens} tokens with {body.top_logprobs_num} alternatives each exceed the {MAX_REPEATED} "
            "log-probabilities of a stream's event, which repeats those of earlier events",
            param="top_logprobs_num",
        )


async def _events(
    body: GenerateRequest,
    submissions: list[Submission],
    is_list: bool,
    outputs: OutputStream,
    context: Context,
    inquiry: Inquiry | None,
) -> Events:
    first = [sum(s.sampling.n for s in submissions[:i]) for i in range(len(submissions))]
    logprobs: dict[int, _Logprobs] = {}
    incremental = context.config.server.incremental_output
    async for output in follow(outputs, context):
        index = first[output.index] + output.choice
        own = logprobs.setdefault(index, _Logprobs(body, context.engine.tokenizer))
        if incremental:
            own = _Logprobs(body, context.engine.tokenizer)
        await write_logprobs(outputs, own.add, output)
        _check_repeated(body, own.num_tokens)
        if incremental:
            event = _result(output, output.delta, output.new_token_ids, own, outputs.prompts)
        else:
            event = _result(output, output.text, output.token_ids[: output.completion_tokens], own, outputs.prompts)
        event["meta_info"] |= await explained(inquiry, outputs, output)
        event["delta"] = output.delta
        if output.canvas is not None:
            event["canvas"] = output.canvas
            event["canvas_text"] = context.engine.tokenizer.decode(output.canvas, skip_special_tokens=False)
        if is_list:
            event["index"] = index
        yield event


def _result(
    output: Output, text: str, token_ids: list[int], logprobs: _Logprobs, prompts: dict[int, list[int]]
) -> dict[str, Any]:
    finish = output.finish
    reason: dict[str, Any] | None = None
    if finish is not None:
        reason = {"type": str(finish.type)}
        if finish.type == "length":
            reason["length"] = output.completion_tokens
        if finish.matched is not None:
            reason["matched"] = finish.matched
        if finish.message is not None:
            reason["message"] = finish.message
    meta: dict[str, Any] = {
        "id": output.rid,
        "finish_reason": reason,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": output.completion_tokens,
        "cached_tokens": output.cached_tokens,
        **by_tier(output),
        "queue_time": output.queue_s,
        "prefill_time": output.prefill_s,
        "e2e_latency": output.e2e_s,
    }
    if finish is not None and output.index in prompts:
        meta["prompt_token_ids"] = prompts[output.index]
    if output.drafted:
        meta |= {"spec_draft_token_num": output.drafted, "spec_accept_token_num": output.accepted}
    if output.reuse is not None and "strategy" not in output.reuse:
        meta |= output.reuse
    elif output.reuse is not None and finish is not None:  # not in every event: it names all modules or documents
        meta["reuse"] = output.reuse
    return {"text": text, "output_ids": list(token_ids), "meta_info": meta | logprobs.fields()}


def by_tier(output: Output) -> dict[str, Any]:
    """The field `cached_tokens_by_tier`, where a tier below the pool had some of them."""
    if not output.loaded_tokens:
        return {}
    in_pool = output.cached_tokens - sum(output.loaded_tokens.values())
    return {"cached_tokens_by_tier": {"pool": in_pool, **output.loaded_tokens}}


class _Logprobs:
    """SGLang's log-probability fields: `[logprob, token id, text or null]` for each token."""

    def __init__(self, body: GenerateRequest, tokenizer: Tokenizer):
        self._body = body
        self._text = tokenizer.token_text if body.return_text_in_logprobs else lambda token: None
        self._output = JsonList(), JsonList()
        self._input = JsonList(), JsonList()

    def add(self, output: Output) -> None:
        self._add(self._output, output.logprobs or [])
        self._add(self._input, output.prompt_logprobs or [])

    def _add(self, lists: tuple[JsonList, JsonList], items: list[TokenLogprob]) -> None:
        tokens, top = lists
        for item in items:
            tokens.append([item.logprob, item.token, self._text(item.token)])
            if self._body.top_logprobs_num:
                top.append([[value, token, self._text(token)] for token, value in item.top] or None)

    @property
    def num_tokens(self) -> int:
        """Tokens whose log-probabilities are held."""
        return len(self._output[0]) + len(self._input[0])

    def fields(self) -> dict[str, JsonList]:
        if not self._body.return_logprob:
            return {}
        fields = {"output_token_logprobs": self._output[0]}
        if self._body.top_logprobs_num:
            fields["output_top_logprobs"] = self._output[1]
        if self._body.logprob_start_len >= 0:
            fields["input_token_logprobs"] = self._input[0]
            if self._body.top_logprobs_num:
                fields["input_top_logprobs"] = self._input[1]
        return fields
