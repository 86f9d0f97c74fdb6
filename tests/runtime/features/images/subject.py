"""Prompts with images under the contract of reuse strategies."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from runtime.engine.core import EngineCore
from runtime.fair_threads import Piece
from runtime.features.images.ask import ImagesAsk, TileRun
from runtime.features.images.decoder import DecodeOrder, decode
from runtime.features.images.part import ImagesPart
from runtime.features.images.rules import Rules, load_rules, tokens_of
from runtime.features.images.tower import values_of
from tests.runtime.features.chunks.plain import draw_tokens
from tests.runtime.features.images.seeing import KINDS, file_of, picture, save_seeing
from tests.runtime.reuse.contract.subject import NEW, Subject, World

_PICTURES = 5


def at_once(account: str, work: Callable[[], None]) -> Piece[None]:
    piece = Piece(account, work)
    work()
    piece.set_result(None)
    return piece


class Tile(NamedTuple):
    """A tile of one of the pictures: `tokens` of its rows, and what the model makes of it, float32 [1, 3, 32, 32]."""

    file: bytes
    number: int
    tokens: array[int]
    values: np.ndarray


@cache
def _load(path: Path) -> Any:
    return KINDS["idefics3"][1].from_pretrained(path, dtype=torch.float32).eval()


@cache
def _tiles(rules: Rules) -> list[Tile]:
    found = []
    for seed in range(_PICTURES):
        file = file_of(picture(seed, 64, 64))
        named, seen = decode(DecodeOrder(rules, file)), decode(DecodeOrder(rules, file, pixels=True))
        for i, size in enumerate(seen.sizes):
            rows = tokens_of(named.digests[i], rules.rows(*size))
            found.append(Tile(file, i, rows, values_of(seen.tiles[i], size, rules)))
    return found


# Tokens, and indices of tiles.
Prompt = list[list[int] | int]


class Images(Subject):
    """A prompt is a list of texts, as tokens, and of tiles. Its tower runs while a step waits for it."""

    is_causal = False  # it is not served beside other strategies, which the model cannot serve
    refuses = False

    def __init__(self, path: Path):
        super().__init__(path)
        rules = load_rules(path)
        assert rules is not None
        self._tiles = _tiles(rules)

    @classmethod
    def make(cls, fixture: Callable[[str], Any]) -> Subject:
        return cls(save_seeing(fixture("tmp_path_factory").mktemp("seeing"), fixture("default_model_dir")))

    def core(self, **options: Any) -> EngineCore:
        core = super().core(**options)
        core.part(ImagesPart)._threads.submit = at_once  # the number of steps depends on no thread
        return core

    def draw(self, draw: random.Random) -> Prompt:
        first, last = draw_tokens(draw, draw.choice([3, 9])), draw_tokens(draw, draw.choice([5, 22]))
        tiles = draw.sample(range(len(self._tiles)), draw.choice([2, 4]))
        return [first, *tiles[:-1], draw_tokens(draw, 2), tiles[-1], last]

    def anything(self, seed: int) -> Prompt:
        """One of three beginnings with tiles, some of it, and an end, which may be a tile."""
        draw, root = random.Random(seed), random.Random(seed % 3)
        begin = [part for _ in range(3) for part in (draw_tokens(root, root.randrange(1, 9)), root.randrange(9))]
        end = draw.choice([[draw.randrange(9)], [draw_tokens(draw, 7)]])
        return [*begin[: draw.randrange(len(begin))], *end]

    def message(self, prompt: Prompt, count: int) -> dict[str, Any]:
        tokens, ask = list[int](), ImagesAsk([], [])
        for part in prompt:
            if isinstance(part, list):
                tokens += part
                continue
            tile = self._tiles[part]
            if tile.file not in ask.files:
                ask.files.append(tile.file)
            stop = len(tokens) + len(tile.tokens)
            ask.runs.append(TileRun(len(tokens), stop, ask.files.index(tile.file), tile.number))
            tokens += tile.tokens
        return {"tokens": tokens, "images": ask if ask.runs else None}

    def limit(self, draw: random.Random) -> tuple[Prompt, list[int]]:
        prompt, answer = self.draw(draw), list[int]()
        for _ in range(NEW):
            answer.append(int(self._logits(prompt, answer)[-1].argmax()))
        return prompt, answer

    def check(self, world: World, rid: str) -> None:
        _, prompt = world.asked[rid]
        found = world.tokens[rid]
        assert found == self._logits(prompt, found)[:-1].argmax(-1).tolist(), rid

    @torch.inference_mode()
    def _logits(self, prompt: Prompt, output: list[int]) -> torch.Tensor:
        """transformers' logits [1 + n, vocabulary] behind a prompt and each of n tokens of an output."""
        model = _load(self.path)
        tokens, image = [*self.message(prompt, 0)["tokens"], *output], model.config.image_token_id
        ids = torch.tensor([[image if token < 0 else token for token in tokens]])
        tiles = [self._tiles[part].values for part in prompt if isinstance(part, int)]
        seen = {"pixel_values": torch.from_numpy(np.concatenate(tiles))[None]} if tiles else {}
        return model(input_ids=ids, logits_to_keep=1 + len(output), **seen).logits[0]
