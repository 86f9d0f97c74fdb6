"""The three APIs: request bodies, and the events of their streams."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import msgspec

from loadgen.http.record import Record
from loadgen.http.session import Conversation

_MOST = 1 << 53  # beyond it a float no longer counts in ones


class BadEvent(ValueError):
    """The server sent an event that its API does not have."""


class ServerError(Exception):
    """The server sent an error within the stream."""


@dataclass(frozen=True)
class RequestFields:
    """Fields that all requests of a run share.

    Attributes:
        model: its name on the server.
        fixed_output: the field for answers of an exact length: "ignore_eos", "min_tokens", or "" for none.
        temperature: 0 is greedy.
        extra: further fields of the body.
    """

    model: str
    fixed_output: str = "ignore_eos"
    temperature: float = 0.0
    extra: dict[str, Any] | None = None


class Answer(ABC):
    """A streamed answer: `take` each event, then `end`; the results are in the record."""

    def __init__(self, record: Record):
        self.record = record
        self.text = ""
        self.finished = False

    def take(self, data: bytes, now_s: float) -> None:
        """Record one event. Raises BadEvent or ServerError."""
        try:
            event = msgspec.json.decode(data)
            if not isinstance(event, dict):
                raise TypeError("not an object")
            if error := event.get("error"):
                raise ServerError(error.get("message") if isinstance(error, dict) else str(error))
            if self._read(event):
                self.record.arrivals_s.append(now_s)
        except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise BadEvent(f"{error!r} in {data[:200]!r}") from error

    def end(self) -> None:
        """Fill in the times and counts that the server did not report."""
        record = self.record
        if record.arrivals_s:
            record.first_s = record.arrivals_s[0]
        if record.counted_by == "pieces":
            record.output_tokens = len(record.arrivals_s)

    @abstractmethod
    def _read(self, event: dict[str, Any]) -> bool:
        """Record the text, counts and finish of an event. Returns whether it had output."""

    def _count(self, prompt: Any, output: Any, cached: Any) -> None:
        record = self.record
        if prompt is not None:
            record.prompt_tokens = _amount(prompt, int)
        if output is not None:
            record.output_tokens, record.counted_by = _amount(output, int), "server"
        if cached is not None:
            record.cached_tokens = _amount(cached, int)

    def _finish(self, reason: str) -> None:
        self.finished, self.record.finish_reason = True, reason


def _amount(value: Any, kinds: Any) -> Any:
    """A non-negative finite count or time. Raises BadEvent for anything else."""
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < _MOST:
        raise BadEvent(f"{value!r} is no count or time")
    return value


class GenerateAnswer(Answer):
    """SGLang's stream. Each event has the text so far, or only the new text; `meta_info` has the counts."""

    def _read(self, event: dict[str, Any]) -> bool:
        meta, before = event["meta_info"], self.record.output_tokens
        self._count(meta.get("prompt_tokens"), meta.get("completion_tokens"), meta.get("cached_tokens"))
        text = event["text"]
        grew = self.record.output_tokens > before or (self.record.counted_by == "pieces" and bool(text))
        # `delta` is new text. Without it `text` is the text so far, unless the server streams only new text.
        if "delta" in event:
            self.text += event["delta"]
        else:
            self.text = text if text.startswith(self.text) else self.text + text
        if (queue_s := meta.get("queue_time")) is not None:
            self.record.queue_s = _amount(queue_s, (int, float))
        if (prefill_s := meta.get("prefill_time")) is not None:
            self.record.prefill_s = _amount(prefill_s, (int, float))
        if reason := meta.get("finish_reason"):
            self._finish(str(reason["type"]))
        return grew


class OpenAIAnswer(Answer):
    """OpenAI's stream: choices with new text, and usage in one of the last events."""

    def _read(self, event: dict[str, Any]) -> bool:
        if usage := event.get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            self._count(usage.get("prompt_tokens"), usage.get("completion_tokens"), details.get("cached_tokens"))
        if timings := event.get("timings"):
            # llama.cpp's own: `cache_n` prompt tokens were cached, `prompt_n` computed.
            self._count(None, timings.get("predicted_n"), timings.get("cache_n"))
        text = ""
        for choice in event["choices"]:
            text += self._new_text(choice)
            if reason := choice.get("finish_reason"):
                self._finish(str(reason))
        self.text += text
        # A finish reason without earlier output counts as output, whose tokens had no text.
        return bool(text) or (self.finished and bool(event["choices"]) and not self.record.arrivals_s)

    def _new_text(self, choice: dict[str, Any]) -> str:
        return choice.get("text") or ""


class ChatAnswer(OpenAIAnswer):
    """The chat API's stream: new text in `delta`, reasoning included."""

    def _new_text(self, choice: dict[str, Any]) -> str:
        delta = choice.get("delta") or {}
        # vLLM's name for reasoning is `reasoning`.
        return (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")


class Api(ABC):
    """One API."""

    path: str
    answer: type[Answer]

    @abstractmethod
    def body(self, conversation: Conversation, tokens: int | None, fields: RequestFields) -> dict[str, Any]:
        """The request's body; `tokens`: wanted length of the answer, None leaves it to the server."""


class Generate(Api):
    """SGLang's `/generate`."""

    path, answer = "/generate", GenerateAnswer

    def body(self, conversation: Conversation, tokens: int | None, fields: RequestFields) -> dict[str, Any]:
        """See Api."""
        sampling: dict[str, Any] = {"temperature": fields.temperature}
        if tokens is not None:
            sampling |= {"max_new_tokens": tokens} | _fixed(fields, "min_new_tokens", tokens)
        extra = dict(fields.extra or {})
        sampling |= extra.pop("sampling_params", {})
        return {"text": conversation.as_text(), "sampling_params": sampling, "stream": True, **extra}


class Completions(Api):
    """OpenAI's `/v1/completions`."""

    path, answer = "/v1/completions", OpenAIAnswer

    def body(self, conversation: Conversation, tokens: int | None, fields: RequestFields) -> dict[str, Any]:
        """See Api."""
        return {"prompt": conversation.as_text(), **_openai(tokens, fields)}


class ChatCompletions(Api):
    """OpenAI's `/v1/chat/completions`."""

    path, answer = "/v1/chat/completions", ChatAnswer

    def body(self, conversation: Conversation, tokens: int | None, fields: RequestFields) -> dict[str, Any]:
        """See Api."""
        return {"messages": conversation.as_chat(), **_openai(tokens, fields)}


def _openai(tokens: int | None, fields: RequestFields) -> dict[str, Any]:
    body: dict[str, Any] = {"model": fields.model, "temperature": fields.temperature, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if tokens is not None:
        body |= {"max_tokens": tokens} | _fixed(fields, "min_tokens", tokens)
    return body | (fields.extra or {})


def _fixed(fields: RequestFields, least: str, tokens: int) -> dict[str, Any]:
    if fields.fixed_output == "ignore_eos":
        return {"ignore_eos": True}
    return {least: tokens} if fields.fixed_output == "min_tokens" else {}


APIS: dict[str, type[Api]] = {"generate": Generate, "chat": ChatCompletions, "completions": Completions}
