"""Workloads of several turns: chat and agents."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from loadgen.http.lengths import Distribution
from loadgen.http.session import Message, Session, Turn
from loadgen.http.workloads.base import Source, Workload, length


@dataclass(frozen=True)
class Chat(Workload):
    """Conversations of several turns with a think time between them."""

    turns: Distribution = length("6")
    prefix_tokens: Distribution = length("256")
    prompt_tokens: Distribution = length("lognormal:64:32:8:512")
    output_tokens: Distribution = length("64")
    think: Distribution = length("0")

    # The role of the new message in every turn but the first.
    SPEAKER: ClassVar[Literal["user", "tool"]] = "user"

    def sessions(self, source: Source) -> Iterator[Session]:
        """Sessions with one system message, which for agents stands for instructions and tool descriptions."""
        system = Message.of("system", source.prose.text(self.prefix_tokens.count(source.rng)))
        while True:
            yield self._session(source, system)

    def _session(self, source: Source, system: Message) -> Session:
        rng, prose = source.rng, source.prose
        made = []
        for i in range(self.turns.count(rng)):
            said = Message.of(self.SPEAKER if i else "user", prose.text(self.prompt_tokens.count(rng)))
            answer = self.output_tokens.count(rng)
            made.append(
                Turn(
                    messages=(said,) if i else (system, said),
                    output_tokens=answer,
                    think_s=self.think.draw(rng) if i else 0.0,
                    scripted_answer=prose.text(answer),
                )
            )
        return Session(tuple(made), dialogue=True)


@dataclass(frozen=True)
class Agents(Chat):
    """Agents whose context grows: short actions by the model, long results by their tools."""

    turns: Distribution = length("uniform:4:10")
    prefix_tokens: Distribution = length("1024")
    prompt_tokens: Distribution = length("lognormal:256:192:16:1024")
    output_tokens: Distribution = length("32")
    SPEAKER = "tool"
