"""SGLang's `/generate`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from fastapi import Request, Response
from pydantic import Field

from runtime.errors import InvalidRequest
from runtime.frontend.output import Finish, Output, Prompt, Submission, new_rid, prompts_of
from runtime.frontend.pictures import MOST_IMAGES, Pictures
from runtime.params import SamplingParams
from runtime.protocol import TokenLogprob
from server.auth.keys import CurrentTenant, EveryKey, Tenant
from server.explain.reason import Explanation
from server.features.parts import FeatureStores, Stores
from server.features.registry import GenerateFields
from server.generation.bodies import AnswerId, GenerationBody, Reuse, SamplingBody
from server.generation.service import Generation, Service, Writer
from server.http import fields
from server.http.answers import JsonList
from server.http.body import MAX_BATCH, IdPrompts, OneOr, OneOrMany, Rid, Text, example
from server.http.context import Context
from server.http.sse import while_there

router = EveryKey(tags=["generate"])

MAX_TOP_LOGPROBS = 128
# Most log-probabilities in an event. Each event repeats all earlier ones, and large events delay all streams.
MAX_REPEATED = 1 << 16


Prompts = Sequence[Prompt | Callable[[], Prompt]]
_SomeImages = OneOr[Text, Annotated[list[Text], Field(max_length=MOST_IMAGES)]]
# Of one text, or of each text of a batch.
GivenImages = OneOr[Text, Annotated[list[_SomeImages], Field(max_length=MAX_BATCH)]]


# The fields that hold prompts.
_PROMPTS = ("text", "input_ids", *GenerateFields.PROMPTS)


class GenerateRequest(GenerationBody, GenerateFields):
    """One prompt or several, in exactly one of the fields that hold prompts, such as `text` and `input_ids`."""

    IGNORED = fields.OPERATION
    NEUTRAL: ClassVar[Mapping[str, fields.Values]] = {
        name: values for name, values in fields.MODEL.items() if name != "image_data"
    }
    ALIASES: ClassVar[Mapping[str, str]] = {"extra_key": "cache_salt", "return_prompt_token_ids": "return_token_ids"}

    WITHIN: ClassVar[Mapping[str, str]] = {
        **{name: f"sampling_params.{name}" for name in (*SamplingParams.model_fields, *SamplingBody.ALIASES)},
        "max_tokens": "sampling_params.max_new_tokens",
        "prompt": "text",
    }

    model_config = example(text="The capital of France is", sampling_params={"max_new_tokens": 16, "temperature": 0})

    text: OneOrMany[Text] | None = None
    input_ids: IdPrompts | None = None
    image_data: GivenImages | None = Field(
        None, description="data URLs or base64 of the images for which the texts have the model's image token, in order"
    )
    reuse: Reuse | None = None
    sampling_params: OneOrMany[SamplingBody] = Field(default_factory=SamplingBody)
    return_logprob: OneOrMany[bool] = Field(False, description="one value, or one for each prompt, as the next two")
    logprob_start_len: OneOrMany[Annotated[int, Field(ge=-1)]] = Field(
        -1, description="report prompt tokens from this position on; -1: none"
    )
    top_logprobs_num: OneOrMany[Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]] = 0
    return_text_in_logprobs: bool = False
    return_token_ids: bool = Field(False, description="add the prompt's token ids to meta_info")
    rid: OneOrMany[Rid] | None = None
    comparison_response_id: AnswerId | None = None

    @property
    def names(self) -> dict[str, str]:
        sampling = {name: f"sampling_params.{name}" for name in SamplingParams.model_fields}
        return {**sampling, "prompt": self.given[0], "prompt_logprobs_from": "logprob_start_len"}

    @property
    def earlier(self) -> str | None:
        return self.comparison_response_id

    @property
    def given(self) -> list[str]:
        """The names of the given fields that hold prompts."""
        return [name for name in _PROMPTS if getattr(self, name) is not None]

    def parameters(self, tenant: Tenant) -> dict[str, Any]:
        return super().parameters(tenant) | {
            "reuse": self.reuse,
            "show_tokens": self.return_token_ids,
        }


def submissions_of(
    body: GenerateRequest,
    tenant: Tenant,
    context: Context,
    stores: Stores,
    fetched: Mapping[str, bytes] = MappingProxyType({}),
) -> tuple[list[Submission], bool]:
    """The submissions of a request, and whether its answer is a list. Raises InvalidRequest.

    `fetched`: images by their URLs.
    """
    if len(body.given) != 1:
        known = f"{', '.join(_PROMPTS[:-1])} and {_PROMPTS[-1]}"
        raise InvalidRequest(f"exactly one of {known} must be given", param="text")
    prompts, characters, is_list = _prompts(body, tenant.account, stores)
    if not prompts:
        raise InvalidRequest("a batch needs at least one prompt", param="text")
    prompts, images = _with_images(body, prompts, is_list, tenant, context, fetched)
    sampling = _for_each(body.sampling_params, len(prompts), "sampling_params")
    if isinstance(body.rid, str) and is_list:
        raise InvalidRequest("a batch needs a list of request ids", param="rid")
    rids = _for_each(body.rid, len(prompts), "rid")
    plain = {id(params): params.plain() for params in sampling}  # prompts with the same parameters share them
    names = ("return_logprob", "top_logprobs_num", "logprob_start_len")
    each = [_for_each(getattr(body, name), len(prompts), name) for name in names]
    reports = zip(*each, strict=True)
    submissions = [
        body.submission(
            prompt,
            plain[id(params)],
            tenant,
            context,
            num_characters=count,
            images=own,
            rid=rid or new_rid(),
            logprobs=top if is_wanted else None,
            prompt_logprobs_from=start if is_wanted and start >= 0 else None,
        )
        for prompt, count, params, rid, own, (is_wanted, top, start) in zip(
            prompts, characters, sampling, rids, images, reports, strict=True
        )
    ]
    return submissions, is_list or any(s.sampling.n > 1 for s in submissions)


def _prompts(body: GenerateRequest, account: str, stores: Stores) -> tuple[Prompts, list[int], bool]:
    """The prompts, the number of characters in each (0: tokens), whether they are a list. Raises InvalidRequest."""
    if (compiled := body.compiled(account, stores)) is not None:
        return compiled
    given, is_list = prompts_of(getattr(body, body.given[0]))
    return given, [len(text) if isinstance(text, str) else 0 for text in given], is_list


def _with_images(
    body: GenerateRequest,
    prompts: Prompts,
    is_list: bool,
    tenant: Tenant,
    context: Context,
    fetched: Mapping[str, bytes],
) -> tuple[Prompts, Sequence[Pictures | None]]:
    """The prompts, as functions that mark images in texts, and the images of each. Raises InvalidRequest."""
    if not (given := body.image_data):
        return prompts, [None] * len(prompts)
    if (sight := context.engine.sight) is None:
        raise InvalidRequest("image_data is not supported", param="image_data")
    if body.text is None:
        raise InvalidRequest("image_data needs text", param="image_data")
    several: list[Any] = _for_each(given, len(prompts), "image_data") if is_list else [given]
    images = [sight.pictures(tenant.account, "image_data", body.cache_salt) for _ in prompts]
    texts = [
        partial(own.at_tokens, str(text), [fetched.get(file, file) for file in _listed(files)])
        for own, text, files in zip(images, prompts, several, strict=True)
    ]
    return texts, images


def _listed(files: str | list[Any]) -> list[Any]:
    return [files] if isinstance(files, str) else files


async def _fetch(body: GenerateRequest, tenant: Tenant, context: Context) -> dict[str, bytes]:
    """The images that are URLs of hosts that the operator lists. Raises InvalidRequest."""
    if context.engine.sight is None:
        return {}
    given = [file for one in _listed(body.image_data or []) for file in _listed(one)]
    from server.http.image_hosts import hosts_of

    return await hosts_of(context.config.server.image_hosts).fetch(tenant.account, given, "image_data")


def check_repeated(tokens: int, submission: Submission) -> None:
    """Raise InvalidRequest if an event would hold more than MAX_REPEATED log-probabilities."""
    if submission.logprobs is not None and tokens * (1 + submission.logprobs) > MAX_REPEATED:
        raise InvalidRequest(
            f"{tokens} tokens with {submission.logprobs} alternatives each exceed the {MAX_REPEATED} "
            "log-probabilities that a stream's event may have, earlier ones included",
            param="top_logprobs_num",
        )


def _for_each(value: Any, count: int, param: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{count} prompts, but {len(value)} {param}", param=param)
    return value


@router.post("/generate", response_model=None)
async def generate(
    body: GenerateRequest,
    request: Request,
    service: Service,
    stores: FeatureStores,
    tenant: CurrentTenant,
) -> Response:
    """Complete one or several prompts. With `stream`, the answer is server-sent events that end with `[DONE]`."""
    context = service.context
    context.check_model(body.model)
    fetched = {}
    if body.image_data:
        fetched = await while_there(request, body.deadline(context).keep(_fetch(body, tenant, context)))
    submissions, is_list = submissions_of(body, tenant, context, stores, fetched)
    if body.stream:
        for submission in submissions:
            check_repeated(submission.sampling.max_new_tokens or 0, submission)
    generation = await service.submit(request, body, submissions)
    writer = GenerateWriter(body, is_list, generation, context)
    return await generation.respond(request, writer, body.stream)


class GenerateWriter(Writer):
    """The answer to one or several prompts. Each event repeats the text of earlier events."""

    def __init__(self, body: GenerateRequest, is_list: bool, generation: Generation, context: Context):
        self._body = body
        self._is_list = is_list
        self._prompts = generation.outputs.prompts
        self._tokenizer = context.engine.tokenizer
        self._submissions = generation.outputs.submissions
        counts = [submission.sampling.n for submission in self._submissions]
        self._first = [sum(counts[:i]) for i in range(len(counts))]
        self._logprobs: dict[tuple[int, int], dict[str, JsonList]] = {}

    def _lists(self, output: Output) -> dict[str, JsonList]:
        """The requested lists of log-probabilities, which hold `[logprob, token id, text or null]`."""
        key = output.index, output.choice
        if key not in self._logprobs:
            self._logprobs[key] = self._empty(self._submissions[output.index])
        return self._logprobs[key]

    @staticmethod
    def _empty(asked: Submission) -> dict[str, JsonList]:
        if asked.logprobs is None:
            return {}
        kinds = ("token", "top") if asked.logprobs else ("token",)
        parts = ("output",) if asked.prompt_logprobs_from is None else ("output", "input")
        return {f"{part}_{kind}_logprobs": JsonList() for part in parts for kind in kinds}

    def add_logprobs(self, output: Output) -> None:
        lists = self._lists(output)
        self._add(lists, "output", output.logprobs or [])
        self._add(lists, "input", output.prompt_logprobs or [])

    def _add(self, lists: dict[str, JsonList], part: str, items: list[TokenLogprob]) -> None:
        tokens, top = (lists.get(f"{part}_{kind}_logprobs") for kind in ("token", "top"))
        text_of = self._tokenizer.token_text if self._body.return_text_in_logprobs else lambda token: None
        for item in items:
            if tokens is not None:
                tokens.append([item.logprob, item.token, text_of(item.token)])
            if top is not None:
                top.append([[value, token, text_of(token)] for token, value in item.top] or None)

    def write(self, output: Output, why: Explanation | None) -> Iterable[dict[str, Any]]:
        tokens = sum(len(lists) for name, lists in self._lists(output).items() if "token" in name)
        check_repeated(tokens, self._submissions[output.index])
        event = self._result(output, output.text, output.token_ids[: output.completion_tokens], why)
        event["delta"] = output.delta
        if output.shown is not None:
            event["canvas"] = output.shown
            event["canvas_text"] = self._tokenizer.decode(output.shown, skip_special_tokens=False)
        if self._is_list:
            event["index"] = self._first[output.index] + output.choice
        yield event

    async def answer(self, generation: Generation) -> dict[str, Any] | list[dict[str, Any]]:
        done = await generation.collect(self.add_logprobs)
        results = [self._result(one, one.text, one.token_ids, await generation.explain(one)) for one in done]
        return results if self._is_list else results[0]

    def _result(self, output: Output, text: str, token_ids: list[int], why: Explanation | None) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": output.rid,
            "finish_reason": None if output.finish is None else _reason(output.finish, output.completion_tokens),
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": output.completion_tokens,
            "cached_tokens": output.cached_tokens,
            **by_tier(output),
            "queue_time": output.queue_s,
            "prefill_time": output.prefill_s,
            "e2e_latency": output.e2e_s,
        }
        if output.finish is not None and output.index in self._prompts:
            meta["prompt_token_ids"] = self._prompts[output.index]
        if output.drafted:
            meta |= {"spec_draft_token_num": output.drafted, "spec_accept_token_num": output.accepted}
        if output.reuse is not None and output.reuse.inline:
            meta |= output.reuse.fields()
        elif output.reuse is not None and output.finish is not None:  # only at the end: it may have long lists
            meta["reuse"] = output.reuse.fields()
        if why is not None:
            meta["explain"] = why.describe()
        if output.finish is not None and self._body.left_out:
            meta["left_out"] = self._body.left_out
        meta |= self._lists(output)
        return {"text": text, "output_ids": list(token_ids), "meta_info": meta}


def _reason(finish: Finish, tokens: int) -> dict[str, Any]:
    reason: dict[str, Any] = {"type": str(finish.type)}
    if finish.type == "length":
        reason["length"] = tokens
    given = {"matched": finish.matched, "message": finish.message}
    return reason | {name: value for name, value in given.items() if value is not None}


def by_tier(output: Output) -> dict[str, Any]:
    """`{"cached_tokens_by_tier": ...}` if there are cached tokens, else {}."""
    if not output.cached_tokens:
        return {}
    in_pool = output.cached_tokens - sum(output.loaded_tokens.values())
    return {"cached_tokens_by_tier": {"pool": in_pool, **output.loaded_tokens}}
