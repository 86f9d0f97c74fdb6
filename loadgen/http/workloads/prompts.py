"""Workloads of single requests: shared prefixes, documents, examples, unique prompts, diffusion."""

from collections.abc import Iterator
from dataclasses import dataclass

from loadgen.http.lengths import Distribution
from loadgen.http.session import Message, Session, Turn
from loadgen.http.workloads.base import Source, Workload, length


@dataclass(frozen=True)
class SharedPrefix(Workload):
    """Groups of requests that share a system prompt: `groups` x `questions`, in random order.

    A share `cold` of the requests has a system prompt of its own.
    """

    groups: int = 1
    questions: int = 16
    cold: float = 0.0
    prefix_tokens: Distribution = length("2048")
    prompt_tokens: Distribution = length("64")
    output_tokens: Distribution = length("64")

    def requests(self, concurrency: int) -> int:
        """Every question of every group at least once."""
        return max(self.groups * self.questions, 2 * concurrency)

    def prefixes(self, source: Source) -> Iterator[Session]:
        """One session for each group."""
        for head in self._prefixes(source):
            yield Session((Turn((head, Message.of("user", source.prose.text(1))), 1),))

    def _prefixes(self, source: Source) -> list[Message]:
        texts = [source.prose.text(self.prefix_tokens.count(source.rng)) for _ in range(self.groups)]
        return [Message.of("system", text) for text in texts]

    def sessions(self, source: Source) -> Iterator[Session]:
        """Rounds over the same prefixes, each with new questions."""
        rng, prose = source.rng, source.prose
        prefixes = self._prefixes(source)
        while True:
            order = [group for group in range(self.groups) for _ in range(self.questions)]
            rng.shuffle(order)
            for group in order:
                head, name = prefixes[group], f"group {group}"
                if self.cold and rng.random() < self.cold:
                    head, name = Message.of("system", prose.text(self.prefix_tokens.count(rng))), "cold"
                yield _single(source, [head], self.prompt_tokens, self.output_tokens, name)


@dataclass(frozen=True)
class Rag(Workload):
    """Questions about documents: an instruction, documents in changing order, a question."""

    documents: int = 8
    per_prompt: int = 1
    prefix_tokens: Distribution = length("64")
    document_tokens: Distribution = length("1024")
    prompt_tokens: Distribution = length("48")
    output_tokens: Distribution = length("64")

    def sessions(self, source: Source) -> Iterator[Session]:
        """Documents are drawn uniformly."""
        rng, prose = source.rng, source.prose
        instruction = Message.of("system", prose.text(self.prefix_tokens.count(rng)))
        texts = [prose.text(self.document_tokens.count(rng)) for _ in range(self.documents)]
        while True:
            chosen = rng.sample(range(self.documents), min(self.per_prompt, self.documents))
            found = Message.of("user", "\n\n".join(texts[i] for i in chosen))
            group = "documents " + " ".join(map(str, chosen))
            yield _single(source, [instruction, found], self.prompt_tokens, self.output_tokens, group)


@dataclass(frozen=True)
class FewShot(Workload):
    """A batch over the same worked examples (question and answer, repeated), each with a new question."""

    groups: int = 1
    shots: int = 16
    shot_tokens: Distribution = length("lognormal:96:24:32:256")
    prompt_tokens: Distribution = length("48")
    output_tokens: Distribution = length("16")

    def sessions(self, source: Source) -> Iterator[Session]:
        """Each group is a task with examples of its own."""
        rng, prose = source.rng, source.prose
        tasks = []
        for _ in range(self.groups):
            shots = [self.shot_tokens.count(rng) for _ in range(self.shots)]
            texts = [f"Question: {prose.text(0.7 * n)}\nAnswer: {prose.text(0.3 * n)}" for n in shots]
            tasks.append(Message.of("user", "\n\n".join(texts)))
        while True:
            task = rng.randrange(self.groups)
            yield _single(source, [tasks[task]], self.prompt_tokens, self.output_tokens, f"task {task}")


@dataclass(frozen=True)
class Unique(Workload):
    """Prompts without a common prefix."""

    prompt_tokens: Distribution = length("800")
    output_tokens: Distribution = length("64")

    def sessions(self, source: Source) -> Iterator[Session]:
        """Every prompt is new."""
        while True:
            yield _single(source, [], self.prompt_tokens, self.output_tokens, "")


@dataclass(frozen=True)
class LongDecode(Unique):
    """Short prompts, long answers."""

    prompt_tokens: Distribution = length("32")
    output_tokens: Distribution = length("512")


@dataclass(frozen=True)
class Diffusion(Workload):
    """Requests for a diffusion model: a shared prefix, and an answer of whole blocks.

    Steps, remasking and the like are fields of the server; `--extra-body` sends them.
    """

    groups: int = 4
    prefix_tokens: Distribution = length("512")
    prompt_tokens: Distribution = length("64")
    blocks: Distribution = length("4")
    block_tokens: int = 32

    def sessions(self, source: Source) -> Iterator[Session]:
        """As SharedPrefix, with answers of `blocks` x `block_tokens`."""
        rng = source.rng
        prefixes = [Message.of("user", source.prose.text(self.prefix_tokens.count(rng))) for _ in range(self.groups)]
        while True:
            group = rng.randrange(self.groups)
            answer = Distribution("fixed", (self.blocks.count(rng) * self.block_tokens,))
            yield _single(source, [prefixes[group]], self.prompt_tokens, answer, f"group {group}")


def _single(source: Source, shared: list[Message], prompt: Distribution, output: Distribution, group: str) -> Session:
    question = Message.of("user", source.prose.text(prompt.count(source.rng)))
    return Session((Turn((*shared, question), output.count(source.rng)),), group)
