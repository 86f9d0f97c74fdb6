"""`/v1/messages` and `/v1/messages/count_tokens`."""

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from fastapi import Request, Response
from msgspec.structs import replace

from radix.node import TOKEN_BYTES
from runtime.errors import RametError
from runtime.frontend.output import Encoded, Output
from runtime.frontend.stream import InTurn
from runtime.protocol import CacheUsage
from server.anthropic.content import ContentPiece, pieces_of
from server.anthropic.prompt import chat_of, numbers_of, turns_of
from server.anthropic.threads import answer_of, continued, keep
from server.anthropic.types import MessagesPrompt, MessagesRequest
from server.auth.keys import CurrentTenant, EveryKey
from server.errors import Conflict, MessageError, message_error
from server.explain.reason import Explanation
from server.generation.bodies import naming
from server.generation.service import Generation, Service, Writer
from server.generation.store import Responses
from server.http.context import Context, Ctx
from server.http.sse import TypedEventStream, unless_gone, while_there
from server.openai.chat import reader_of
from server.openai.prompt import Chats
from server.openai.types import ChatRequest

router = EveryKey(
    prefix="/v1/messages",
    tags=["anthropic"],
    responses={"4XX": {"model": MessageError}, "5XX": {"model": MessageError}},
)

_HOUR_S = 3600.0


class MessageStream(TypedEventStream):
    """Events of a message, with errors in Anthropic's form."""

    def describe(self, error: RametError) -> dict[str, Any]:
        return message_error(error)


@router.post("", response_model=None)
async def messages(
    body: MessagesRequest,
    request: Request,
    service: Service,
    chats: Chats,
    threads: Responses,
    tenant: CurrentTenant,
) -> Response:
    """The assistant's next message in a conversation; blocks with `cache_control` are kept in the cache."""
    service.context.check_model(body.model)
    deadline, engine = body.deadline(service.context), service.context.engine
    body = await while_there(request, deadline.keep(continued(body, threads, tenant.account, engine)))
    with naming(body.NAMES):
        chat = chat_of(body)
        submission = await chats.make_submission(request, chat, tenant, deadline)

    def following(encoded: Encoded, output: Output) -> str | None:
        said = reader_of(chat, engine.tokenizer, encoded).push(output.text, True, output.is_cut)
        return chats.following(chat, tenant, turns_of(answer_of(pieces_of(said, output.is_cut))))

    submission = replace(submission, progress=body.stream)
    generation = await service.submit(
        request,
        body,
        [submission],
        lambda: chats.conversation(chat, tenant, numbers_of(body)),
        following=following,
    )
    writer = MessageWriter(body, chat, generation.outputs.submissions[0], service.context)
    if body.thread is not None:
        writer.keep_pieces = partial(keep, body, name=writer.id, threads=threads, account=tenant.account)
    return await generation.respond(request, writer, body.stream)


@router.post("/count_tokens", response_model=None)
async def count_tokens(
    body: MessagesPrompt, request: Request, context: Ctx, chats: Chats, threads: Responses, tenant: CurrentTenant
) -> Response:
    """The number of tokens in a conversation's prompt."""
    context.check_model(body.model)

    async def work() -> dict[str, Any]:
        whole = await continued(body, threads, tenant.account, context.engine)
        count = len(await chats.tokens(chat_of(whole), tenant))
        left_out = {"left_out": whole.left_out} if whole.left_out else {}
        return {"input_tokens": count, **left_out}

    return await unless_gone(request, work())


