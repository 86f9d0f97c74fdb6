"""`/v1/chat/completions`."""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response

from runtime.frontend.output import Encoded, MarkedText, Output
from runtime.models.tokenizer import Tokenizer
from server.auth.keys import CurrentTenant, EveryKey
from server.explain.reason import Explanation
from server.generation.service import Generation, Service
from server.http.answers import JsonList
from server.http.context import Context
from server.openai.common import ChoicesWriter, add_logprobs, finish_reason
from server.openai.dialects.choosing import dialect_of
from server.openai.dialects.tagged import TAGGED
from server.openai.messages import Message
from server.openai.prompt import Chats, begins_reasoning
from server.openai.reader import AnswerParts, AnswerReader, CallReader, text_input
from server.openai.tools import ToolCall
from server.openai.types import ChatRequest

if TYPE_CHECKING:
    from server.openai.harmony import HarmonyReader

router = EveryKey(prefix="/v1", tags=["openai"])

# Llama 3's chat templates refuse a history with two calls in one message.
_ONE_CALL = "only supports single tool-calls at once"


@router.post("/chat/completions", response_model=None)
async def chat_completions(
    body: ChatRequest, request: Request, service: Service, chats: Chats, tenant: CurrentTenant
) -> Response:
    """The assistant's next message in a conversation."""
    context = service.context
    context.check_model(body.model)
    body.refuse_unsupported()
    submission = await chats.make_submission(request, body, tenant, body.deadline(context))
    generation = await service.submit(
        request,
        body,
        [submission],
        partial(chats.conversation, body, tenant),
        following=lambda encoded, output: chats.following(
            body, tenant, [message_of(body, context.engine.tokenizer, encoded, output)]
        ),
    )
    writer = ChatWriter(body, generation, context)
    return await generation.respond(request, writer, body.stream)


class ChatWriter(ChoicesWriter):
    """The answer to a chat."""

    def __init__(self, body: ChatRequest, generation: Generation, context: Context):
        (submission,) = generation.outputs.submissions
        kind, rid = "chat.completion.chunk" if body.stream else "chat.completion", f"chatcmpl-{submission.rid}"
        super().__init__(kind, rid, body, generation.outputs.prompts, context)
        self._body = body
        self._readers = [reader_of(body, context.engine.tokenizer, submission) for _ in range(body.n)]
        self._logprobs = [JsonList() for _ in range(body.n)]
        self._opened: set[int] = set()
        self._thoughts: list[list[str]] = [[] for _ in range(body.n)]
        self._tokenizer = context.engine.tokenizer
        names, customs = body.given_names, [tool.function.name for tool in body.offered if tool.type == "custom"]
        self._custom = {names.get(name, name) for name in customs}

    def add_logprobs(self, output: Output) -> None:
        self.add_prompt_logprobs(output)
        if self._body.logprobs:
            add_logprobs(self._logprobs[output.choice], output, self._body.top_logprobs or 0, self.text_of)

    def write(self, output: Output, why: Explanation | None) -> Iterable[dict[str, Any]]:
        yield from self._open(output.choice)
        if output.computed:
            yield self._empty(output.choice) | {"prompt_progress": _progress(output)}
            return
        said = self._read(output, output.delta)
        names = {"reasoning_content": said.thought, "content": said.text, "tool_calls": said.calls}
        delta = {name: value for name, value in names.items() if value}
        entry = {"index": output.choice, "delta": delta, **self._ending(output, output.new_token_ids)}
        self._logprobs[output.choice] = JsonList()
        yield self.chunk(output, entry, **self._explained(why))

    async def answer(self, generation: Generation) -> dict[str, Any]:
        done = await generation.collect(self.add_logprobs)
        choices = []
        for output in done:
            thought, text, calls = self._read(output, output.text)
            message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
            if thought:
                message["reasoning_content"] = thought
            if calls:
                message["tool_calls"] = [{key: call[key] for key in call if key != "index"} for call in calls]
            choices.append({"index": output.choice, "message": message, **self._ending(output, output.token_ids)})
        why = await generation.explain(done[0])
        prompt = {**self._of_prompt(), **self.prompt_logprobs_of(done[0])}
        return self.whole(done, choices, **prompt, **self._explained(why))

    def _read(self, output: Output, text: str) -> AnswerParts:
        """The parts of an answer that are final."""
        thought, shown, calls = self._readers[output.choice].push(text, output.finish is not None, output.is_cut)
        if thought:
            self._thoughts[output.choice].append(thought)
        calls = [_custom_call(call) if call["function"]["name"] in self._custom else call for call in calls]
        return AnswerParts(thought if self._body.include_reasoning else "", shown, calls)

    def usage(self, outputs: Iterable[Output]) -> dict[str, Any]:
        thoughts = self._tokenizer.encode_each(["".join(parts) for parts in self._thoughts])
        return {**super().usage(outputs), "completion_tokens_details": {"reasoning_tokens": sum(map(len, thoughts))}}

    def idle(self) -> Iterable[dict[str, Any]]:
        yield from self._open(0)
        yield self._empty(0)

    def _open(self, choice: int) -> Iterable[dict[str, Any]]:
        """The first chunk of a choice, once."""
        if choice not in self._opened:
            self._opened.add(choice)
            yield self._empty(choice, role="assistant") | self._of_prompt()

    def _empty(self, choice: int, **delta: str) -> dict[str, Any]:
        opening = {"delta": {**delta, "content": ""}, "logprobs": None, "finish_reason": None}
        return self.envelope({"index": choice, **opening})

    def _of_prompt(self) -> dict[str, Any]:
        """The prompt's tokens, if the request wants them, and what the prompt lacks of the request."""
        return self._left_out | ({"prompt_token_ids": self.prompts[0]} if self._body.return_token_ids else {})

    def _ending(self, output: Output, tokens: list[int]) -> dict[str, Any]:
        """The fields of a choice that follow its text."""
        reason, calls = finish_reason(output), self._readers[output.choice].num_calls
        ids = {"token_ids": tokens} if self._body.return_token_ids else {}
        return {
            "logprobs": {"content": self._logprobs[output.choice], "refusal": None} if self._body.logprobs else None,
            "finish_reason": "tool_calls" if reason == "stop" and calls else reason,
            **ids,
        }

    def _explained(self, why: Explanation | None) -> dict[str, Any]:
        """The field `explain`, and OpenAI's diagnostics if the request asked through `prompt_cache_options`."""
        if why is None:
            return {}
        options = self._body.prompt_cache_options
        typed = {"prompt_cache_diagnostics": why.openai()} if options and options.comparison_response_id else {}
        return {"explain": why.describe(), **typed}


