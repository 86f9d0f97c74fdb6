"""`/v1/chat/completions` and `/v1/models`."""

from __future__ import annotations

import time
from collections import defaultdict
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from runtime.errors import InvalidRequest
from runtime.frontend.output import Output, Prompt, Submission
from runtime.frontend.stream import OutputStream
from runtime.models.tokenizer import Tokenizer
from runtime.reuse.fusion.prompt import Document, in_messages
from runtime.reuse.modules.pml import Prompt as ModuleText
from server.auth.keys import Asker, Tenant
from server.context import Context, Ctx
from server.documents.wire import find_documents
from server.explain.inquiry import Inquiry, ask
from server.explain.parts import Conversation
from server.http import examples
from server.http.answers import JsonList, write_logprobs
from server.http.follow import collect, follow, open_outputs
from server.http.sse import Events, EventStream, unless_gone, while_there
from server.openai.common import check_model, envelope, finish_reason, module_reuse, usage
from server.openai.tools import CallReader, Function, Tool, render_chat, with_tools, writes_tags
from server.openai.types import ChatRequest

router = APIRouter(prefix="/v1", tags=["openai"])

_STARTED_S = int(time.time())


@router.get("/models", responses=examples.MODELS)
async def models(context: Ctx) -> dict[str, Any]:
    """The served model."""
    return {"object": "list", "data": [_model(context)]}


@router.get("/models/{name:path}", responses=examples.MODEL)
async def model(name: str, context: Ctx) -> dict[str, Any]:
    """The model by its name."""
    check_model(name, context)
    return _model(context)


def _model(context: Context) -> dict[str, Any]:
    info = context.engine.info
    return {
        "id": info.name,
        "object": "model",
        "created": _STARTED_S,
        "owned_by": "ramet",
        "max_model_len": info.context_length,
    }


@router.post("/chat/completions", response_model=None, responses=examples.CHAT)
async def chat_completions(body: ChatRequest, request: Request, context: Ctx, tenant: Asker) -> Response:
    """The assistant's next message in a conversation."""
    check_model(body.model, context)
    body.refuse_unsupported()
    if body.must_call or body.response_format:  # a schema may be as long as the body
        work = partial(submission_of, body, tenant, context)
        submission = await while_there(request, context.engine.in_turn(tenant.account, body.num_characters, work))
    else:
        submission = submission_of(body, tenant, context)
    conversation = partial(_conversation, body, tenant, context)
    inquiry = ask(context, [submission], body.explain, body.earlier, conversation)
    outputs = await open_outputs(request, context, [submission], body.NAMES, body.timeout_s, conversation)
    rid = f"chatcmpl-{submission.rid}"
    if body.stream:
        return EventStream(_events(body, rid, outputs, context, inquiry), outputs.close)
    return await unless_gone(request, _answer(body, rid, outputs, context, inquiry))


def submission_of(body: ChatRequest, tenant: Tenant, context: Context) -> Submission:
    """The submission of a conversation, which is rendered later: long ones take their time. Raises InvalidRequest."""
    return Submission(
        prompt=partial(_render, body, tenant, context),
        num_characters=body.num_characters,
        sampling=body.sampling(body.max_completion_tokens or body.max_tokens, body.schema_text()),
        account=tenant.account,
        namespace=tenant.namespace(body.cache_salt, body.cache_scope),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        priority=tenant.priority(body.priority),
        add_special_tokens=False,
        diffusion=body.diffusion,
        shared_text=partial(_system_text, body, context),
        reuse=body.reuse,
    )


def _render(body: ChatRequest, tenant: Tenant, context: Context) -> Prompt:
    """The prompt of a conversation; behind a schema, it imports modules. Raises InvalidRequest and NotFound."""
    tokenizer = context.engine.tokenizer
    turns = body.turns()
    if body.schema_name is None:
        turns = find_documents(turns, tenant.account, context.documents)
        return in_messages(turns, lambda plain: render_chat(tokenizer, plain, body.offered, body.add_generation_prompt))
    schema = context.schemas.get(tenant.account, body.schema_name).schema
    if not schema.roles:
        raise InvalidRequest("a schema without <system>, <user> and <assistant> is for /generate", param="schema")
    # A message that only imports is no turn.
    turns = [m for m, given in zip(turns, body.messages, strict=True) if m["content"] or not given.imports]
    imports = [one for message in body.messages for one in message.imports]
    modules = ModuleText(schema.name, imports, messages=with_tools(tokenizer, turns, body.offered))
    return schema.compile(modules, body.add_generation_prompt)


def _conversation(body: ChatRequest, tenant: Tenant, context: Context) -> Conversation | None:
    """The conversation that a prompt renders, documents as plain text. Raises InvalidRequest and NotFound."""
    if body.schema_name is not None:
        return None
    return conversation_of(
        body, find_documents(body.turns(), tenant.account, context.documents), context.engine.tokenizer
    )


