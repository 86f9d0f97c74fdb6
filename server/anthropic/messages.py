"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request, Response

from runtime.errors import RametError
from runtime.frontend.output import KeptText, Output, Submission
from runtime.frontend.stream import OutputStream
from runtime.params import EXACT
from runtime.protocol import CacheBooks
from server.anthropic.content import ContentReader, Piece
from server.anthropic.prompt import conversation_of, render
from server.anthropic.types import Conversation, MessagesRequest
from server.auth.keys import Asker, EveryKey, Tenant
from server.context import Context, Ctx
from server.explain.inquiry import Inquiry, ask
from server.http import examples
from server.http.errors import MessageError, message_error
from server.http.follow import collect, follow, open_outputs
from server.http.sse import Events, TypedEventStream, unless_gone, while_there
from server.openai.calls import CallReader, lazy_calls, writes_tags
from server.store import Conflict

router = EveryKey(
    prefix="/v1/messages",
    tags=["anthropic"],
    responses={"4XX": {"model": MessageError}, "5XX": {"model": MessageError}},
)

_HOUR_S = 3600.0


class MessageStream(TypedEventStream):
    """Events of a message; an error has Anthropic's form."""

    def describe(self, error: RametError) -> dict[str, Any]:
        return message_error(error)


@router.post("", response_model=None, responses=examples.MESSAGE)
async def messages(body: MessagesRequest, request: Request, context: Ctx, tenant: Asker) -> Response:
    """The assistant's next message in a conversation; blocks with `cache_control` are kept in the cache."""
    model = context.check_model(body.model)
    body.check()
    work = partial(submission_of, body, tenant, context)
    if body.is_constrained or body.offered:  # a schema may be as long as the body
        submission = await while_there(request, context.engine.in_turn(tenant.account, body.num_characters, work))
    else:
        submission = work()
    conversation = partial(conversation_of, body, context.engine.tokenizer)
    inquiry = ask(context, [submission], body.explain, body.earlier, conversation)
    outputs = await open_outputs(request, context, [submission], body.NAMES, body.timeout_s, conversation)
    answer = _Answer(_reader(body, submission, context), model, submission, outputs, context, inquiry)
    if body.stream:
        return MessageStream(answer.events(), outputs.close)
    return await unless_gone(request, answer.whole())


@router.post("/count_tokens", response_model=None, responses=examples.COUNTED)
async def count_tokens(body: Conversation, request: Request, context: Ctx, tenant: Asker) -> Response:
    """Tokens of a conversation's prompt."""
    context.check_model(body.model)
    body.check()
    engine = context.engine

    async def work() -> dict[str, Any]:
        rendered = await engine.in_turn(tenant.account, body.num_characters, partial(render, body, engine.tokenizer))
        text = rendered.text if isinstance(rendered, KeptText) else rendered
        (tokens,) = await engine.tokenize(tenant.account, [text], add_special_tokens=False)
        return {"input_tokens": len(tokens)}

    return await unless_gone(request, work())


def submission_of(body: MessagesRequest, tenant: Tenant, context: Context) -> Submission:
    """The submission of a conversation, which is rendered later: long ones take their time. Raises InvalidRequest."""
    sampling, otherwise = body.sampling(), None
    if body.offered and not body.is_constrained and context.engine.info.diffusion is None:
        tools = [tool.described() for tool in body.offered]
        sampling, otherwise = lazy_calls(sampling, tools, writes_tags(context.engine.tokenizer))
    return Submission(
        prompt=partial(render, body, context.engine.tokenizer),
        num_characters=body.num_characters,
        sampling=sampling,
        otherwise=otherwise,
        account=tenant.account,
        namespace=context.namespace(tenant, body),
        priority=tenant.priority(body.priority),
        add_special_tokens=False,
        store=body.cache.store,
        reuse=EXACT,
    )


