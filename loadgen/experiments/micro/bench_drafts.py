"""`ramet bench drafts`: output tokens per second with drafts and without, in process.

One engine runs both, in separate namespaces, because two engines would differ in the memory layout of their weights.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from pydantic import Field, PositiveInt, PrivateAttr

from loadgen.experiments.micro.model_bench import ModelBench
from loadgen.harness import Cell, Figure
from loadgen.http.prose import Prose
from radix import Namespace
from runtime.engine.part import Part
from runtime.features.drafts import part as drafts_part
from runtime.offline import Engine, make_submissions

_NAMES = ("price", "total", "count", "order", "stock", "weight", "height", "score", "limit", "offset", "budget", "rate")
TaskName = Literal["quote", "edit", "call", "chat", "again", "unique"]


class Drafts(ModelBench):
    """Output tokens per second with drafts and without, on texts that repeat something."""

    figures = (
        Figure("rate", "tokens/s", ".0f", versus="ratio", plotted=True),
        Figure("by_cpu", "tokens per CPU second", ".0f", versus="ratio"),
        Figure("right", "right of drafted, %", ".0f", 100, interval=False),
        Figure("drafted", "drafted of output, %", ".0f", 100, interval=False),
    )

    tasks: tuple[TaskName, ...] = Field(("quote", "edit", "call", "chat", "again", "unique"), description="texts")
    clients: tuple[PositiveInt, ...] = Field((1, 8, 32), description="clients at a time")
    questions: PositiveInt = Field(4, description="questions of each client, one after the other")
    output: PositiveInt = Field(128, description="output tokens where the model answers freely")

    _engine: Engine = PrivateAttr()
    _parts: list[Part] = PrivateAttr()
    _prose: Prose = PrivateAttr()

    def baseline(self) -> tuple[str, str]:
        return "drafts", "off"

    @contextmanager
    def session(self) -> Iterator[None]:
        self._prose = Prose(random.Random(0))
        with Engine(self.model, **self.options(drafts="auto")) as self._engine:
            self._parts = list(self._engine.core.parts)
            yield

    def cells(self) -> Iterator[Cell]:
        for task in self.tasks:
            for clients in self.clients:
                for way in ("off", "auto"):
                    yield {"task": task, "clients": clients, "drafts": way}

    def measure(self, cell: Cell, draw: random.Random) -> dict[str, float]:
        prose = self._prose.reseeded(draw.random())
        asked = [TASKS[cell["task"]](draw, prose) for _ in range(cell["clients"] * self.questions)]
        wanted = [part for part in self._parts if cell["drafts"] == "auto" or not isinstance(part, drafts_part.Drafts)]
        self._engine.core.install(wanted)
        heat, seed = HEAT.get(cell["task"], 0.0), draw.randrange(1 << 30)
        sampling = [_sampling(question, heat, seed + i, self.output) for i, question in enumerate(asked)]
        return _measure(self._engine, cell["drafts"], asked, sampling, cell["clients"])


class Question(NamedTuple):
    """A prompt, and the answer that a grammar enforces; None: the model answers freely.

    `again`: whether the same question was answered before.
    """

    prompt: str
    answer: str | None = None
    again: bool = False


def _chat(system: str, user: str) -> str:
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


def quote(draw: random.Random, prose: Prose) -> Question:
    """An answer that repeats a paragraph of a document, with a sentence of its own before and behind."""
    paragraphs = [prose.text(70) for _ in range(5)]
    answer = f"{prose.text(12)} {draw.choice(paragraphs)} {prose.text(12)}"
    return Question(_chat("Answer from the document.", "\n\n".join(paragraphs) + "\n\nWhat does it say?"), answer)


def edit(draw: random.Random, prose: Prose) -> Question:
    """A function to repeat with one name changed."""
    names = draw.sample(_NAMES, 4)
    lines = [f"def {names[0]}_of({names[1]}, {names[2]}):", f"    {names[3]} = {draw.randrange(100)}"]
    for _ in range(10):
        a, b, c = draw.choices(names[1:], k=3)
        lines.append(f"    {a} = {b} {draw.choice('+-*')} {c} {draw.choice('+-')} {draw.randrange(1000)}")
    code = "\n".join([*lines, f"    return {names[3]}"])
    new = draw.choice([name for name in _NAMES if name not in names])
    return Question(_chat("Edit code.", f"Rename {names[2]} to {new}:\n{code}"), code.replace(names[2], new))


def call(draw: random.Random, prose: Prose) -> Question:
    """An agent's next call of a tool, after some calls in the same form."""

    def one() -> str:
        path = f"src/{draw.choice(_NAMES)}/{draw.choice(_NAMES)}.py"
        arguments = {"path": path, "first_line": draw.randrange(400), "last_line": draw.randrange(400, 900)}
        return json.dumps({"name": "read_file", "arguments": arguments})

    calls = [one() for _ in range(6)]
    turns = "".join(f"{text}\n{prose.text(25)}\n" for text in calls)
    return Question(_chat("Call tools.", turns + "Go on."), "\n".join([draw.choice(calls), one(), one()]))