def _custom_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.pop("function")
    return {**call, "type": "custom", "custom": {"name": function["name"], "input": text_input(function["arguments"])}}


def _progress(output: Output) -> dict[str, Any]:
    """llama.cpp's report of a prompt that is being computed."""
    counts = {"total": output.prompt_tokens, "cache": output.cached_tokens, "processed": output.computed}
    return {**counts, "time_ms": round(1000 * (output.e2e_s - output.queue_s))}


def message_of(body: ChatRequest, tokenizer: Tokenizer, submission: Encoded, output: Output) -> Message:
    """An answer as a client sends it back."""
    thought, text, calls = reader_of(body, tokenizer, submission).push(output.text, True, output.is_cut)
    sent, thought = [ToolCall(**call) for call in calls] or None, thought if body.include_reasoning else ""
    return Message(role="assistant", content=text, reasoning_content=thought or None, tool_calls=sent)


def reader_of(body: ChatRequest, tokenizer: Tokenizer, submission: Encoded) -> "AnswerReader | HarmonyReader":
    """The reader of an answer to a rendered prompt."""
    dialect = dialect_of(tokenizer)
    is_forced = submission.sampling.constrained and submission.sampling.lazy is None
    calls = CallReader(
        body.parameters_of_tools,
        forced=body.must_call,
        single=not body.parallel_tool_calls or _ONE_CALL in (tokenizer.chat_template or ""),
        dialect=dialect if dialect.is_json or not is_forced else TAGGED,
        given_names=body.given_names,
    )
    if dialect.is_harmony:
        from server.openai.harmony import HarmonyReader

        return HarmonyReader(calls, body.separate_reasoning)
    if not body.separate_reasoning:
        return AnswerReader(calls, "text")
    prompt, opening = submission.prompt, dialect.thoughts[0].strip()
    text = prompt.text if isinstance(prompt, MarkedText) else prompt
    begun = text.rstrip().endswith(opening) if isinstance(text, str) else begins_reasoning(body, tokenizer)
    return AnswerReader(calls, "thought" if begun and not is_forced else "start")
