"""What answers of completions and chats share: envelope, usage, log-probabilities, chunks."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from runtime.frontend.output import Output
from server.generation.service import Writer
from server.http.answers import JsonList
from server.http.context import Context
from server.openai.caching import cache_usage
from server.openai.types import CommonRequest

TextOf = Callable[[int], str]


class ChoicesWriter(Writer):
    """Base of writers whose answers consist of choices.

    Args:
        kind: the field `object` of the answer or of a stream's chunks.
        rid: the answer's id.
        prompts: token ids of the prompts by index, if the request asks for them.
        context: the server's context.
    """

    def __init__(self, kind: str, rid: str, body: CommonRequest, prompts: dict[int, list[int]], context: Context):
        info = context.engine.info
        self.text_of: TextOf = context.engine.tokenizer.token_text
        self.prompts = prompts
        self._with_usage = body.with_usage
        self._left_out = {"left_out": body.left_out} if body.left_out else {}
        self._most_of_prompt = body.prompt_logprobs
        self._of_prompts: dict[int, JsonList] = {}
        self._last: dict[tuple[int, int], Output] = {}
        self._head = {
            "id": rid,
            "object": kind,
            "created": int(time.time()),
            "model": context.check_model(body.model),
            "system_fingerprint": f"ramet-{info.dtype}-{info.attention_backend}",
        }

    def begins(self, output: Output) -> bool:
        """Whether this Output makes the first chunk of its choice."""
        return (output.index, output.choice) not in self._last

    def chunk(self, output: Output, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
        """A chunk with one choice and the fields `more`."""
        self._last[output.index, output.choice] = output
        reuse = {} if output.finish is None else reuse_of(output)
        return {**self.envelope(choice), **reuse, **more}

    def envelope(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A chunk with one choice."""
        chunk = {**self._head, "choices": [choice]}
        return chunk | {"usage": None} if self._with_usage else chunk

    def end(self) -> Iterable[dict[str, Any]]:
        if self._with_usage:
            yield {**self._head, "choices": [], "usage": self.usage(self._last.values())}

    def whole(self, done: list[Output], choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The whole answer with its choices and the fields `more`; `done`: the last Output of each choice."""
        if len(done) > 1:  # each choice reports its own reuse
            choices = [choice | reuse_of(output) for choice, output in zip(choices, done, strict=True)]
        same = {"usage": self.usage(done), **reuse_of(done[0]), **self._left_out}
        return {**self._head, "choices": choices, **same, **more}

    def add_prompt_logprobs(self, output: Output) -> None:
        """Store the log-probabilities of a prompt's tokens, if the request wants them, in vLLM's form."""
        if self._most_of_prompt is None or output.choice or not output.prompt_logprobs:
            return
        written = self._of_prompts.setdefault(output.index, JsonList())
        for item in output.prompt_logprobs:
            ranks = {token: (rank, value) for rank, (token, value) in enumerate(item.top, 1)}
            top = [token for token, _ in item.top[: self._most_of_prompt]]
            found = {token: ranks.get(token, (None, item.logprob)) for token in (item.token, *top)}
            entries = {str(token): self._entry(token, *found[token]) for token in found}
            written.append(None if item.logprob is None else entries)

    def _entry(self, token: int, rank: int | None, logprob: float | None) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": self.text_of(token)}

    def prompt_logprobs_of(self, output: Output) -> dict[str, Any]:
        """The field `prompt_logprobs` of an Output's prompt, if the request wants it."""
        if self._most_of_prompt is None or output.choice:
            return {}
        return {"prompt_logprobs": self._of_prompts.get(output.index)}

    def usage(self, outputs: Iterable[Output]) -> dict[str, Any]:
        """Token counts of the request, from the last Output of each choice."""
        return usage(outputs)


def usage(outputs: Iterable[Output]) -> dict[str, Any]:
    """Token counts of a request, from the last Output of each choice. A prompt with several choices counts once."""
    outputs = list(outputs)
    prompts = {output.index: output for output in outputs if output.choice == 0}
    prompt = sum(output.prompt_tokens for output in prompts.values())
    completion = sum(output.completion_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": cache_usage(prompts.values()),
    }


def add_logprobs(written: JsonList, output: Output, most: int, text_of: TextOf) -> None:
    """Add the log-probabilities of an Output's tokens in OpenAI's form, with at most `most` alternatives each."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text = text_of(token)
        # The bytes are unknown if the token is only a part of a character.
        known = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": known}

    for item in output.logprobs or ():
        top = [entry(token, value) for token, value in item.top[:most]]
        written.append({**entry(item.token, item.logprob), "top_logprobs": top})


def reuse_of(output: Output) -> dict[str, Any]:
    """The field `reuse`, if a reuse strategy made a report."""
    return {} if output.reuse is None or output.reuse.inline else {"reuse": output.reuse.fields()}


def finish_reason(output: Output) -> str | None:
    """`stop`, `length` or `abort`; None before the end."""
    return None if output.finish is None else output.finish.type
