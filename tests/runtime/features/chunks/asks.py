"""Prompts with documents: as messages have them, what they cost, and random ones."""

import random
from array import array
from typing import Any

from tests.runtime.features.chunks.plain import draw_tokens
from tests.runtime.features.chunks.reference import METHODS, UNSCALED, Ask
from tests.runtime.reuse.contract.subject import NEW, World

LAYERS = 3


def asked(ask: Ask) -> dict[str, Any]:
    """The `reuse` fields of a message."""
    fields = {
        "strategy": "chunks",
        "method": ask.method,
        "documents": [list(document) for document in ask.documents],
        "names": [f"document {i}" for i in range(len(ask.documents))],
        "granularity": ask.granularity,
        "chunk_tokens": ask.chunk_tokens,
        "lead": array("i", ask.lead).tobytes(),
    }
    if ask.ratio is not None:
        fields["ratio"] = ask.ratio
    if ask.method == "legolink":
        fields["k"] = ask.k
    return fields


def selected(world: World, rid: str) -> list[int]:
    """The rows that were computed again."""
    return world.requests[rid].lease.selected.tolist()


def row_layers(ask: Ask, rows: list[int], encoded: int, page_size: int, count: int = NEW) -> int:
    """Rows x layers of a request: what it encodes, what it looks at before it chooses, and what it computes then.

    Args:
        rows: that are recomputed.
        encoded: rows of chunks, and of the pages before the first document, that were missing.
    """
    prefix = ask.documents[0][0] // page_size * page_size
    own = len(ask.own) - prefix
    dense = len(ask.prompt) - prefix if ask.is_dense else 0
    question = LAYERS * own if ask.method in ("prophetkv", "passages") and ask.count else 0
    return LAYERS * (encoded + own + len(rows) + count - 1) + dense + question


# -- drawing -----------------------------------------------------------------------------------------------------


def build(draw: random.Random, texts: list[list[int]], system: int = 0, question: int = 9, **fields) -> Ask:
    """Documents behind a system prompt of some tokens, with a question of some more."""
    prompt, documents = draw_tokens(draw, system), []
    for text in texts:
        documents.append((len(prompt), len(prompt) + len(text)))
        prompt += text
    method = fields.get("method", "a3")
    fields = {"method": method, "ratio": None if method in UNSCALED else 0.3, "chunk_tokens": 32} | fields
    return Ask((*prompt, *draw_tokens(draw, question)), tuple(documents), **fields)


class Library:
    """Texts that prompts share: documents up to `longest` tokens, and a system prompt of more than half of that."""

    def __init__(self, draw: random.Random, longest: int = 70):
        self._draw = draw
        self.systems = [[], draw_tokens(draw, 3), draw_tokens(draw, longest * 4 // 7)]
        lengths = [draw.choice([1, 5, 16, longest // 2, draw.randrange(1, longest)]) for _ in range(6)]
        self.documents = [draw_tokens(draw, length) for length in lengths]
        self.leads = [(), (), tuple(draw_tokens(draw, 3)), tuple(draw_tokens(draw, 21))]

    def rewind(self, seed: int) -> None:
        """Let prompts, but not the texts, depend on a seed."""
        self._draw = random.Random(seed)

    def ask(self, **fields: Any) -> Ask:
        """Some of the documents in any order, behind a system prompt and with a question; `fields` of the ask."""
        draw = self._draw
        prompt, documents = list(draw.choice(self.systems)), []
        for text in draw.sample(self.documents, draw.randrange(1, 5)):
            documents.append((len(prompt), len(prompt) + len(text)))
            prompt += text + draw_tokens(draw, draw.choice([0, 0, 0, 4]))
        prompt += draw_tokens(draw, draw.choice([0, 1, 2, 5, 20]))
        method = fields.get("method") or draw.choice(METHODS)
        drawn = {
            "method": method,
            "ratio": draw.choice([0.0, 0.05, 0.15, 0.3, 0.6, 1.0]),
            "granularity": draw.choice(["token", "page"]),
            "chunk_tokens": draw.choice([16, 20, 64]),
            "k": draw.choice([0, 1, 3, 16]),
            "lead": draw.choice(self.leads),
        }
        if method == "legolink" and draw.random() < 0.5:
            drawn["ratio"] = None
        return Ask(tuple(prompt), tuple(documents), **(drawn | fields))
