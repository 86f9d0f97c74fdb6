"""Writes a response: its items and events."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import msgspec

from runtime.errors import RametError
from runtime.frontend.output import Encoded, Output, new_rid
from runtime.frontend.stream import InTurn
from server.explain.reason import Explanation
from server.generation.service import Generation, Writer
from server.http.answers import JsonList
from server.http.body import Unusable
from server.http.context import Context
from server.http.sse import TypedEventStream
from server.openai.caching import cache_usage
from server.openai.chat import reader_of
from server.openai.common import add_logprobs
from server.openai.reader import text_input
from server.openai.types import ChatRequest
from server.responses.types import ItemCustom, ItemNamespace, ItemTool, ResponseRequest, TextFormat

Event = dict[str, Any]


class ResponseWriter(Writer):
    """Makes a response's items from the model's text.

    Args:
        body: the request; `chat` is the same request as a chat, and `submission` its prompt.
        rid: the response's id.
        keep: stores the whole response; called, in a turn of the account, before the client gets its end.
    """

    STREAM = TypedEventStream

    def __init__(
        self,
        body: ResponseRequest,
        chat: ChatRequest,
        submission: Encoded,
        rid: str,
        context: Context,
        keep: Callable[[dict[str, Any]], None] | None = None,
    ):
        self._tokenizer = context.engine.tokenizer
        self._body = body
        self._reader = reader_of(chat, self._tokenizer, submission)
        self._keep = keep
        self._logprobs = JsonList()
        self._open: dict[str, Any] | None = None
        self._number = -1
        self._streams = True
        self._offered = {offered.name: offered for offered in body.offered}
        self.response = _beginning(body, [*body.left_out, *chat.left_out], rid, context.check_model(body.model))

    @property
    def output(self) -> list[dict[str, Any]]:
        return self.response["output"]

    def begin(self) -> Iterator[Event]:
        yield self._event("response.created", response={**self.response, "output": []})
        yield from self.idle()

    def idle(self) -> Iterator[Event]:
        yield self._event("response.in_progress", response={**self.response, "output": []})

    def add_logprobs(self, output: Output) -> None:
        if self._body.with_logprobs:
            add_logprobs(self._logprobs, output, self._body.top_logprobs or 0, self._tokenizer.token_text)

    def write(self, output: Output, why: Explanation | None) -> list[Event]:
        if why is not None:
            self.response |= {"explain": why.describe(), "prompt_cache_diagnostics": why.openai()}
        return list(self._events(output))

    async def keep(self, in_turn: InTurn) -> None:
        if self._keep is not None:
            await in_turn(partial(self._keep, self.response))

    async def answer(self, generation: Generation) -> dict[str, Any]:
        self._streams = False
        with generation.outputs:
            async for _ in generation.events(self):
                pass
        return self.response

    def _events(self, output: Output) -> Iterator[Event]:
        """The events of new text and calls; for the last Output also those of the end."""
        last = output.finish is not None
        if output.computed:
            yield from self.idle()
        thought, text, calls = self._reader.push(output.delta, last, output.is_cut)
        if thought:
            yield from self._add("reasoning", thought)
        if text or (last and not (calls or self.output or self._body.is_prewarming)):
            yield from self._add("message", text)
        for call in calls:
            yield from self._close()
            yield from self._call(call, "incomplete" if output.is_cut and call is calls[-1] else "completed")
        if last:
            status = self._note_end(output)
            yield from self._close(status)
            yield self._event(f"response.{status}", response=self.response)

    def _add(self, kind: Literal["message", "reasoning"], text: str) -> Iterator[Event]:
        if self._open is not None and self._open["type"] != kind:
            yield from self._close()
        if self._open is None:
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            own: dict[str, Any] = {"id": f"rs_{new_rid()}", "summary": [], "encrypted_content": None}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                own = {"id": f"msg_{new_rid()}", "role": "assistant"}
            self._open = {**own, "type": kind, "status": "in_progress", "content": [part]}
            self.output.append(self._open)
            yield self._of_item("response.output_item.added", item={**self._open, "content": []})
            yield self._of_part("response.content_part.added", part=dict(part))
        entries = [{**entry, "bytes": entry["bytes"] or []} for entry in msgspec.json.decode(self._logprobs.text)]
        self._logprobs = JsonList()
        (part,) = self._open["content"]
        part["text"] += text
        if "logprobs" in part:
            part["logprobs"] += entries
        if text:
            more = {"logprobs": entries} if "logprobs" in part else {}
            yield self._of_part(f"response.{part['type']}.delta", delta=text, **more)

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """End the item that is being written, if any."""
        if self._open is None:
            return
        (part,) = self._open["content"]
        more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield self._of_part(f"response.{part['type']}.done", text=part["text"], **more)
        yield self._of_part("response.content_part.done", part=part)
        self._open["status"] = status
        yield self._of_item("response.output_item.done", item=self._open)
        self._open = None

    def _call(self, call: dict[str, Any], status: str) -> Iterator[Event]:
        arguments = call["function"]["arguments"]
        _, tool, _, namespace = self._offered[call["function"]["name"]]
        item = {"call_id": call["id"], "name": tool.name} | ({"namespace": namespace} if namespace else {})
        if isinstance(tool, ItemCustom):
            kind, key, more = "custom_tool_call_input", "input", {}
            arguments = text_input(arguments)
            item |= {"id": f"ctc_{new_rid()}", "type": "custom_tool_call", "input": ""}
        else:
            kind, key, more = "function_call_arguments", "arguments", {"name": tool.name}
            item |= {"id": f"fc_{new_rid()}", "type": "function_call", "status": "in_progress", "arguments": ""}
        self.output.append(item)
        yield self._of_item("response.output_item.added", item=dict(item))
        named = {"item_id": item["id"]}
        yield self._of_item(f"response.{kind}.delta", **named, delta=arguments)
        item |= {key: arguments} | ({"status": status} if "status" in item else {})
        more |= {key: arguments}
        yield self._of_item(f"response.{kind}.done", **named, **more)
        yield self._of_item("response.output_item.done", item=item)

    def _note_end(self, output: Output) -> str:
        """Note why the response ends; returns its status."""
        assert output.finish is not None
        self.response["usage"] = {
            "input_tokens": output.prompt_tokens,
            "input_tokens_details": cache_usage([output]),
            "output_tokens": output.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens()},
            "total_tokens": output.prompt_tokens + output.completion_tokens,
        }
        if output.finish.type == "stop" or self._body.is_prewarming:
            self.response |= {"status": "completed", "completed_at": int(time.time())}
        else:
            reason = "max_output_tokens" if output.is_cut else None
            self.response |= {"status": "incomplete", "incomplete_details": {"reason": reason}}
        status: str = self.response["status"]
        return status

    def _num_reasoning_tokens(self) -> int:
        thoughts = [part["text"] for item in self.output if item["type"] == "reasoning" for part in item["content"]]
        return sum(len(tokens) for tokens in self._tokenizer.encode_each(thoughts))

    def fail(self, error: RametError) -> Event | None:
        if not self._streams:  # the status says it, as on the other routes
            return None
        if self._open is not None:
            self._open["status"] = "incomplete"
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        return self._event("response.failed", response=self.response)

    def _of_item(self, kind: str, **more: Any) -> Event:
        return self._event(kind, output_index=len(self.output) - 1, **more)

    def _of_part(self, kind: str, **more: Any) -> Event:
        assert self._open is not None
        return self._of_item(kind, item_id=self._open["id"], content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **more}


def events_of(response: dict[str, Any]) -> Iterator[Event]:
    """The events of a whole response."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "completed_at": None}
    events: list[Event] = [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]
    for index, item in enumerate(response["output"]):
        events += [
            {"type": f"response.output_item.{kind}", "output_index": index, "item": item} for kind in ("added", "done")
        ]
    events.append({"type": f"response.{response['status']}", "response": response})
    return ({**event, "sequence_number": number} for number, event in enumerate(events))


