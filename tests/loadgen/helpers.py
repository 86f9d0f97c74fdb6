"""Small runs against a server, and sessions of a workload."""

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


def run(url: str, api: str = "completions", **changes: Any) -> Result:
    """A run of short unique prompts, unless `changes` of the plan say otherwise, on a server that is not probed."""
    plan: dict[str, Any] = {
        "workload": SHORT,
        "arrivals": Closed(2),
        "bounds": Bounds(requests=4),
        "seed": 5,
        "timeouts": Timeouts(total_s=60, stall_s=60),
    }
    target, fields = Target("it", url, api, "tiny"), RequestFields("tiny")
    server = Prepared(target, fields, lambda word: (len(word) + 1) / CHARS_PER_TOKEN, "", 3)
    return execute(server, Plan(**(plan | changes)))


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
