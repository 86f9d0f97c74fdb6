"""`python -m loadgen.experiments.micro.pictures DIR`: the pictures of HOW.md, of an engine with real prompts."""

from __future__ import annotations

import sys
import textwrap
from array import array
from html import escape
from pathlib import Path
from typing import Any

from loadgen.offline.drive import Drive, answer
from radix.node import TOKEN_BYTES
from runtime.calls import GetOutline
from runtime.config import make_config
from runtime.models.resolve import resolve_model
from runtime.models.tokenizer import Tokenizer
from runtime.request import Work
from server.explain.compare import compare

SYSTEM = "You are the librarian of a small town. You answer briefly, and you name the shelf on which a book stands."
QUESTIONS = ("Where are the books about rivers?", "Do you have poems about the sea?")
DAYS = ("Monday, 8:14", "Monday, 8:15")
_WIDTH, _LINE = 900, 16
_KEPT, _NEW, _EDGE, _INK, _SOFT = "#cfe8c9", "#fbe3b8", "#5f6459", "#22251f", "#5f6459"


class Picture:
    """An SVG of the page's width."""

    def __init__(self, title: str):
        self._parts, self._title, self.height = list[str](), title, 0.0

    def box(self, x: float, y: float, width: float, height: float, colour: str, edge: str = "none") -> None:
        shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._parts.append(f'<rect {shape} rx="2" fill="{colour}" stroke="{edge}"/>')
        self.height = max(self.height, y + height)

    def text(self, x: float, y: float, text: str, colour: str = _INK, size: int = 12) -> None:
        style = f'fill="{colour}" font-size="{size}" font-family="sans-serif" xml:space="preserve"'
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>')
        self.height = max(self.height, y + 4)

    def save(self, path: Path) -> None:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {self.height + 8:.0f}" role="img">'
        page = '<rect width="100%" height="100%" fill="#ffffff"/>'
        path.write_text("\n".join([head, f"<title>{escape(self._title)}</title>", page, *self._parts, "</svg>\n"]))


class Scene:
    """An engine, and chats as its tokens."""

    def __init__(self, model: Path):
        self.tokenizer = Tokenizer.load(model)
        self.drive = Drive(model, dtype="float32", pool_tokens=4096, page_size=16)
        self.steps: list[list[Work]] = []
        plan = self.drive.core.planner.plan

        def watched(work: list[Work]) -> Any:
            self.steps.append(work)
            return plan(work)

        self.drive.core.planner.plan = watched  # type: ignore[method-assign, assignment]

    def chat(self, system: str, question: str) -> array[int]:
        turns = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        return array("i", self.tokenizer.encode(self.tokenizer.apply_chat_template(turns), add_special_tokens=False))

    def run(self, prompt: array[int], output: int = 4) -> int:
        """Serve a request; returns its cached tokens."""
        self.drive.add(prompt, output)
        request = next(reversed(self.drive.core.requests.values()))
        while self.drive.core.busy:
            self.drive.events()
        return request.cached_tokens


def draw_tree(scene: Scene) -> Picture:
    """The tree after two chats with one system prompt."""
    for question in QUESTIONS:
        scene.run(scene.chat(SYSTEM, question))
    blocks = answer(scene.drive.core, GetOutline(50, 64)).blocks
    picture, places = Picture("The tree after two prompts"), dict[int, tuple[float, float, float]]()
    ends = dict[int, float]()
    for number, block in enumerate(blocks):
        if block.parent is None:
            places[number] = (0.0, 0.0, float(_WIDTH))
            continue
        x, y, width = places[block.parent]
        above = blocks[block.parent]
        wide = width * block.total / (above.total - above.tokens if above.parent is None else above.total)
        x = ends.get(block.parent, x)
        ends[block.parent] = x + wide
        places[number] = (x, y + (0 if above.parent is None else 92), wide)
        picture.box(x + 1, places[number][1], wide - 2, 88, _KEPT if block.hits else _NEW, _EDGE)
        tokens = array("i", block.preview).tolist()
        label = scene.tokenizer.decode(tokens, skip_special_tokens=False).replace("\n", " ")
        for i, line in enumerate(textwrap.wrap(label, max(int(wide / 7), 4))[:4]):
            picture.text(x + 7, places[number][1] + _LINE * (i + 1), line)
        told = f"{block.tokens} tokens, {block.hits} hit{'' if block.hits == 1 else 's'}"
        picture.text(x + 7, places[number][1] + 82, told, _SOFT, 11)
    return picture


