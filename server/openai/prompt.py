"""Makes the prompts of chats, with breakpoints and parts of features."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Request

from runtime.errors import InvalidRequest
from runtime.frontend.deadline import Deadline
from runtime.frontend.output import Prompt, Submission, UnplacedPrompt, new_rid
from runtime.frontend.pictures import Pictures
from runtime.models.marks import new_place
from runtime.models.tokenizer import Tokenizer
from runtime.params import SamplingParams
from server.auth.keys import Tenant
from server.features.parts import FoundPart, Stores, find_parts
from server.features.registry import write_turns
from server.generation.bodies import naming
from server.http.context import Context, provided
from server.http.sse import while_there
from server.openai.caching import Mark, keep_places, unmarked
from server.openai.dialects.choosing import dialect_of, writes_special
from server.openai.dialects.dialect import Dialect
from server.openai.dialects.json_objects import WHOLE
from server.openai.messages import Message
from server.openai.tools import Function, Tool, continue_chat, render_chat, with_tools
from server.openai.types import ChatRequest

if TYPE_CHECKING:
    from server.explain.conversation import Conversation


class ChatPrompts:
    """Makes the prompts of chats. Features look up in their `stores` what a request names."""

    def __init__(self, context: Context, stores: Stores):
        self._context = context
        self._stores = stores

    async def make_submission(
        self, request: Request, body: ChatRequest, tenant: Tenant, deadline: Deadline
    ) -> Submission:
        """As `submission`, but JSON schemas are read in a thread, where keys take turns.

        Also raises ClientGone, and DeadlineExceeded.
        """
        if any(message.images for message in body.messages):
            await while_there(request, deadline.keep(self._fetch(body, tenant)))
        work = partial(self.submission, body, tenant)
        if body.offered or body.response_format or body.structured_outputs:  # they may have long schemas
            in_turn = self._context.engine.in_turn(tenant.account, body.num_characters, work)
            return await while_there(request, deadline.keep(in_turn))
        return work()

    def submission(self, body: ChatRequest, tenant: Tenant) -> Submission:
        """The submission of a conversation, whose prompt is rendered later in a thread. Raises InvalidRequest."""
        tokenizer = self._context.engine.tokenizer
        sampling = body.sampling(body.most_tokens, body.constraint())
        otherwise: SamplingParams | None = None
        dialect = dialect_of(tokenizer)
        if writes_special(tokenizer):
            sampling = sampling.model_copy(update={"skip_special_tokens": False})
        if body.offered or sampling.constrained:
            with naming(body.names):
                sampling, otherwise = self._constrained(body, sampling, dialect)
        images = self._images(body, tenant)
        return body.submission(
            partial(self._render, body, tenant, images),
            sampling,
            tenant,
            self._context,
            images=images,
            num_characters=body.num_characters,
            otherwise=otherwise,
            rid=body.request_id or new_rid(),
            logprobs=body.most_top((body.top_logprobs or 0) if body.logprobs else None),
            shared_text=partial(self._system_text, body),
            progress=body.stream and body.return_progress,
        )

    def _constrained(
        self, body: ChatRequest, sampling: SamplingParams, dialect: Dialect
    ) -> tuple[SamplingParams, SamplingParams | None]:
        """Parameters whose grammar follows tools and formats, and those to take if it cannot. Raises InvalidRequest."""
        from server.openai.call_grammars import behind_reasoning, calls_or_format, lazy_calls, schema_of_any_call

        engine, tokenizer, otherwise = self._context.engine, self._context.engine.tokenizer, None
        if body.offered and not sampling.constrained and engine.info.decoding is None and dialect.is_json:
            return lazy_calls(tokenizer, sampling, body.callable_tools(), dialect is not WHOLE)
        if body.offered and not body.must_call and sampling.json_schema is not None:
            tools, schema = body.callable_tools(), sampling.json_schema
            grammar = calls_or_format(tokenizer, tools, schema, dialect is not WHOLE)
            return sampling.model_copy(update={"json_schema": None, "grammar": grammar}), None
        if sampling.constrained:
            if body.must_call:
                any_call = json.dumps(schema_of_any_call(body.callable_tools()))
                otherwise = sampling.model_copy(update={"json_schema": any_call})
            if begins := self._reasoning_ends(body, dialect):
                sampling = behind_reasoning(tokenizer, sampling, begins)
                otherwise = otherwise and behind_reasoning(tokenizer, otherwise, begins)
        return sampling, otherwise

    async def text(self, body: ChatRequest, tenant: Tenant) -> str:
        """The rendered text of a conversation, with tokens for images. Raises InvalidRequest, also if it has parts."""
        text, images = await self._rendered(body, tenant)
        return text if images is None else images.named(text)

    async def tokens(self, body: ChatRequest, tenant: Tenant, add_special_tokens: bool = False) -> list[int]:
        """The tokens of a conversation's prompt, as clients see them. Raises as `text`."""
        text, images = await self._rendered(body, tenant)
        engine = self._context.engine
        if images is None:
            (tokens,) = await engine.tokenize(tenant.account, [text], add_special_tokens)
            return tokens
        encode = partial(images.encode, text, add_special_tokens)
        return images.shown(await engine.in_turn(tenant.account, len(text), encode))

    async def _rendered(self, body: ChatRequest, tenant: Tenant) -> tuple[str, Pictures | None]:
        """The text of a conversation, in which images have marks, and its images. Raises as `text`."""
        await self._fetch(body, tenant)
        images = self._images(body, tenant)
        work = partial(self._write, body, tenant, unmarked, images)
        prompt = await self._context.engine.in_turn(tenant.account, body.num_characters, work)
        if not isinstance(prompt, str):
            raise InvalidRequest(f"this route does not support {prompt.noun}", param="messages")
        return prompt, images

    async def _fetch(self, body: ChatRequest, tenant: Tenant) -> None:
        """Fetch the images that are URLs of hosts that the operator lists. Raises InvalidRequest."""
        if self._context.engine.sight is None or not (parts := [one for turn in body.messages for one in turn.images]):
            return
        from server.http.image_hosts import hosts_of

        hosts, param = hosts_of(self._context.config.server.image_hosts), body.names.get("prompt", "messages")
        fetched = await hosts.fetch(tenant.account, [part.url for part in parts], param)
        for part in parts:
            part.take(fetched)

    def _images(self, body: ChatRequest, tenant: Tenant) -> Pictures | None:
        """The images of a conversation, which rendering it collects; None: it has none, or the model does not see."""
        if (sight := self._context.engine.sight) is None:
            return None
        if not (parts := [part for message in body.messages for part in message.images]):
            return None
        images = sight.pictures(tenant.account, body.names.get("prompt", "messages"), body.cache_salt)
        for part in parts:
            part.see(images)
        return images

    def conversation(
        self, body: ChatRequest, tenant: Tenant, numbers: Sequence[int] | None = None
    ) -> Conversation | None:
        """The conversation behind a prompt, with parts as plain text. Raises InvalidRequest and NotFound."""
        if body.is_compiled:
            return None
        turns = find_parts(body.turns(), tenant.account, self._stores)
        return conversation_of(body, turns, self._context.engine.tokenizer, numbers)

    def following(self, body: ChatRequest, tenant: Tenant, answer: Sequence[Message]) -> str | None:
        """The conversation with its answer, up to the next message's text; None if it is no plain chat.

        Raises InvalidRequest if the template refuses the answer.
        """
        is_cut = body.truncate_prompt_tokens is not None or not body.add_generation_prompt
        if is_cut or body.continue_final_message or body.has_parts(body.parts):
            return None
        place, calls = new_place(), answer[-1].tool_calls or []
        role: Literal["tool", "user"] = "tool" if calls else "user"
        coming = Message(role=role, content=place, tool_call_id=calls[0].id if calls else None)
        later = body.model_copy(update={"messages": [*body.messages, *answer, coming]})
        before, found, _ = str(self._write(later, tenant, unmarked)).partition(place)
        return before if found else None

    def _reasoning_ends(self, body: ChatRequest, dialect: Dialect) -> Sequence[str]:
        """The texts that end the reasoning of an answer; none if it does not begin with reasoning."""
        if dialect.is_harmony:
            from server.openai.harmony import FINALS

            return () if body.must_call else FINALS
        return dialect.thoughts[1:] if begins_reasoning(body, self._context.engine.tokenizer) else ()

    def _render(self, body: ChatRequest, tenant: Tenant, images: Pictures | None = None) -> Prompt:
        """The prompt of a conversation. Raises InvalidRequest and NotFound."""
        if body.is_compiled:
            messages = [*zip(body.turns(), (message.parts for message in body.messages), strict=True)]
            describe = partial(with_tools, self._context.engine.tokenizer, tools=body.offered)
            return body.compile(messages, describe, body.add_generation_prompt, tenant.account, self._stores)
        write = partial(self._write, body, tenant, images=images)
        return keep_places(write, body.prompt_cache_options, body.prompt_cache_retention)

    def _write(
        self, body: ChatRequest, tenant: Tenant, mark: Mark, images: Pictures | None = None
    ) -> str | UnplacedPrompt:
        """Render a conversation. `mark` may write a mark behind each tool, text and call; `images`: see `_images`."""
        tools = [one for tool in body.offered for one in tool.marked(mark)]
        turns = find_parts(body.turns(mark), tenant.account, self._stores)
        render = _renderer(body, self._context.engine.tokenizer, images)
        write = continue_chat if body.continue_final_message else write_turns
        return write(turns, lambda plain: render(plain, tools))

    def _system_text(self, body: ChatRequest) -> str | None:
        """The beginning of the prompt, up to the system message's end, which conversations share; None without one.

        Only models that are not causal need it: a causal model's KV does not depend on where the shared prefix ends.
        """
        first, engine = body.messages[0], self._context.engine
        if engine.info.decoding is None or first.role != "system" or first.parts:
            return None
        try:
            return engine.tokenizer.apply_chat_template([first.plain()], add_generation_prompt=False)
        except InvalidRequest:  # some templates require a user's message
            return None


