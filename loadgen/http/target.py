"""The server under load, and the probes before a run."""

from dataclasses import dataclass
from typing import Any

import httpx

from loadgen.harness import BenchError
from loadgen.http.apis import APIS, RequestFields
from loadgen.http.prose import CHARS_PER_TOKEN, Cost, Prose, vocabulary
from loadgen.http.session import Conversation, Message
from loadgen.http.tokens import TokenCounter

_PROBE_SECONDS = 120


class TargetError(BenchError):
    """The server cannot be measured; the message has the reason."""


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

    def __post_init__(self) -> None:
        # OpenAI's clients need `/v1` in the URL, so users often include it.
        object.__setattr__(self, "url", self.url.rstrip("/").removesuffix("/v1"))

    def client(self) -> httpx.Client:
        """A client for the probes before a run."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        # Without the proxies of the environment.
        return httpx.Client(base_url=self.url, headers=headers, timeout=_PROBE_SECONDS, trust_env=False)


def find_model(target: Target) -> str:
    """The name of the served model. Raises TargetError if the server cannot be reached or names none."""
    if target.model is not None:
        return target.model
    try:
        with target.client() as client:
            answer = client.get("/v1/models")
            if answer.status_code == 200:
                return str(answer.json()["data"][0]["id"])
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise TargetError(f"{target.url} cannot be reached: {error}") from None
    except (ValueError, LookupError, TypeError):
        pass
    if target.api == "generate":
        return ""  # its requests name no model
    raise TargetError(f"{target.url}/v1/models names no model; --model does")


def word_cost(target: Target, model: str, prose: Prose, counter: TokenCounter | None) -> tuple[Cost, str, int]:
    """Tokens of a word, their source in words, and the rank of that source (0 is exact).

    The counts are exact with the model's tokenizer, or if `/tokenize` takes several texts, because byte-level BPE never
    merges words. Otherwise they follow from the characters per token of a long text, by `/tokenize` or by the usage of
    two requests.
    """
    words = vocabulary()
    texts = [f" {word}" for word in words]
    if counter is not None:
        return dict(zip(words, counter.count(texts), strict=True)).__getitem__, "the tokenizer that was given", 0
    with target.client() as client:
        try:
            if (counts := _tokenize(client, model, texts)) is not None:
                return dict(zip(words, counts, strict=True)).__getitem__, "the server's count of every word", 0
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
    """Tokens by the server's `/tokenize`; None where it lacks the route or refuses such a prompt."""
    plain = {"prompt": prompt, "add_special_tokens": False}
    # vLLM needs a model, SGLang and Ramet refuse or ignore one, and llama.cpp has other names.
    for body in (plain, plain | {"model": model}, {"content": prompt, "add_special": False}):
        answer = client.post("/tokenize", json=body)
        if answer.status_code == 200:
            found = answer.json()
            count = found["count"] if "count" in found else len(found["tokens"])
            if count == 0:  # llama.cpp ignores `prompt`
                continue
            counts = count if isinstance(count, list) else [count]
            return counts if len(counts) == (1 if isinstance(prompt, str) else len(prompt)) else None
    return None


def _usage(client: httpx.Client, target: Target, model: str, text: str) -> int:
    body = _one_token(target, model, text)
    answer = client.post(APIS[target.api].path, json=body).raise_for_status().json()
    usage: dict[str, Any] = answer["meta_info"] if "meta_info" in answer else answer["usage"]
    return int(usage["prompt_tokens"])


def _one_token(target: Target, model: str, text: str, fixed_output: str = "") -> dict[str, Any]:
    conversation = Conversation(False, [Message.of("user", text)])
    body = APIS[target.api]().body(conversation, 1, RequestFields(model, fixed_output))
    body.pop("stream_options", None)
    return body | {"stream": False}


FIXED_OUTPUT = ("ignore_eos", "min_tokens")


def find_fixed_output(target: Target, model: str) -> str:
    """The first field of FIXED_OUTPUT that the server accepts, or "".

    The lengths of answers show whether the server obeys it. Raises TargetError if the server accepts no request.
    """
    path, problem = APIS[target.api].path, ""
    for field in (*FIXED_OUTPUT, ""):
        try:
            with target.client() as client:
                answer = client.post(path, json=_one_token(target, model, "Once upon a time", field))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TargetError(f"{target.url} does not answer a first request: {error}") from None
        if answer.status_code == 200:
            return field
        problem = f"{answer.status_code}, {answer.text[:300]}"
    raise TargetError(f"{target.url}{path} refuses a first request: {problem}")