def draw_step(scene: Scene) -> Picture:
    """A step with a decode row of one chat and the prompt rows of another: which KV each row reads."""
    core, cell = scene.drive.core, 7.0
    scene.drive.add(scene.chat(SYSTEM, "Name a book about bridges."), 12)
    core.step()
    core.step()
    scene.drive.add(scene.chat(SYSTEM, "And one about foxes?"), 4)
    while len(scene.steps[-1]) < 2:
        core.step()
    picture, y = Picture("One step: which KV each row reads"), 40.0
    works = [(work, work.request.segments[0].length if work.request.segments else 0) for work in scene.steps[-1]]
    shared, x = min(length for _, length in works), 150.0
    picture.text(x, 14, "columns: KV rows in the pool", _SOFT)
    picture.text(x, 32, f"{shared} cached rows that both read, once")
    own = x + shared * cell + 12
    for name, (work, length) in zip(("first request", "second request"), works, strict=True):
        height, stop = work.count * cell, work.start + work.count
        picture.text(0, y + max(height / 2, 4) + 4, name)
        picture.text(
            own, y - 8, f"{work.count} row{'s' if work.count > 1 else ''} computed, over {stop - length} of its own"
        )
        picture.box(x, y, shared * cell, height, _KEPT)
        for row in range(work.count):
            seen = work.start + row + 1 - shared
            picture.box(own, y + row * cell, seen * cell, cell - 1, _NEW)
        y += height + 26
    picture.height = y - 20
    while core.busy:
        core.step()
    return picture


def draw_miss(scene: Scene) -> Picture:
    """Two chats whose system prompts begin with the time, and where they part."""
    first, second = (scene.chat(f"It is {day}. {SYSTEM}", QUESTIONS[0]) for day in DAYS)
    scene.run(first)
    cached = scene.run(second)
    parting = compare(scene.tokenizer, second.tobytes(), first.tobytes(), None)
    picture, most = Picture("A miss explained"), max(len(first), len(second))
    names = "the first prompt", f"the second prompt: {cached} of {len(second)} tokens come from the tree"
    for row, tokens in enumerate((first, second)):
        picture.text(0, 16 + 78 * row, names[row])
        x = 0.0
        for part, colour in ((tokens[: parting.token], _KEPT), (tokens[parting.token :], _NEW)):
            wide = _WIDTH * len(part) / most
            picture.box(x, 22 + 78 * row, wide, 40, colour, _EDGE)
            text = scene.tokenizer.decode(part.tolist(), skip_special_tokens=False).replace("\n", " ")
            for i, line in enumerate(textwrap.wrap(text, max(int(wide / 6.6), 4))[:2]):
                picture.text(x + 5, 38 + 78 * row + _LINE * i, line)
            x += wide
    share = len(second.tobytes()) // TOKEN_BYTES - cached
    ways = [textwrap.shorten(str(way), 24, placeholder="…") for way in (parting.there, parting.here)]
    told = f"They part at token {parting.token}: the first goes on with “{ways[0]}”, the second with “{ways[1]}”. "
    for i, line in enumerate((told, f"{share} tokens are computed again, although only one of them differs.")):
        picture.text(0, 184 + _LINE * i, line)
    return picture


def main(directory: Path) -> None:
    """Write the three pictures."""
    scene = Scene(resolve_model(make_config().model))
    for name, draw in (("how-tree", draw_tree), ("how-step", draw_step), ("how-miss", draw_miss)):
        draw(scene).save(directory / f"{name}.svg")
    scene.drive.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
