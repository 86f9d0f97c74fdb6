"""`ramet chat`: a conversation on the terminal, without a server."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from runtime import Engine, Submission
from runtime.errors import RametError
from runtime.frontend.output import Output
from runtime.frontend.pictures import Pictures
from runtime.params import SamplingParams

_HELP = """\
Enter sends, Alt + Enter begins a new line, the up key recalls what you said before.
/image FILE shows the model a picture with what you say next.
/new begins a new conversation, /back takes the last turn back, /system TEXT sets the system prompt.
Ctrl + C stops an answer, Ctrl + D ends. Below each answer stands how much of its prompt came from the tree."""


# Control characters but tab and line feed.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class TerminalChat:
    """The turns so far, and what the model said.

    Args:
        show: prints a piece of an answer as it comes.
    """

    def __init__(self, engine: Engine, sampling: SamplingParams, system: str, show: Callable[[str], None]):
        self._engine, self._sampling, self._show = engine, sampling, show
        self.system, self.turns = system, list[dict[str, str]]()
        self._files, self._marks = dict[str, bytes](), ""  # by their marks; those of what is said next

    def command(self, line: str) -> str | None:
        """Obey a line that begins with a slash; returns what to print, or None for any other line."""
        name, _, rest = line.partition(" ")
        if name == "/image":
            return self._show_picture(rest)
        if name == "/new":
            self.turns.clear()
            self._files, self._marks = {}, ""
            return "a new conversation"
        if name == "/back":
            del self.turns[-2:]
            return f"{len(self.turns) // 2} turns are left"
        if name == "/system":
            self.system = rest.strip()
            return "the system prompt is set" if self.system else "the system prompt is the model's own"
        return _HELP if name.startswith("/") else None

    def say(self, text: str) -> str:
        """Answer a text; returns a line of figures. Ctrl + C keeps what has been said. Raises RametError."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"role": "user", "content": self._marks + text}
        turns, images, template = [*system, *self.turns, asked], None, self._engine.tokenizer.apply_chat_template
        if said_with := [mark for mark in self._files if any(mark in turn["content"] for turn in turns)]:
            images = self._pictures(*map(self._files.__getitem__, said_with))
        prompt = template(turns) if images is None else images.write(template, turns)
        asks = Submission(prompt, self._sampling, add_special_tokens=False, images=images)
        outputs, self._marks = self._engine.stream_all([asks]), ""
        last, said = None, ""
        try:
            for last in outputs:
                said += last.delta
                self._show(last.delta)
        except KeyboardInterrupt:
            outputs.close()  # type: ignore[attr-defined]
        self.turns += [asked, {"role": "assistant", "content": said}]
        return "" if last is None else _figures(last)

    def _show_picture(self, named: str) -> str:
        if self._engine.sight is None:
            return f"{self._engine.info.name} reads text alone: it does not see pictures"
        try:
            name = " ".join(shlex.split(named))  # terminals quote the name of a file that is dropped on them
            data = Path(name).expanduser().read_bytes()
            images = self._pictures()
            mark = images.add(data)
            images.read(mark)
        except (OSError, ValueError) as error:
            return f"{named.strip() or 'no file'}: {error.strerror if isinstance(error, OSError) else error}"
        except RametError as error:
            return error.message
        self._files[mark] = data
        self._marks += mark
        return "the model sees it with what you say next"

    def _pictures(self, *files: bytes) -> Pictures:
        assert self._engine.sight is not None
        images = self._engine.sight.pictures("", "image")
        for data in files:
            images.add(data)
        return images


def _figures(output: Output) -> str:
    speed = (output.completion_tokens - 1) / max(output.e2e_s - output.queue_s - output.prefill_s, 1e-9)
    return (
        f"{output.cached_tokens:,} of {output.prompt_tokens:,} prompt tokens came from the tree; first token after "
        f"{1000 * (output.queue_s + output.prefill_s):,.0f} ms; {output.completion_tokens} tokens, {speed:.0f} a second"
    )


def harmless(text: str) -> str:
    """A text for a terminal: with signs in place of control characters, which could hide text or send commands."""
    return _CONTROLS.sub(
        lambda found: chr(0x2400 + ord(found[0])) if found[0] < " " else "\N{REPLACEMENT CHARACTER}", text
    )


def chat(engine: Engine, sampling: SamplingParams, system: str, history: Path) -> None:
    """Talk until the end of the input. `history`: file of the lines that were typed."""
    console = Console(highlight=False)

    def show(piece: str) -> None:
        print(harmless(piece), end="", flush=True)

    conversation = TerminalChat(engine, sampling, system, show)
    if sys.stdin.isatty():
        console.print(f"[dim]{engine.info.name}. /help says what the keys do.[/dim]")
    for line in _lines(history):
        told = conversation.command(line) if line.strip() else ""
        if told is None:
            try:
                told = conversation.say(line)
            except RametError as error:
                told = error.message
            print()
        if told:
            console.print(told, style="dim", markup=False, soft_wrap=True)


def _lines(history: Path) -> Iterator[str]:
    """What is typed, or the lines of standard input where it is no terminal."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    history.parent.mkdir(parents=True, exist_ok=True)
    history.touch(mode=0o600)
    session: PromptSession[str] = PromptSession("> ", history=FileHistory(str(history)), key_bindings=keys)
    while True:
        try:
            yield session.prompt()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