def _reader(body: MessagesRequest, submission: Submission, context: Context) -> ContentReader:
    calls = CallReader(
        frozenset(tool.name for tool in body.offered),
        forced=body.must_call,
        single=body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use,
        tagged=writes_tags(context.engine.tokenizer),
    )
    if body.is_constrained:
        return ContentReader(calls, "text")
    prompt = submission.prompt
    text = prompt.text if isinstance(prompt, KeptText) else prompt if isinstance(prompt, str) else ""
    return ContentReader(calls, "thinking" if text.rstrip().endswith("<think>") else "start")


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer to one call, as it comes."""

    reader: ContentReader
    model: str
    submission: Submission
    outputs: OutputStream
    context: Context
    inquiry: Inquiry | None

    async def whole(self) -> dict[str, Any]:
        (output,) = await collect(self.outputs, self.context)
        pieces = self.reader.push(output.text, last=True)
        content = [piece.block() for piece in pieces]
        return {**await self._message(output), "content": content, **_stop(output, pieces, self.context)}

    async def events(self) -> Events:
        index, open_type, seen = -1, "", list[Piece]()
        began = False
        async for output in follow(self.outputs, self.context):
            if not began:
                began = True
                yield {"type": "message_start", "message": await self._message(output)}
                yield {"type": "ping"}
            for piece in self.reader.push(output.delta, last=output.finish is not None):
                if piece.type != open_type or piece.type == "tool_use":
                    if open_type:
                        yield {"type": "content_block_stop", "index": index}
                    index, open_type = index + 1, piece.type
                    seen.append(piece)
                    yield {"type": "content_block_start", "index": index, "content_block": piece.start()}
                yield {"type": "content_block_delta", "index": index, "delta": piece.delta()}
            if output.finish is None:
                continue
            if open_type:
                yield {"type": "content_block_stop", "index": index}
            yield {"type": "message_delta", "delta": _stop(output, seen, self.context), "usage": usage(output)}
            yield {"type": "message_stop"}

    async def _message(self, output: Output) -> dict[str, Any]:
        """A message without content, as it begins, and why its prompt missed the cache, if that is asked for."""
        message: dict[str, Any] = {
            **{"id": f"msg_{self.submission.rid}", "type": "message", "role": "assistant", "model": self.model},
            **{"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage(output)},
        }
        if self.inquiry is None:
            return message
        explanation = await self.inquiry.explain(self.outputs, output)
        return {**message, "explain": explanation.describe(), "diagnostics": explanation.anthropic()}


def usage(output: Output) -> dict[str, Any]:
    """Token counts: read + created + input are the prompt's. `breakpoints` says up to where it is kept, or why not."""
    cached, prompt = output.cached_tokens, output.prompt_tokens
    books = output.cache or CacheBooks(read=cached, created={}, input=prompt - cached, places=[])
    created = sum(books.created.values())
    for_an_hour = sum(tokens for ttl_s, tokens in books.created.items() if ttl_s >= _HOUR_S)
    return {
        "input_tokens": books.input,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": books.read,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created - for_an_hour,
            "ephemeral_1h_input_tokens": for_an_hour,
        },
        "output_tokens": output.completion_tokens,
        "service_tier": "standard",
        "breakpoints": [
            {"tokens": place.tokens, "kept_tokens": place.kept, "ttl_s": place.ttl_s, "reason": place.reason}
            for place in books.places
        ],
    }


def _stop(output: Output, pieces: list[Piece], context: Context) -> dict[str, Any]:
    """The reason for the end. Raises Conflict for an answer that was aborted."""
    finish = output.finish
    assert finish is not None
    if finish.type == "abort":
        raise Conflict("the answer was aborted", code="aborted")
    reason, matched = "end_turn", None
    if finish.type == "length":
        is_full = output.prompt_tokens + output.completion_tokens >= context.engine.info.context_length
        reason = "model_context_window_exceeded" if is_full else "max_tokens"
    elif any(piece.type == "tool_use" for piece in pieces):
        reason = "tool_use"
    elif isinstance(finish.matched, str):
        reason, matched = "stop_sequence", finish.matched
    return {"stop_reason": reason, "stop_sequence": matched}