class MessageWriter(Writer):
    """The answer to a conversation.

    Attributes:
        id: the answer's id.
        keep_pieces: keeps all pieces of the answer, see `keep`; None: nothing is kept.
    """

    STREAM = MessageStream

    def __init__(self, body: MessagesRequest, chat: ChatRequest, submission: Encoded, context: Context):
        self._reader = reader_of(chat, context.engine.tokenizer, submission)
        self._model, self._context_length = context.check_model(body.model), context.engine.info.context_length
        self.id = f"msg_{submission.rid}"
        self.keep_pieces: Callable[..., Awaitable[None]] | None = None
        self._pieces: list[ContentPiece] = []
        self._left_out, self._prompt = list(dict.fromkeys([*body.left_out, *chat.left_out])), submission
        self._begun = self._explained = False
        self._late: dict[str, Any] = {}
        self._index = -1
        self._seen: list[ContentPiece] = []

    async def answer(self, generation: Generation) -> dict[str, Any]:
        (output,) = await generation.collect()
        pieces = self._read(output, output.text)
        message = self._message(output, await generation.explain(output))
        answer = {**message, "content": [piece.block() for piece in pieces], **self._stop(output, pieces)}
        await self.keep(generation.outputs.in_turn)
        return answer

    async def keep(self, in_turn: InTurn) -> None:
        if self.keep_pieces is not None:
            await self.keep_pieces(self._pieces, in_turn=in_turn)

    def explains(self, output: Output) -> bool:
        return not self._explained

    def idle(self) -> Iterable[dict[str, Any]]:
        if not self._begun:
            yield from self._begin(Output(0, 0, "", prompt_tokens=len(self._prompt.tokens) // TOKEN_BYTES), None)
        yield {"type": "ping"}

    def write(self, output: Output, why: Explanation | None) -> Iterable[dict[str, Any]]:
        self._explained, was_begun = True, self._begun
        if was_begun and why is not None:
            self._late = self._reasons(why)
        if not was_begun:
            yield from self._begin(output, why)
        if output.computed or not was_begun:
            yield {"type": "ping"}
        for piece in self._read(output, output.delta):
            if not self._seen or piece.type != self._seen[-1].type or piece.type == "tool_use":
                yield from self._close()
                self._index += 1
                self._seen.append(piece)
                yield {"type": "content_block_start", "index": self._index, "content_block": piece.start()}
            yield {"type": "content_block_delta", "index": self._index, "delta": piece.delta()}
        if output.finish is not None:
            yield from self._close()
            delta = {"type": "message_delta", "delta": self._stop(output, self._seen), "usage": usage(output)}
            yield delta | self._late
            yield {"type": "message_stop"}

    def _read(self, output: Output, text: str) -> list[ContentPiece]:
        pieces = pieces_of(self._reader.push(text, output.finish is not None, output.is_cut), output.is_cut)
        if self.keep_pieces is not None:
            self._pieces += pieces
        return pieces

    def _begin(self, output: Output, why: Explanation | None) -> Iterable[dict[str, Any]]:
        self._begun = True
        yield {"type": "message_start", "message": self._message(output, why)}

    def _close(self) -> Iterable[dict[str, Any]]:
        if self._seen:
            yield {"type": "content_block_stop", "index": self._index}

    def _message(self, output: Output, why: Explanation | None) -> dict[str, Any]:
        """A message without content. With `why`, it also has the reason for its cache miss."""
        left_out = {"left_out": self._left_out} if self._left_out else {}
        message: dict[str, Any] = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(output),
            **left_out,
        }
        return message if why is None else message | self._reasons(why)

    @staticmethod
    def _reasons(why: Explanation) -> dict[str, Any]:
        return {"explain": why.describe(), "diagnostics": why.anthropic()}

    def _stop(self, output: Output, pieces: list[ContentPiece]) -> dict[str, Any]:
        """Anthropic's `stop_reason` and `stop_sequence`. Raises Conflict if the answer was aborted."""
        finish = output.finish
        assert finish is not None
        if finish.type == "abort":
            raise Conflict("the answer was aborted", code="aborted")
        reason, matched = "end_turn", None
        if output.is_cut:
            is_full = output.prompt_tokens + output.completion_tokens >= self._context_length
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif any(piece.type == "tool_use" for piece in pieces):
            reason = "tool_use"
        elif isinstance(finish.matched, str):
            reason, matched = "stop_sequence", finish.matched
        return {"stop_reason": reason, "stop_sequence": matched}


def usage(output: Output) -> dict[str, Any]:
    """Token counts. Cache reads, cache creation and input tokens add up to the prompt; see README for `breakpoints`."""
    cached, prompt = output.cached_tokens, output.prompt_tokens
    used = output.usage or CacheUsage(read=cached, created={}, input=prompt - cached, breakpoints=[])
    created = sum(used.created.values())
    for_an_hour = sum(tokens for ttl_s, tokens in used.created.items() if ttl_s >= _HOUR_S)
    replayed = {"replayed_tokens": output.replayed} if output.replayed else {}
    return {
        "input_tokens": used.input,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": used.read,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created - for_an_hour,
            "ephemeral_1h_input_tokens": for_an_hour,
        },
        "output_tokens": output.completion_tokens,
        "service_tier": "standard",
        **replayed,
        "breakpoints": [
            {"tokens": place.tokens, "kept_tokens": place.kept, "ttl_s": place.ttl_s, "reason": place.reason}
            for place in used.breakpoints
        ],
    }
