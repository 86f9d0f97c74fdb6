"""The server under load: what it is asked before a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from loadgen.apis import APIS, Ask
from loadgen.prose import CHARS_PER_TOKEN, Cost, Prose, vocabulary
from loadgen.session import Conversation, Message

_PROBE_SECONDS = 120


class TargetError(RuntimeError):
    """The server cannot be measured; the message says why."""


@dataclass(frozen=True)
class Target:
    """A server.

    Attributes:
        name: for tables.
        url: without the API's path.
        api: one of APIS.
        model: its name; None asks the server for it.
        key: sent as a bearer token, never written into a report.
    """

    name: str
    url: str
    api: str
    model: str | None = None
    key: str | None = None

    def client(self) -> httpx.Client:
        """For the questions before a run."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        # A proxy of the environment has no business between a load generator and its server.
        return httpx.Client(base_url=self.url, headers=headers, timeout=_PROBE_SECONDS, trust_env=False)


def find_model(target: Target) -> str:
    """The name of the model that is served. Raises TargetError if the server cannot be reached or tells none."""
    if target.model is not None:
        return target.model
    try:
        with target.client() as client:
            answer = client.get("/v1/models")
            if answer.status_code == 200:
                return str(answer.json()["data"][0]["id"])
    except httpx.TransportError as error:
        raise TargetError(f"{target.url} cannot be reached: {error}") from None
    except (ValueError, LookupError, TypeError):
        pass
    if target.api == "generate":
        return ""  # its requests name no model
    raise TargetError(f"{target.url}/v1/models names no model; --model does")


def word_cost(target: Target, model: str, prose: Prose) -> tuple[Cost, str, int]:
    """Tokens of a word, how they were found, and how exact that way is (0 is exact).

    Exact where `/tokenize` takes several texts (words are tokens of their own in byte-level BPE, so their counts add
    up); else the characters per token of a long text, from `/tokenize` or from the usage of two requests.
    """
    with target.client() as client:
        try:
            words = vocabulary()
            if (counts := _tokenize(client, model, [f" {word}" for word in words])) is not None:
                table = dict(zip(words, counts, strict=True))
                return table.__getitem__, "the server's count of every word", 0
            long, short = prose.text(600), prose.text(100)
            if (single := _tokenize(client, model, long)) is not None:
                return _by_length(len(long) / single[0]), "the server's count of a long text", 1
            tokens = _usage(client, target, model, long) - _usage(client, target, model, short)
            if tokens > 0:
                return _by_length((len(long) - len(short)) / tokens), "the usage that the server reported", 2
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            pass
    return _by_length(CHARS_PER_TOKEN), f"{CHARS_PER_TOKEN} characters per token, assumed", 3


def _by_length(chars_per_token: float) -> Cost:
    return lambda word: (len(word) + 1) / chars_per_token


def _tokenize(client: httpx.Client, model: str, prompt: str | list[str]) -> list[int] | None:
    # vLLM wants a model, and SGLang and Ramet refuse or ignore one.
    for extra in ({}, {"model": model}):
        answer = client.post("/tokenize", json={"prompt": prompt, "add_special_tokens": False, **extra})
        if answer.status_code == 200:
            count = answer.json()["count"]
            counts = count if isinstance(count, list) else [count]
            return counts if len(counts) == (1 if isinstance(prompt, str) else len(prompt)) else None
    return None


def _usage(client: httpx.Client, target: Target, model: str, text: str) -> int:
    body = _one_token(target, model, text)
    answer = client.post(APIS[target.api].path, json=body).raise_for_status().json()
    usage: dict[str, Any] = answer["meta_info"] if "meta_info" in answer else answer["usage"]
    return int(usage["prompt_tokens"])


def _one_token(target: Target, model: str, text: str) -> dict[str, Any]:
    conversation = Conversation(False, [Message.of("user", text)])
    body = APIS[target.api]().body(conversation, 1, Ask(model, fixed_output=""))
    body.pop("stream_options", None)
    return body | {"stream": False}


def takes_ignore_eos(target: Target, model: str) -> bool:
    """Whether the server accepts the field. That it heeds it is seen from the lengths of its answers."""
    body = _one_token(target, model, "Once upon a time")
    if target.api == "generate":
        body["sampling_params"]["ignore_eos"] = True
    else:
        body["ignore_eos"] = True
    try:
        with target.client() as client:
            return client.post(APIS[target.api].path, json=body).status_code == 200
    except httpx.HTTPError as error:
        raise TargetError(f"{target.url} does not answer a first request: {error}") from None
