"""`/v1/chat/completions`."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

from fastapi import Request, Response

from runtime.errors import InvalidRequest
from runtime.frontend.output import Output, Prompt, Submission, new_rid
from runtime.frontend.stream import OutputStream
from runtime.models.tokenizer import Tokenizer
from runtime.reuse.fusion.prompt import Document, Segments, in_messages
from runtime.reuse.modules.pml import Prompt as ModuleText
from server.auth.keys import Asker, EveryKey, Tenant
from server.context import Context, Ctx
from server.documents.wire import find_documents
from server.explain.inquiry import Inquiry, ask
from server.explain.parts import Conversation
from server.http import examples
from server.http.answers import JsonList, write_logprobs
from server.http.follow import collect, follow, open_outputs
from server.http.sse import Events, EventStream, unless_gone, while_there
from server.openai.caching import Mark, keep_places
from server.openai.calls import CallReader, lazy_calls, writes_tags
from server.openai.common import (
    add_prompt_logprobs,
    envelope,
    finish_reason,
    most_logprobs,
    reuse_of,
    usage,
)
from server.openai.tools import Function, Tool, continue_chat, render_chat, with_tools
from server.openai.types import ChatRequest

router = EveryKey(prefix="/v1", tags=["openai"])


@router.post("/chat/completions", response_model=None, responses=examples.CHAT)
async def chat_completions(body: ChatRequest, request: Request, context: Ctx, tenant: Asker) -> Response:
    """The assistant's next message in a conversation."""
    model = context.check_model(body.model)
    body.refuse_unsupported()
    if body.offered or body.response_format or body.structured_outputs:  # a schema may be as long as the body
        work = partial(submission_of, body, tenant, context)
        submission = await while_there(request, context.engine.in_turn(tenant.account, body.num_characters, work))
    else:
        submission = submission_of(body, tenant, context)
    conversation = partial(find_conversation, body, tenant, context)
    inquiry = ask(context, [submission], body.explain, body.earlier, conversation)
    outputs = await open_outputs(request, context, [submission], body.NAMES, body.timeout_s, conversation)
    rid = f"chatcmpl-{submission.rid}"
    head = envelope("chat.completion.chunk" if body.stream else "chat.completion", rid, context, model)
    if body.stream:
        return EventStream(_events(body, head, outputs, context, inquiry), outputs.close)
    return await unless_gone(request, _answer(body, head, outputs, context, inquiry))


def submission_of(body: ChatRequest, tenant: Tenant, context: Context) -> Submission:
    """The submission of a conversation, which is rendered later: long ones take their time. Raises InvalidRequest."""
    sampling, otherwise = body.sampling(body.most_tokens, body.constraint()), None
    if body.offered and not body.must_call and context.engine.info.diffusion is None:
        tagged = writes_tags(context.engine.tokenizer)
        sampling, otherwise = lazy_calls(sampling, body.callable_tools(), tagged)
    return Submission(
        prompt=partial(_render, body, tenant, context),
        num_characters=body.num_characters,
        sampling=sampling,
        otherwise=otherwise,
        rid=body.request_id or new_rid(),
        account=tenant.account,
        namespace=context.namespace(tenant, body),
        logprobs=most_logprobs((body.top_logprobs or 0) if body.logprobs else None, body.prompt_logprobs),
        prompt_logprobs_from=None if body.prompt_logprobs is None else 0,
        priority=tenant.priority(body.priority),
        add_special_tokens=body.add_special_tokens,
        diffusion=body.diffusion,
        shared_text=partial(_system_text, body, context),
        reuse=body.reuse,
        store=body.cache.store,
        last_tokens=body.truncate_prompt_tokens,
        show_tokens=body.return_token_ids,
    )


def _render(body: ChatRequest, tenant: Tenant, context: Context) -> Prompt:
    """The prompt of a conversation; behind a schema, it imports modules. Raises InvalidRequest and NotFound."""
    if body.schema_name is None:
        write = partial(_write, body, tenant, context)
        if not body.asks_to_keep:
            return write(None)
        return keep_places(write, body.prompt_cache_options, body.prompt_cache_retention)
    tokenizer, turns = context.engine.tokenizer, body.turns()
    schema = context.schemas.get(tenant.account, body.schema_name).schema
    if not schema.roles:
        raise InvalidRequest("a schema without <system>, <user> and <assistant> is for /generate", param="schema")
    # A message that only imports is no turn.
    turns = [m for m, given in zip(turns, body.messages, strict=True) if m["content"] or not given.imports]
    imports = [one for message in body.messages for one in message.imports]
    modules = ModuleText(schema.name, imports, messages=with_tools(tokenizer, turns, body.offered))
    return schema.compile(modules, body.add_generation_prompt)


def _write(body: ChatRequest, tenant: Tenant, context: Context, mark: Mark | None) -> str | Segments:
    """The prompt of a conversation, with marks behind the texts that have a breakpoint."""
    turns = find_documents(body.turns(mark), tenant.account, context.documents)
    tokenizer, tools, variables = context.engine.tokenizer, body.offered, body.template_variables()
    if body.continue_final_message:
        return continue_chat(turns, lambda plain: render_chat(tokenizer, plain, tools, False, variables))
    ask = body.add_generation_prompt
    return in_messages(turns, lambda plain: render_chat(tokenizer, plain, tools, ask, variables))


