"""Requests whose outputs repeat themselves, on a core that evaluates their steps at once or in its thread."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import cache, partial
from pathlib import Path
from typing import Any

from runtime.features.reasoning.background import Background
from runtime.features.reasoning.reservoir import Reservoir
from runtime.features.reasoning.strategy import ReasonCache, ReasoningLease
from runtime.models.tokenizer import Tokenizer
from tests.runtime.engine.driver import Driver, make_core

PAGE = 4
# All outputs, alike or not, pass the filter of words.
ANY = {"percentile": 100, "tau_max": 0.0, "tau_min": 0.0}


load_tokenizer = cache(Tokenizer.load)  # 0.3 s each time


class AtOnce(Executor):
    """Runs calls as they come, so that examples repeat."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class ReasonDriver(Driver):
    """Requests of ReasonCache, and ordinary ones, with outputs of the same few words."""

    def __init__(self, path: Path, at_once: bool = True, warm_up: int = 8, **options: Any):
        options = {"page_size": PAGE} | options
        super().__init__(make_core(path, **options))
        self.strategy = self.core.strategies["reasoncache"]
        assert isinstance(self.strategy, ReasonCache)
        if at_once:
            self.strategy.background = Background(AtOnce(), clock=lambda: 0.0)
            self.strategy.background._credit = 1e9
        self.strategy.reservoir = Reservoir(warm_up)
        tokenizer = load_tokenizer(path)
        self.strategy.filter._load_tokenizer = lambda: tokenizer
        self.bias = dict.fromkeys(words(tokenizer), 100.0)

    def watch(self, hook: str, call: Callable[..., None]) -> None:
        """Have a method of all leases be `call`, which gets the lease, the method and its arguments."""
        opened = self.strategy.open

        def watched(lease: ReasoningLease) -> ReasoningLease:
            setattr(lease, hook, partial(call, lease, getattr(lease, hook)))
            return lease

        self.strategy.open = lambda request, ask: watched(opened(request, ask))
        for request in self.core.requests.values():
            if isinstance(request.lease, ReasoningLease):
                watched(request.lease)

    def think(self, rid: str, prompt: Sequence[int], count: int, reuse: dict[str, Any], **options: Any) -> None:
        """An output of `count` tokens: few words in random order, in steps of some ten tokens."""
        fields = {name: options.pop(name) for name in {"namespace", "prompt_logprobs_from", "store"} & options.keys()}
        sampling = {"temperature": 8.0, "logit_bias": self.bias, "seed": 1, "max_new_tokens": count} | options
        self.send(rid, prompt, sampling, reuse={"strategy": "reasoncache", **reuse}, **fields)

    def plain(self, rid: str, prompt: Sequence[int], count: int, **options: Any) -> None:
        """The same without any sharing."""
        sampling = {"temperature": 8.0, "logit_bias": self.bias, "seed": 1} | options
        self.add(rid, prompt, max_new_tokens=count, **sampling)

    def report(self, rid: str) -> dict[str, Any]:
        """The last report, as an answer has it."""
        return [event.reuse for event in self.events[rid] if event.reuse][-1].fields()


def words(tokenizer: Tokenizer) -> list[int]:
    """Tokens of an output: the delimiter, and ten words."""
    found = tokenizer.encode("\n\n", add_special_tokens=False)
    for word in ("so", "we", "see", "that", "it", "is", "not", "the", "first", "one"):
        found += tokenizer.encode(f" {word}", add_special_tokens=False)
    return list(dict.fromkeys(found))