def _described(tool: ItemTool | ItemCustom | ItemNamespace) -> dict[str, Any]:
    described = tool.model_dump(exclude_none=True)
    return described | ({"parameters": tool.parameters, "strict": None} if isinstance(tool, ItemTool) else {})


# Fields that a response copies from its request.
_SAME = {"instructions", "max_output_tokens", "parallel_tool_calls", "previous_response_id", "prompt_cache_key"}
_SAME |= {"prompt_cache_retention", "store", "temperature", "tool_choice", "top_p", "truncation", "user"}


def _beginning(body: ResponseRequest, left_out: list[str], rid: str, model: str) -> dict[str, Any]:
    """A response without output."""
    form, options = body.text.format or TextFormat(), body.prompt_cache_options
    shown: dict[str, Any] = {"type": form.type}
    if form.schema_ is not None:
        shown |= {"name": "answer", "schema": form.schema_, "strict": True}
    tools = [_described(tool) for tool in body.tools if not isinstance(tool, Unusable)]
    more = {"left_out": left_out} if left_out else {}
    return body.model_dump(include=_SAME) | {
        "id": rid,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": model,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "completed_at": None,
        "usage": None,
        "conversation": None,
        "output": [],
        "tools": tools,
        "metadata": body.metadata or {},
        "top_logprobs": body.top_logprobs or 0,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "text": {"format": shown},
        "prompt_cache_options": None if options is None else options.model_dump(exclude={"prewarm"}),
        **more,
    }