def chat(draw: random.Random, prose: Prose) -> Question:
    """A third turn, answered freely."""
    turns = "".join(
        f"<|im_start|>user\n{prose.text(20)}<|im_end|>\n<|im_start|>assistant\n{prose.text(60)}<|im_end|>\n"
        for _ in range(2)
    )
    return Question(
        turns + f"<|im_start|>user\nWhat can you tell me about {prose.text(3)}<|im_end|>\n<|im_start|>assistant\n"
    )


def again(draw: random.Random, prose: Prose) -> Question:
    """An answer that was given before."""
    return chat(draw, prose)._replace(again=True)


def unique(draw: random.Random, prose: Prose) -> Question:
    """Text that repeats nothing, because the model writes at a temperature of 1.5."""
    return Question(_chat("Write.", prose.text(40)))


TASKS: dict[str, Callable[[random.Random, Prose], Question]] = {
    "quote": quote, "edit": edit, "call": call, "chat": chat, "again": again, "unique": unique,
}  # fmt: skip
# Temperatures; 0 for the other tasks.
HEAT = {"unique": 1.5, "chat": 0.7, "again": 0.7}


def _measure(
    engine: Engine, salt: str, asked: Sequence[Question], sampling: Sequence[dict[str, Any]], clients: int
) -> dict[str, float]:
    """Output tokens per second and per CPU second of the process, for clients with cached prompts.

    Also the share of drafted tokens that were right, and drafted tokens as a share of the output.
    """
    first = sampling if asked[0].again else [{"max_new_tokens": 1, "temperature": 0}] * len(asked)
    _ask(engine, salt, asked, first, clients)
    started, cpu = time.perf_counter(), time.process_time()
    outputs = _ask(engine, salt, asked, sampling, clients)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    tokens, drafted, accepted = (
        sum(getattr(output, name) for output in outputs) for name in ("completion_tokens", "drafted", "accepted")
    )
    right = {"right": accepted / drafted} if drafted else {}
    return {"rate": tokens / seconds, "by_cpu": tokens / cpu, "drafted": drafted / tokens, **right}


def _ask(
    engine: Engine, salt: str, asked: Sequence[Question], sampling: Sequence[dict[str, Any]], clients: int
) -> list[Any]:
    questions = iter(zip(asked, sampling, strict=True))

    async def client() -> list[Any]:
        # A client that has its answer takes the next question, so that all clients stay busy.
        return [await answer(question.prompt, how) for question, how in questions]

    async def answer(prompt: str, how: dict[str, Any]) -> Any:
        async for output in engine.astream_all(make_submissions(prompt, how, namespace=Namespace(salt=salt))):
            last = output
        return last

    async def every() -> list[list[Any]]:
        return await asyncio.gather(*(client() for _ in range(clients)))

    return [output for outputs in asyncio.run(every()) for output in outputs]


def _sampling(question: Question, heat: float, seed: int, most: int) -> dict[str, Any]:
    if question.answer is not None:
        return {"temperature": heat, "regex": literal(question.answer)}
    return {"temperature": heat, "seed": seed, "max_new_tokens": most, "ignore_eos": True}


def literal(text: str) -> str:
    """A regular expression that only this text matches."""
    return "".join("\\" + c if c in r"\.+*?()|[]{}^$#&-~/" else "\\n" if c == "\n" else c for c in text)
