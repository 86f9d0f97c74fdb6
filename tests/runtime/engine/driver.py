"""Drives an EngineCore step by step, so that arrivals, aborts and flushes fall where a test wants them."""

import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from runtime.asks import ReuseAsk
from runtime.calls import AddPin, EngineCall, FlushCache, Flushed, PinView
from runtime.config import make_config
from runtime.engine.core import EngineCore
from runtime.errors import RametError
from runtime.features.grammars.part import Grammars
from runtime.opening import open_engine
from runtime.params import SamplingParams
from runtime.protocol import Abort, AddRequest, CallEngine, Finish, Reply, TokenEvent, encode, outbound_decoder
from runtime.request import Request

A = TypeVar("A")


def make_core(path: Path, **options: Any) -> EngineCore:
    """A core in float32 that checks its invariants after every step.

    Without drafts: they are proposed by measured times, and so the number of steps would differ from run to run.
    """
    fixed = {"dtype": "float32", "device": "cpu", "pool_tokens": 4096, "debug_invariants": True, "drafts": "off"}
    options = {**fixed, **options}
    return open_engine(make_config(model=str(path), **options), path)


def call(core: EngineCore, asked: EngineCall[A]) -> A:
    """The answer to an operator's call, after as many steps as it takes. Raises RametError."""
    core.handle(CallEngine(0, asked))
    until = time.monotonic() + 60
    while not (replies := core.settle()):
        core.step()
        assert time.monotonic() < until, "the call is never answered"
    (reply,) = replies
    return on_the_wire(reply).read(asked)


def on_the_wire(reply: Reply) -> Reply:
    """The reply as the server's process gets it."""
    return outbound_decoder.decode(encode(reply))


class Driver:
    """Runs requests on a core and keeps what they gave."""

    def __init__(self, core: EngineCore):
        self.core = core
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, Finish] = {}
        self.events: dict[str, list[TokenEvent]] = {}
        self.steps = 0
        self.calls: dict[int, EngineCall[object]] = {}
        self.replies: dict[int, Reply] = {}

    def add(self, rid: str, prompt: Sequence[int], **options: Any) -> None:
        """Add an ordinary request; `options` are fields of its message and of `SamplingParams`."""
        fields = {"namespace", "account", "breakpoints", "logprobs", "prompt_logprobs_from", "priority"}
        fields |= {"store", "hold_s", "explain", "progress"}
        message = {name: options.pop(name) for name in fields & options.keys()}
        self.send(rid, prompt, options, **message)

    def send(self, rid: str, prompt: Sequence[int], sampling: dict[str, Any], **message: Any) -> None:
        """Add any request: greedy if `sampling` says nothing else, and to its end. `reuse`: fields of its ask."""
        sampling = {"temperature": 0, "ignore_eos": True} | sampling
        params = SamplingParams(**sampling)
        self.tokens[rid], self.events[rid] = [], []
        if (reuse := message.pop("reuse", None)) is not None:
            message["ask"] = msgspec.convert(reuse, ReuseAsk)
        self.take(self.core.handle(AddRequest(rid, array("i", prompt).tobytes(), params, **message)))
        if rid in self.core.requests:
            self.requests[rid] = self.core.requests[rid]

    def take(self, events: list[TokenEvent]) -> None:
        for event in (event for event in events if not event.rid.startswith("(")):  # a pin's own request
            assert event.rid not in self.finish, "an event after the terminal one"
            self.tokens[event.rid].extend(event.tokens)
            self.events[event.rid].append(event)
            if event.finish is not None:
                self.finish[event.rid] = event.finish

    def cached(self, rid: str) -> int:
        """Prompt tokens of a request that came from the cache."""
        admission = self.events[rid][0].admission
        assert admission is not None
        return admission.cached_tokens

    def abort(self, rid: str) -> None:
        self.take(self.core.handle(Abort(rid)))

    def begin(self, number: int, asked: EngineCall) -> None:
        """Begin an operator's call; `replies` has its reply, as soon as there is one."""
        self.calls[number] = asked
        self.core.handle(CallEngine(number, asked))
        self.settle()

    def settle(self) -> None:
        self.replies |= {reply.number: reply for reply in self.core.settle()}

    def answer(self, number: int = 1) -> Any:
        """The answer to a call, the error of one that failed, None before there is any. It is taken once."""
        reply = self.replies.pop(number, None)
        try:
            return reply and on_the_wire(reply).read(self.calls[number])
        except RametError as error:
            return error

    def pin(self, tokens: Sequence[int], number: int = 1, **options: Any) -> list[PinView] | RametError | None:
        """As `answer`, of a pin; None: it is computed first."""
        self.begin(number, AddPin(array("i", tokens).tobytes(), **options))
        return self.answer(number)

    def flush(self) -> Flushed:
        return call(self.core, FlushCache())

    def wait_for_grammars(self) -> None:
        """Else the steps in which requests with grammars take part depend on the threads that compile them."""
        wait(self.core.part(Grammars).compiler.open.values())

    def step(self) -> None:
        self.take(self.core.step())
        self.settle()
        self.steps += 1

    def run(self, between: Callable[[int], None] | None = None) -> None:
        """Step until nothing is left; `between` is called with the step's number before each."""
        while self.core.busy:
            if between is not None:
                between(self.steps)
            self.wait_for_grammars()
            self.step()
        self.check_idle()

    def check_idle(self) -> None:
        self.core.cache.check([])
        assert not self.core.scheduler.running
        assert not self.core.scheduler.waiting
        assert self.core.cache.tree.num_locked_pages == self.core.cache.tree.num_pinned_pages

    def together(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        """Run prompts as one batch; their tokens."""
        start = len(self.tokens)
        rids = [f"r{start + i}" for i in range(len(prompts))]
        for rid, prompt in zip(rids, prompts, strict=True):
            self.add(rid, prompt, **options)
        self.run()
        return [self.tokens[rid] for rid in rids]


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy continuation of `count` tokens by transformers."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def gives(model: Any, prompt: list[int], tokens: list[int]) -> bool:
    """Whether each token is the most likely one after the prompt and the tokens before it, by transformers."""
    logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False, logits_to_keep=len(tokens)).logits[0]
    return logits.argmax(-1).tolist() == tokens
