"""llama.cpp's `/infill`: the text between a prefix and a suffix."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from fastapi import Request, Response
from pydantic import Field

from runtime.errors import InvalidRequest
from runtime.frontend.output import Output, new_rid
from runtime.models.tokenizer import Tokenizer
from server.auth.keys import CurrentTenant, EveryKey
from server.explain.reason import Explanation
from server.generation.service import Generation, Service, Writer
from server.http import fields
from server.http.body import Body, Text, example
from server.http.context import Context
from server.http.sse import EventStream
from server.openai.formats import only
from server.openai.types import CommonRequest, NewTokens

router = EveryKey(tags=["openai"])

# By family of models, the tokens before prefix, suffix and middle, and before a repository's and a file's name.
_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "", ""),
)


class Extra(Body):
    """Another file, or a part of one."""

    text: Text
    filename: Text = "tmp"


class InfillRequest(CommonRequest):
    """`POST /infill`."""

    # Editors always send these: an order of samplers, and limits in time.
    IGNORED = CommonRequest.IGNORED | {"n_indent", "samplers", "t_max_predict_ms", "t_max_prompt_ms"}
    NEUTRAL: ClassVar[Mapping[str, fields.Values]] = {
        name: values
        for name, values in (fields.SAMPLING | fields.MODEL | {"n_probs": (0,)}).items()
        if name != "samplers"
    }

    model_config = example(input_prefix="def add(a, b):\n    return ", input_suffix="\n", n_predict=16)

    input_prefix: Text
    input_suffix: Text
    input_extra: Annotated[list[Extra], Field(max_length=1024)] = Field(default_factory=list)
    prompt: Text = Field("", description="the end of the prefix")
    max_tokens: NewTokens = -1
    add_special_tokens: bool = True
    response_fields: Annotated[list[Annotated[Text, Field(max_length=256)]], Field(max_length=64)] = Field(
        default_factory=list, description="only these fields of the answer; a field within another: `timings/prompt_n`"
    )


def infill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str, extra: Iterable[Extra] = ()) -> str:
    """The prompt for the text between prefix and suffix. Raises InvalidRequest if the model has no tokens for it."""
    known = next((row for row in _TOKENS if all(tokenizer.token_to_id(token) is not None for token in row[:3])), None)
    if known is None:
        raise InvalidRequest(
            "this model's tokenizer has no tokens for a prefix and a suffix, so it cannot fill in text between them"
        )
    before, after, middle, *names = known
    repository, file = (name if name and tokenizer.token_to_id(name) is not None else "" for name in names)
    parts = [f"{repository}myproject\n"] if repository else []
    parts += [f"{file}{one.filename}\n{one.text}" if file else f"\n\n--- snippet ---\n\n{one.text}" for one in extra]
    parts += [f"{file}filename\n"] if file else []
    return "".join([*parts, before, prefix, after, suffix, middle])


@router.post("/infill", response_model=None)
async def infill(body: InfillRequest, request: Request, service: Service, tenant: CurrentTenant) -> Response:
    """The text between a prefix and a suffix, as llama.cpp answers it."""
    context = service.context
    context.check_model(body.model)
    prefix = body.input_prefix + body.prompt
    prompt = infill_prompt(context.engine.tokenizer, prefix, body.input_suffix, body.input_extra)
    sampling = body.sampling(body.max_tokens, only(body.constraints()))
    submission = body.submission(prompt, sampling, tenant, context, rid=body.request_id or new_rid())
    generation = await service.submit(request, body, [submission])
    return await generation.respond(request, InfillWriter(body, generation, context), body.stream)


class _Stream(EventStream):
    end = b""


class InfillWriter(Writer):
    """The answer in llama.cpp's form; several choices are a list."""

    STREAM = _Stream

    def __init__(self, body: InfillRequest, generation: Generation, context: Context):
        self._body, self._prompts = body, generation.outputs.prompts
        self._model = context.check_model(body.model)

    def write(self, output: Output, why: Explanation | None) -> Iterable[dict[str, Any]]:
        yield self._result(output, output.delta, output.new_token_ids, why)

    async def answer(self, generation: Generation) -> dict[str, Any] | list[dict[str, Any]]:
        done = await generation.collect()
        found = [self._result(one, one.text, one.token_ids, await generation.explain(one)) for one in done]
        return found if len(found) > 1 else found[0]

    def _result(self, output: Output, text: str, tokens: list[int], why: Explanation | None) -> dict[str, Any]:
        finish = output.finish
        result: dict[str, Any] = {
            "index": output.choice,
            "content": text,
            "tokens": tokens if self._body.return_token_ids else [],
            "stop": finish is not None,
            "tokens_predicted": output.completion_tokens,
            "tokens_evaluated": output.prompt_tokens,
        }
        if finish is None:
            return result
        word = finish.matched if isinstance(finish.matched, str) else ""
        kind = "word" if word else {"stop": "eos", "length": "limit"}.get(finish.type, "none")
        result |= {
            "model": self._model,
            "truncated": False,
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": output.cached_tokens,
            "timings": _timings(output),
        }
        if self._body.return_token_ids:
            result["prompt_token_ids"] = self._prompts[0]
        if why is not None:
            result["explain"] = why.describe()
        if self._body.left_out:
            result["left_out"] = self._body.left_out
        return _chosen(result, self._body.response_fields)


def _timings(output: Output) -> dict[str, Any]:
    computed, new = output.prompt_tokens - output.cached_tokens, output.completion_tokens
    prompt_ms, new_ms = 1000 * output.prefill_s, 1000 * max(output.e2e_s - output.queue_s - output.prefill_s, 0)
    found: dict[str, Any] = {"cache_n": output.cached_tokens}
    for name, count, ms in (("prompt", computed, prompt_ms), ("predicted", new, new_ms)):
        found |= {f"{name}_n": count, f"{name}_ms": ms, f"{name}_per_token_ms": ms / count if count else 0}
        found[f"{name}_per_second"] = 1000 * count / ms if ms else 0
    return found


def _chosen(result: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
    """The fields that the request wants; names of fields within others are kept whole, as llama.cpp does."""
    found: dict[str, Any] = {}
    for path in wanted:
        value: Any = result
        for name in path.split("/"):
            if not isinstance(value, dict):
                value = None
                break
            value = value.get(name)
        found |= {} if value is None else {path: value}
    return found if wanted else result
