"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import Request, Response

from runtime.frontend.output import Output
from runtime.models.tokenizer import Tokenizer
from server.auth.keys import CurrentTenant, EveryKey
from server.explain.reason import Explanation
from server.generation.service import Generation, Service
from server.http.answers import JsonList
from server.http.context import Context
from server.openai.calls import CallReader, writes_tags
from server.openai.common import ChoicesWriter, add_logprobs, add_prompt_logprobs, finish_reason
from server.openai.prompt import Chats
from server.openai.types import ChatRequest

router = EveryKey(prefix="/v1", tags=["openai"])


@router.post("/chat/completions", response_model=None)
async def chat_completions(
    body: ChatRequest, request: Request, service: Service, chats: Chats, tenant: CurrentTenant
) -> Response:
    """The assistant's next message in a conversation."""
    context = service.context
    context.check_model(body.model)
    body.refuse_unsupported()
    work = partial(chats.submission, body, tenant)
    if body.offered or body.response_format or body.structured_outputs:  # a schema may be as long as the body
        submission = await service.in_turn(request, tenant, body.num_characters, work)
    else:
        submission = work()
    generation = await service.submit(request, body, [submission], partial(chats.conversation, body, tenant))
    writer = ChatWriter(f"chatcmpl-{submission.rid}", body, generation.outputs.prompts, context)
    return await generation.respond(request, writer, body.stream)


@dataclass(slots=True)
class _Choice:
    """A choice, as it grows; `logprobs`: those that are written next."""

    reader: CallReader
    logprobs: JsonList = field(default_factory=JsonList)
    begun: bool = False


class ChatWriter(ChoicesWriter):
    """The answer to a chat."""

    def __init__(self, rid: str, body: ChatRequest, prompts: dict[int, list[int]], context: Context):
        super().__init__("chat.completion.chunk" if body.stream else "chat.completion", rid, body, prompts, context)
        self._body = body
        self._prompt_logprobs = JsonList()
        self._choices = [_Choice(reader_of(body, context.engine.tokenizer)) for _ in range(body.n)]

    def add_logprobs(self, output: Output) -> None:
        if not output.choice:
            add_prompt_logprobs(self._prompt_logprobs, output, self._body.prompt_logprobs, self.text_of)
        if self._body.logprobs:
            add_logprobs(self._choices[output.choice].logprobs, output, self._body.top_logprobs or 0, self.text_of)

    def write(self, output: Output, why: Explanation | None) -> Iterable[dict[str, Any]]:
        choice = self._choices[output.choice]
        if not choice.begun:
            choice.begun = True
            opening = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            yield self.chunk(output, {"index": output.choice, **opening}) | self._prompt_ids()
        text, calls = choice.reader.push(output.delta, last=output.finish is not None)
        delta = ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})
        entry = {"index": output.choice, "delta": delta, **self._ending(output, output.new_token_ids)}
        choice.logprobs = JsonList()
        yield self.chunk(output, entry, **self._explained(why))

    async def answer(self, generation: Generation) -> dict[str, Any]:
        done = await generation.collect(self.add_logprobs)
        choices = []
        for output in done:
            text, calls = self._choices[output.choice].reader.push(output.text, last=True)
            message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
            if calls:
                message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
            choices.append({"index": output.choice, "message": message, **self._ending(output, output.token_ids)})
        prompt = {} if self._body.prompt_logprobs is None else {"prompt_logprobs": self._prompt_logprobs}
        why = self._explained(await generation.explain(done[0]))
        return self.whole(done, choices, **self._prompt_ids(), **prompt, **why)

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts[0]} if self._body.return_token_ids else {}

    def _ending(self, output: Output, tokens: list[int]) -> dict[str, Any]:
        """Fields of a choice behind its text."""
        choice, reason = self._choices[output.choice], finish_reason(output)
        return {
            "logprobs": {"content": choice.logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": "tool_calls" if reason == "stop" and choice.reader.num_calls else reason,
            **({"token_ids": tokens} if self._body.return_token_ids else {}),
        }

    def _explained(self, why: Explanation | None) -> dict[str, Any]:
        """Fields that report why the prompt missed the cache; OpenAI's as well, if asked for in its way."""
        if why is None:
            return {}
        options = self._body.prompt_cache_options
        typed = {"prompt_cache_diagnostics": why.openai()} if options and options.comparison_response_id else {}
        return {"explain": why.describe(), **typed}


def reader_of(body: ChatRequest, tokenizer: Tokenizer) -> CallReader:
    return CallReader(
        frozenset(tool.function.name for tool in body.callable_tools()),
        forced=body.must_call,
        single=not body.parallel_tool_calls,
        tagged=writes_tags(tokenizer),
    )