def find_conversation(body: ChatRequest, tenant: Tenant, context: Context) -> Conversation | None:
    """The conversation that a prompt renders, documents as plain text. Raises InvalidRequest and NotFound."""
    if body.schema_name is not None:
        return None
    turns = find_documents(body.turns(), tenant.account, context.documents)
    return conversation_of(body, turns, context.engine.tokenizer)


def conversation_of(body: ChatRequest, turns: list[dict[str, Any]], tokenizer: Tokenizer) -> Conversation:
    """The conversation of a request's messages, whose contents may be lists of texts and documents."""
    variables = body.template_variables()

    def plain(content: str | list[str | Document]) -> str:
        parts = [content] if isinstance(content, str) else content
        return "\n".join(part if isinstance(part, str) else part.content for part in parts)

    def render(shown: list[dict[str, Any]], tools: list[Tool]) -> str:
        return render_chat(tokenizer, shown, tools, body.add_generation_prompt, variables)

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
    options = body.prompt_cache_options
    typed = {"prompt_cache_diagnostics": explanation.openai()} if options and options.comparison_response_id else {}
    return {"explain": explanation.describe(), **typed}


async def _answer(
    body: ChatRequest, head: dict[str, Any], outputs: OutputStream, context: Context, inquiry: Inquiry | None
) -> dict[str, Any]:
    logprobs: dict[int, Logprobs] = defaultdict(lambda: Logprobs(body, context.engine.tokenizer))
    done = await collect(outputs, context, lambda output: logprobs[output.choice].add(output))
    choices = []
    for output in done:
        written = logprobs[output.choice]
        text, calls = reader_of(body, context).push(output.text, last=True)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        choices.append(
            {
                "index": output.choice,
                "message": message,
                "logprobs": written.fields() if body.logprobs else None,
                "finish_reason": _finish_reason(output, bool(calls)),
                **(reuse_of(output) if len(done) > 1 else {}),
                **({"token_ids": output.token_ids} if body.return_token_ids else {}),
            }
        )
    prompt = {} if body.prompt_logprobs is None else {"prompt_logprobs": logprobs[0].prompt}
    return {
        **head,
        **{"choices": choices, "usage": usage(done)},
        **({"prompt_token_ids": outputs.prompts[0]} if body.return_token_ids else {}),
        **prompt,
        **reuse_of(done[0]),
        **await _explained(body, inquiry, outputs, done[0]),
    }


async def _events(
    body: ChatRequest, head: dict[str, Any], outputs: OutputStream, context: Context, inquiry: Inquiry | None
) -> Events:
    last: dict[int, Output] = {}
    readers: dict[int, CallReader] = {}
    extra: dict[str, Any] = {"usage": None} if body.with_usage else {}

    def chunk(
        choice: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None, **more: Any
    ) -> dict[str, Any]:
        entry = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **more}
        return {**head, "choices": [entry], **extra}

    async for output in follow(outputs, context):
        if output.choice not in last:
            shown = {"prompt_token_ids": outputs.prompts[0]} if body.return_token_ids else {}
            yield chunk(output.choice, {"role": "assistant", "content": ""}) | shown
            readers[output.choice] = reader_of(body, context)
        last[output.choice], reader = output, readers[output.choice]
        text, calls = reader.push(output.delta, last=output.finish is not None)
        delta = ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})
        finish = _finish_reason(output, bool(reader.num_calls))
        logprobs = None
        if body.logprobs:
            written = Logprobs(body, context.engine.tokenizer)
            await write_logprobs(outputs, written.add, output)
            logprobs = written.fields()
        more = (reuse_of(output) if finish else {}) | await _explained(body, inquiry, outputs, output)
        ids = {"token_ids": output.new_token_ids} if body.return_token_ids else {}
        yield chunk(output.choice, delta, logprobs, finish, **ids) | more
    if body.with_usage:
        yield {**head, "choices": [], "usage": usage(last.values())}


def reader_of(body: ChatRequest, context: Context) -> CallReader:
    return CallReader(
        frozenset(tool.function.name for tool in body.callable_tools()),
        forced=body.must_call,
        single=not body.parallel_tool_calls,
        tagged=writes_tags(context.engine.tokenizer),
    )


def _finish_reason(output: Output, called: bool) -> str | None:
    reason = finish_reason(output)
    return "tool_calls" if called and reason == "stop" else reason


class Logprobs:
    """OpenAI's log-probabilities of a message, and vLLM's of its prompt."""

    def __init__(self, body: ChatRequest, tokenizer: Tokenizer):
        self._body = body
        self._text_of = tokenizer.token_text
        self.content = JsonList()
        self.prompt = JsonList()

    def add(self, output: Output) -> None:
        add_prompt_logprobs(self.prompt, output, self._body.prompt_logprobs, self._text_of)
        for item in output.logprobs or ():
            top = [self._token(token, value) for token, value in item.top[: self._body.top_logprobs or 0]]
            self.content.append({**self._token(item.token, item.logprob), "top_logprobs": top})

    def fields(self) -> dict[str, Any]:
        return {"content": self.content, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text_of(token)
        # A token may be part of a character; its bytes are unknown then.
        known = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": known}
