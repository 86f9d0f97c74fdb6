"""Answers of completions and chats: their envelope, usage, log-probabilities and chunks."""

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
    """Base of answers that consist of choices.

    Args:
        kind: the `object` of the answer, or of a stream's chunks.
        rid: the answer's id.
        prompts: tokens of the prompts, if the request asks for token ids.
        context: of the server.
    """

    def __init__(self, kind: str, rid: str, body: CommonRequest, prompts: dict[int, list[int]], context: Context):
        info = context.engine.info
        self.text_of: TextOf = context.engine.tokenizer.token_text
        self.prompts = prompts
        self._with_usage = body.with_usage
        self._last: dict[tuple[int, int], Output] = {}
        self._head = {
            **{"id": rid, "object": kind, "created": int(time.time()), "model": context.check_model(body.model)},
            "system_fingerprint": f"ramet-{info.dtype}-{info.attention_backend}",
        }

    def begins(self, output: Output) -> bool:
        """Whether no chunk of the Output's choice has been written yet."""
        return (output.index, output.choice) not in self._last

    def chunk(self, output: Output, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
        """A chunk with one choice and further fields."""
        self._last[output.index, output.choice] = output
        reuse = {} if output.finish is None else reuse_of(output)
        return {**self._head, "choices": [choice], **({"usage": None} if self._with_usage else {}), **reuse, **more}

    def end(self) -> Iterable[dict[str, Any]]:
        if self._with_usage:
            yield {**self._head, "choices": [], "usage": usage(self._last.values())}

    def whole(self, done: list[Output], choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The answer with the choices of the last Outputs, and further fields."""
        if len(done) > 1:  # each may reuse something else
            choices = [choice | reuse_of(output) for choice, output in zip(choices, done, strict=True)]
        return {**self._head, "choices": choices, "usage": usage(done), **reuse_of(done[0]), **more}


def usage(outputs: Iterable[Output]) -> dict[str, Any]:
    """Token counts over the last Outputs of a call; each prompt counts once, not for every choice."""
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
    """Add OpenAI's log-probabilities of a message's tokens, with those of `most` alternatives."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text = text_of(token)
        # A token may be part of a character; its bytes are unknown then.
        known = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": known}

    for item in output.logprobs or ():
        top = [entry(token, value) for token, value in item.top[:most]]
        written.append({**entry(item.token, item.logprob), "top_logprobs": top})


def reuse_of(output: Output) -> dict[str, Any]:
    """The field `reuse`, if a strategy reports one."""
    return {"reuse": output.reuse} if output.reuse and "strategy" in output.reuse else {}


def finish_reason(output: Output) -> str | None:
    """`stop`, `length` or `abort`; None before the end."""
    return None if output.finish is None else output.finish.type