Chats = Annotated[ChatPrompts, provided(ChatPrompts)]


def conversation_of(
    body: ChatRequest, turns: list[dict[str, Any]], tokenizer: Tokenizer, numbers: Sequence[int] | None = None
) -> Conversation:
    """The `Conversation` of a request. Contents of `turns` may be lists of texts and parts."""

    def plain(content: str | list[str | FoundPart]) -> str:
        parts = [content] if isinstance(content, str) else content
        return "\n".join(part if isinstance(part, str) else part.content for part in parts)

    from server.explain.conversation import Conversation

    example = Tool(type="function", function=Function(name="example"))
    plain_turns = [{**turn, "content": plain(turn["content"])} for turn in turns]
    return Conversation(_renderer(body, tokenizer), plain_turns, body.offered, example, numbers)


def begins_reasoning(body: ChatRequest, tokenizer: Tokenizer) -> bool:
    """Whether the chat template begins an answer with the tag of reasoning."""
    opening = dialect_of(tokenizer).thoughts[0]
    if opening not in (tokenizer.chat_template or "") or body.continue_final_message:
        return False
    with suppress(InvalidRequest):  # some templates require other messages
        text = render_chat(tokenizer, [{"role": "user", "content": "x"}], [], variables=body.template_variables())
        return text.rstrip().endswith(opening.strip())
    return False


def _renderer(
    body: ChatRequest, tokenizer: Tokenizer, images: Pictures | None = None
) -> Callable[[list[dict[str, Any]], list[Tool]], str]:
    """A function that renders turns and tools with the request's options for the chat template."""
    ask, variables = body.add_generation_prompt and not body.continue_final_message, body.template_variables()
    return lambda turns, tools: render_chat(tokenizer, turns, tools, ask, variables, images)
