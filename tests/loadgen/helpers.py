"""Small runs against a server, and sessions of a workload."""

from __future__ import annotations

import random
from typing import Any

from loadgen.http.apis import RequestFields
from loadgen.http.arrivals import Closed
from loadgen.http.client import Timeouts
from loadgen.http.load import Bounds
from loadgen.http.prose import CHARS_PER_TOKEN, Prose
from loadgen.http.run import Plan, Prepared, Result, execute
from loadgen.http.session import Session
from loadgen.http.target import Target
from loadgen.http.workloads import Source, Workload
from loadgen.http.workloads.base import length
from loadgen.http.workloads.prompts import Unique

SHORT = Unique(prompt_tokens=length("12"), output_tokens=length("4"))


def prepared(url: str, api: str = "completions", model: str = "tiny") -> Prepared:
    """A server that need not answer any question first."""
    return Prepared(
        Target("it", url, api, model), RequestFields(model), lambda word: (len(word) + 1) / CHARS_PER_TOKEN, "", 3
    )


def run(url: str, api: str = "completions", model: str = "tiny", **changes: Any) -> Result:
    """A run of short unique prompts, unless something else is wanted."""
    plan: dict[str, Any] = {
        "workload": SHORT,
        "arrivals": Closed(2),
        "bounds": Bounds(requests=4),
        "seed": 5,
        "timeouts": Timeouts(total_s=60, stall_s=60),
    }
    return execute(prepared(url, api, model), Plan(**(plan | changes)))


def source(seed: int = 1) -> Source:
    """Chance and text from a seed."""
    rng = random.Random(seed)
    return Source(rng, Prose(rng))


def sessions(workload: Workload, count: int | None = None, seed: int = 1) -> list[Session]:
    """The first sessions of a workload, or all."""
    made = workload.sessions(source(seed))
    return list(made) if count is None else [next(made) for _ in range(count)]


def text_of(session: Session) -> str:
    """The text of all messages of a session."""
    return "\n".join(message.content for turn in session.turns for message in turn.messages)
