"""Workloads of several turns: chat and agents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loadgen.lengths import Distribution
from loadgen.session import Message, Session, Turn
from loadgen.workloads.base import Source, Workload, length


@dataclass(frozen=True)
class Chat(Workload):
    """Conversations with time to think between the turns."""

    turns: Distribution = length("6")
    prefix_tokens: Distribution = length("256")
    prompt_tokens: Distribution = length("lognormal:64:32:8:512")
    output_tokens: Distribution = length("64")
    think: Distribution = length("0")

    def sessions(self, source: Source) -> Iterator[Session]:
        """All conversations share the system prompt."""
        system = Message.of("system", source.prose.text(self.prefix_tokens.count(source.rng)))
        while True:
            yield _dialogue(source, system, self.turns, self.prompt_tokens, self.output_tokens, self.think, tools=False)


@dataclass(frozen=True)
class Agents(Workload):
    """Agents whose context grows: short actions by the model, long results by their tools."""

    turns: Distribution = length("uniform:4:10")
    prefix_tokens: Distribution = length("1024")
    prompt_tokens: Distribution = length("lognormal:256:192:16:1024")
    output_tokens: Distribution = length("32")
    think: Distribution = length("0")

    def sessions(self, source: Source) -> Iterator[Session]:
        """All agents share the instructions and the descriptions of their tools."""
        system = Message.of("system", source.prose.text(self.prefix_tokens.count(source.rng)))
        while True:
            yield _dialogue(source, system, self.turns, self.prompt_tokens, self.output_tokens, self.think, tools=True)


def _dialogue(
    source: Source,
    system: Message,
    turns: Distribution,
    prompt: Distribution,
    output: Distribution,
    think: Distribution,
    tools: bool,
) -> Session:
    rng, prose = source.rng, source.prose
    made = []
    for i in range(turns.count(rng)):
        said = Message.of("tool" if i and tools else "user", prose.text(prompt.count(rng)))
        answer = output.count(rng)
        made.append(
            Turn(
                messages=(said,) if i else (system, said),
                output_tokens=answer,
                think_s=think.draw(rng) if i else 0.0,
                scripted_answer=prose.text(answer),
            )
        )
    return Session(tuple(made), dialogue=True)
