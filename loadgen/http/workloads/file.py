"""Prompts from a JSONL or JSON file: ShareGPT, OpenAI messages, or `{"prompt", "output_len"}`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from loadgen.http.lengths import Distribution
from loadgen.http.prose import CHARS_PER_TOKEN
from loadgen.http.session import Message, Role, Session, Turn
from loadgen.http.workloads.base import Source, Workload, length, need_file

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ROLES |= {"tool": "tool", "human": "user", "gpt": "assistant", "chatgpt": "assistant"}


@dataclass(frozen=True)
class File(Workload):
    """The prompts of a file, in its order or shuffled, once."""

    file: Path
    shuffle: bool = False
    output_tokens: Distribution = length("128")
    think: Distribution = length("0")

    API: ClassVar[str] = "chat"

    def __post_init__(self) -> None:
        need_file(self.file)

    def requests(self, concurrency: int) -> None:
        """None: it ends with its file."""

    def sessions(self, source: Source) -> Iterator[Session]:
        """One session for each entry. Raises ValueError, which names the line, for an entry in none of the formats."""
        entries = list(read_entries(self.file))
        if self.shuffle:
            source.rng.shuffle(entries)
        made = []
        for where, entry in entries:
            try:
                made.append(self._session(entry, source))
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{where} is neither ShareGPT, OpenAI messages nor a prompt: {error!r}") from error
        # A bad entry must be found before the run begins.
        yield from made

    def _session(self, entry: dict[str, Any], source: Source) -> Session:
        body = entry.get("body", entry)  # the form of OpenAI's batch files
        output = next((body[name] for name in _OUTPUT_FIELDS if body.get(name) is not None), None)
        tokens = int(output) if output is not None else self.output_tokens.count(source.rng)
        if "conversations" in body:
            said = [(_ROLES[item["from"]], str(item["value"])) for item in body["conversations"]]
            return self._dialogue(said, source)
        if "messages" in body:
            messages = [Message.of(_ROLES[m["role"]], _content(m.get("content"))) for m in body["messages"]]
            return Session((Turn(tuple(messages), tokens),), dialogue=True)
        return Session((Turn((Message.of("user", str(body["prompt"])),), tokens),))

    def _dialogue(self, said: list[tuple[Role, str]], source: Source) -> Session:
        """A session with a turn for each recorded answer, whose length the server's answer must have."""
        turns: list[Turn] = []
        waiting: list[Message] = []
        for role, text in said:
            if role != "assistant":
                waiting.append(Message.of(role, text))
            elif waiting:
                tokens = max(round(len(text) / CHARS_PER_TOKEN), 1)
                think_s = self.think.draw(source.rng) if turns else 0.0
                turns.append(Turn(tuple(waiting), tokens, think_s, scripted_answer=text))
                waiting = []
        if waiting:
            turns.append(Turn(tuple(waiting), self.output_tokens.count(source.rng)))
        if not turns:
            raise KeyError("a conversation in which nobody asks")
        return Session(tuple(turns), dialogue=True)


_OUTPUT_FIELDS = ("output_len", "output_tokens", "max_tokens", "max_completion_tokens")


def read_entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Place and JSON of every entry of a JSON list or of JSON lines. Raises ValueError, which names the line."""
    text = path.read_text("utf-8")
    if text.lstrip().startswith("["):
        yield from ((f"{path}, entry {i}", entry) for i, entry in enumerate(json.loads(text), 1))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield f"{path}, line {number}", json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from None


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part.get("type") == "text")
    return content or ""