def conversation_of(body: ChatRequest, turns: list[dict[str, Any]], tokenizer: Tokenizer) -> Conversation:
    """The conversation of a request's messages, whose contents may be lists of texts and documents."""

    def plain(content: str | list[str | Document]) -> str:
        parts = [content] if isinstance(content, str) else content
        return "\n".join(part if isinstance(part, str) else part.content for part in parts)

    def render(shown: list[dict[str, Any]], tools: list[Tool]) -> str:
        return render_chat(tokenizer, shown, tools, body.add_generation_prompt)

    example = Tool(type="function", function=Function(name="example"))
    plain_turns = [{**turn, "content": plain(turn["content"])} for turn in turns]
    return Conversation(render, plain_turns, body.offered, example)


def _system_text(body: ChatRequest, context: Context) -> str | None:
    """The prompt's part that ends with the system message, which other conversations have, too; None without one.

    Only diffusion models need to be told: what a causal model computes does not depend on where a prefix ends.
    """
    first = body.messages[0]
    if context.engine.info.diffusion is None or first.role != "system" or first.documents:
        return None
    try:
        return context.engine.tokenizer.apply_chat_template([first.plain()], add_generation_prompt=False)
    except InvalidRequest:  # a template may want a question
        return None


async def _explained(
    body: ChatRequest, inquiry: Inquiry | None, outputs: OutputStream, output: Output
) -> dict[str, Any]:
    """Fields that tell why the prompt missed the cache, if they are asked for; OpenAI's too, if it asks in that way."""
    if inquiry is None or output.choice or output.finish is None:
        return {}
    explanation = await inquiry.explain(outputs, output)
    typed = {"prompt_cache_diagnostics": explanation.openai()} if body.prompt_cache_options is not None else {}
    return {"explain": explanation.describe(), **typed}


async def _answer(
    body: ChatRequest, rid: str, outputs: OutputStream, context: Context, inquiry: Inquiry | None
) -> dict[str, Any]:
    logprobs: dict[int, _Logprobs] = defaultdict(lambda: _Logprobs(context.engine.tokenizer))
    done = await collect(outputs, context.metrics, lambda output: logprobs[output.choice].add(output))
    choices = []
    for output in done:
        text, calls = _reader(body, context).push(output.text, last=True)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        choices.append(
            {
                "index": output.choice,
                "message": message,
                "logprobs": logprobs[output.choice].fields() if body.logprobs else None,
                "finish_reason": _finish_reason(output, bool(calls)),
            }
        )
    return {
        **envelope("chat.completion", rid, context),
        **{"choices": choices, "usage": usage(done)},
        **module_reuse(done[0]),
        **await _explained(body, inquiry, outputs, done[0]),
    }


async def _events(
    body: ChatRequest, rid: str, outputs: OutputStream, context: Context, inquiry: Inquiry | None
) -> Events:
    last: dict[int, Output] = {}
    readers: dict[int, CallReader] = {}
    extra: dict[str, Any] = {"usage": None} if body.with_usage else {}

    def chunk(choice: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
        entry = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**envelope("chat.completion.chunk", rid, context), "choices": [entry], **extra}

    async for output in follow(outputs, context.metrics):
        if output.choice not in last:
            yield chunk(output.choice, {"role": "assistant", "content": ""})
            readers[output.choice] = _reader(body, context)
        last[output.choice], reader = output, readers[output.choice]
        text, calls = reader.push(output.delta, last=output.finish is not None)
        delta = ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})
        finish = _finish_reason(output, bool(reader.num_calls))
        logprobs = _Logprobs(context.engine.tokenizer)
        await write_logprobs(outputs, logprobs.add, output)
        more = (module_reuse(output) if finish else {}) | await _explained(body, inquiry, outputs, output)
        yield chunk(output.choice, delta, logprobs.fields() if body.logprobs else None, finish) | more
    if body.with_usage:
        yield {**envelope("chat.completion.chunk", rid, context), "choices": [], "usage": usage(last.values())}


def _reader(body: ChatRequest, context: Context) -> CallReader:
    return CallReader(
        frozenset(tool.function.name for tool in body.offered),
        forced=body.must_call,
        single=not body.parallel_tool_calls,
        tagged=writes_tags(context.engine.tokenizer),
    )


def _finish_reason(output: Output, called: bool) -> str | None:
    reason = finish_reason(output)
    return "tool_calls" if called and reason == "stop" else reason


class _Logprobs:
    """OpenAI's log-probabilities of a message."""

    def __init__(self, tokenizer: Tokenizer):
        self._text_of = tokenizer.token_text
        self._content = JsonList()

    def add(self, output: Output) -> None:
        for item in output.logprobs or ():
            top = [self._token(token, value) for token, value in item.top]
            self._content.append({**self._token(item.token, item.logprob), "top_logprobs": top})

    def fields(self) -> dict[str, Any]:
        return {"content": self._content, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text_of(token)
        # A token may be part of a character; its bytes are unknown then.
        known = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": known}
