"""Prompts with images, and an engine that is asked for them."""

from pathlib import Path
from typing import NamedTuple

from runtime.features.images.ask import ImagesAsk
from runtime.features.images.client import Images
from runtime.frontend.pictures import Sight
from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.features.images.seeing import Reference, file_of, picture, sight_of

NEW = 6  # tokens of an answer
A, B, SMALL = picture(1, 100, 80), picture(2, 40, 90), picture(3, 30, 30)
# Texts with `<image>` and their images.
PROMPTS = [
    ("User:<image>What is it?<end_of_utterance>\nAssistant:", [A]),
    ("User: Compare.<image> and <image>Which is larger?", [A, B]),
    ("User: Compare.<image> and <image>Which is larger?", [B, A]),
    ("<image><image> Are they the same?", [SMALL, SMALL]),
    ("User: Name three colours, and one more.<end_of_utterance>\nAssistant:", []),
]
# Of an engine: all but the first end chunks within an image.
OPTIONS = [
    {},
    {"chunk_tokens": 7, "page_size": 1},
    {"chunk_tokens": 25, "page_size": 4, "prefix_cache": False},
    {"kernels": "torch", "chunk_tokens": 33, "page_size": 8},
]

# The tokens of a prompt, and what the engine gets of its images.
Encoded = tuple[list[int], ImagesAsk | None]


class Asked(NamedTuple):
    """Prompts for the model in a directory, and transformers' answers, which differ."""

    path: Path
    prompts: list[Encoded]
    expected: list[list[int]]


def asked_of(path: Path, plain: Reference, prompts: list[tuple] = PROMPTS) -> Asked:
    sight = sight_of(path)
    expected = [plain.greedy(text, images, NEW) for text, images in prompts]
    assert len({*map(tuple, expected)}) == len(expected), "the model sees which image it is, and where"
    return Asked(path, [encode(sight, plain, *prompt) for prompt in prompts], expected)


def encode(sight: Sight, plain: Reference, text: str, images: list) -> Encoded:
    first, *rest = text.split("<image>")
    own = Images(sight, "", "messages")
    marked = first + "".join(own.add(file_of(image)) + part for image, part in zip(images, rest, strict=True))
    tokens = own.encode(marked, add_special_tokens=False)
    own.place(tokens)
    wanted = plain.inputs(text, images)["input_ids"][0].tolist()
    assert [sight.token if token < 0 else token for token in tokens] == wanted
    return tokens, own.asked


def send(driver: Driver, rid: str, one: Encoded, **message) -> None:
    tokens, asked = one
    driver.send(rid, tokens, {"max_new_tokens": NEW, "ignore_eos": True}, images=asked, **message)


def answers(driver: Driver, prompts: list[Encoded], **message) -> list[list[int]]:
    """The tokens of prompts, one after the other."""
    start = len(driver.tokens)
    for i, one in enumerate(prompts):
        send(driver, f"r{start + i}", one, **message)
        driver.run()
    return [driver.tokens[f"r{start + i}"] for i in range(len(prompts))]


def answers_of_a_batch(driver: Driver, prompts: list[Encoded], **message) -> list[list[int]]:
    for i, one in enumerate(prompts):
        send(driver, f"b{i}", one, **message)
    driver.run()
    return [driver.tokens[f"b{i}"] for i in range(len(prompts))]


def check_evicted_and_retracted(asked: Asked) -> None:
    """In a pool for little more than the longest prompt, whose pages of two tokens decoding outgrows."""
    longest = max(len(tokens) for tokens, _ in asked.prompts)
    driver = Driver(make_core(asked.path, pool_tokens=longest + NEW + 8, page_size=2))
    for one in asked.prompts * 2:
        send(driver, f"r{len(driver.tokens)}", one)
        driver.step()
    driver.run()
    assert [*driver.tokens.values()] == asked.expected * 2


def tiles(driver: Driver) -> int:
    """How many tiles the tower has computed."""
    return driver.core.state()["image_tiles"]
