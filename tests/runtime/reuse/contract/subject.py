"""What a reuse strategy brings so that the contract can be checked, and the core on which its requests run."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from radix import Namespace
from runtime.engine.core import EngineCore
from tests.runtime.engine.driver import Driver, make_core

NEW = 6


class Subject(ABC):
    """A strategy, its random prompts and what must be answered. A prompt is whatever the subject draws.

    Attributes:
        is_causal: whether its requests can run beside those of the other causal strategies.
        refuses: whether it refuses requests that the pool can never hold; the frontend refuses ordinary ones.
        grows: whether its running requests take further pages.
        most_rows: a step of so many rows can always be cut to fit.
        needs: pages of 4 tokens that any of its drawn prompts and an answer of `NEW` tokens have.
    """

    is_causal: ClassVar[bool] = True
    refuses: ClassVar[bool] = True
    grows: ClassVar[bool] = True
    most_rows: ClassVar[int] = 9
    needs: ClassVar[int] = 64

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def make(cls, fixture: Callable[[str], Any]) -> Subject:
        """The subject, with a model of a session's fixtures."""
        return cls(fixture("ids_dir"))

    def core(self, **options: Any) -> EngineCore:
        """A core in float32 that checks its invariants after every step."""
        return make_core(self.path, **options)

    @abstractmethod
    def draw(self, draw: random.Random) -> Any:
        """A prompt of 40 to 120 tokens. Prompts of equal random states are equal, others share nothing."""

    def anything(self, seed: int) -> Any:
        """Any prompt of up to 200 tokens that the strategy serves, the strangest included. Some seeds' share parts."""
        return self.draw(random.Random(seed % 5))

    @abstractmethod
    def message(self, prompt: Any, count: int) -> dict[str, Any]:
        """Fields of `AddRequest` besides `rid`; `tokens` as a list, `sampling` as fields of `SamplingParams`."""

    @abstractmethod
    def limit(self, draw: random.Random) -> tuple[Any, list[int]]:
        """A prompt at which the strategy is exact, and the `NEW` tokens that the model answers without any reuse."""

    @abstractmethod
    def check(self, world: World, rid: str) -> None:
        """The tokens that a request has are the reference's, also if it was aborted."""

    def size(self, prompt: Any) -> int:
        """Tokens of a prompt, as answers count them."""
        return len(self.message(prompt, 1)["tokens"])

    def ordinary(self, prompt: Any) -> list[int] | None:
        """The tokens of an ordinary request with the same text; None: there is none."""
        return None


class World(Driver):
    """Requests of one subject, and of others beside them, on one core."""

    def __init__(self, subject: Subject, **options: Any):
        super().__init__(subject.core(**options))
        self.subject = subject
        self.asked: dict[str, tuple[Subject, Any]] = {}

    def ask(
        self,
        rid: str,
        prompt: Any,
        count: int = NEW,
        by: Subject | None = None,
        reuse: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """Add a request of the world's subject, or of another; other `reuse` fields, and `fields` of its message."""
        subject = by or self.subject
        message = {**subject.message(prompt, count), **fields}
        if reuse:
            message["reuse"] |= reuse
        sampling = {"max_new_tokens": count, **message.pop("sampling", {})}
        self.send(rid, message.pop("tokens"), sampling, **message)
        if rid in self.requests:
            self.asked[rid] = subject, prompt

    def one(self, rid: str, prompt: Any, count: int = NEW, **fields: Any) -> list[int]:
        """Run one request alone; its tokens."""
        self.ask(rid, prompt, count, **fields)
        self.run()
        return self.tokens[rid]

    def report(self, rid: str) -> dict[str, Any]:
        """What a request was told of its reuse."""
        return next(event.reuse.fields() for event in self.events[rid] if event.reuse)

    def check(self, count: int | None = NEW) -> None:
        """Every request has its `count` tokens, and the right ones; None: any number, as aborted ones have."""
        for rid, (subject, _) in self.asked.items():
            assert count is None or len(self.tokens[rid]) == count, (rid, self.finish[rid])
            report = next((event.reuse.fields() for event in self.events[rid] if event.reuse), {})
            assert report.get("reused_tokens", self.cached(rid)) == self.cached(rid), rid
            if self.tokens[rid]:
                subject.check(self, rid)

    @property
    def row_layers(self) -> int:
        return self.core.counters["row_layers"]

    @property
    def tree(self):
        return self.core.cache.tree

    def evict(self) -> int:
        """Evict the last page of every second leaf; pages evicted."""
        leaves = sorted((n for n in self.tree.nodes() if not n.children and not n.refs), key=lambda n: n.pages)
        taken = 0
        for node in leaves[::2]:
            pages = self.tree._evict(1, "room", iter([(node, len(node.pages))]).__next__)
            self.core.cache.allocator.release(pages)
            taken += len(pages)
        return taken

    def retract(self, rid: str) -> None:
        self.core.scheduler._retract(self.core.requests[rid])
        self.core.cache.check(self.core.scheduler.running)

    def tenants(self) -> set[str]:
        """Tenants that have pages in the tree."""
        return {namespace.tenant for namespace, root in self.tree.roots() if root.children}


TENANT = Namespace("a")
