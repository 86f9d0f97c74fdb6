"""Seeded questions about four documents."""

from __future__ import annotations

import random
from collections.abc import Callable

from loadgen.accuracy.parts import KINDS, Item, filler
from loadgen.accuracy.vocabulary import word_list
from runtime.frontend.documents.prompt import Document, Segments, TokenizedPrompt, in_messages
from runtime.models.tokenizer import Tokenizer

_COUNT = 4


def tokenize(item: Item, tokenizer: Tokenizer) -> TokenizedPrompt:
    """The prompt up to the answer, with a document for each part."""
    documents = [Document(part[0]) for part in item.parts]
    segments = Segments([item.head, *documents])
    if item.question is not None:
        system = {"role": "system", "content": [item.head, *documents]}
        found = in_messages([system, {"role": "user", "content": item.question}], tokenizer.apply_chat_template)
        assert isinstance(found, Segments)
        segments = found
    return Segments([*segments.parts, item.lead]).tokenize(tokenizer, add_special_tokens=item.question is None)


def needle(rng: random.Random) -> Item:
    """A number in one of the documents."""
    key, number = rng.choice(word_list()), "".join(rng.choices("0123456789", k=7))
    texts = [filler(rng, 60) for _ in range(_COUNT)]
    place = rng.randrange(_COUNT)
    texts[place] += f" One of the special magic numbers for {key} is: {number}. {filler(rng, 12)}"
    return Item(
        "A special magic number is hidden within the following documents. Make sure to memorize it.",
        [[f"{text}\n"] for text in texts],
        f"What is the special magic number for {key} mentioned in the documents?",
        f"The special magic number for {key} mentioned in the documents is",
        f" {number}",
    )


def lookup(rng: random.Random) -> Item:
    """A table of keys and values, six lines in each document."""
    values = {key: "".join(rng.choices("0123456789", k=4)) for key in rng.sample(word_list(), 6 * _COUNT)}
    lines = [f"{key}: {value}\n" for key, value in values.items()]
    parts = [["".join(lines[i : i + 6])] for i in range(0, len(lines), 6)]
    key = rng.choice(list(values))
    question = f"What is the value of the key {key}?"
    return Item("This is a table of keys and values.", parts, question, f"{key}:", f" {values[key]}")


def few_shot(rng: random.Random) -> Item:
    """Words of four kinds with colours as labels, six in each document, and a new word."""
    colours = rng.sample(("red", "blue", "green", "white"), len(KINDS))
    drawn = [(rng.sample(kind, 7), colour) for kind, colour in zip(KINDS, colours, strict=True)]
    shots = [f"Text: {word}\nLabel: {colour}\n" for words, colour in drawn for word in words[1:]]
    rng.shuffle(shots)
    words, colour = rng.choice(drawn)
    parts = [["".join(shots[i : i + 6])] for i in range(0, len(shots), 6)]
    return Item("", parts, None, f"Text: {words[0]}\nLabel:", f" {colour}")


def which(rng: random.Random) -> Item:
    """The number of the document that is about a thing; the documents are in any order."""
    things = rng.sample(word_list(), _COUNT)
    texts = [f"Document {i}: The {thing} is here. {filler(rng, 40)}\n" for i, thing in enumerate(things, 1)]
    asked = rng.randrange(_COUNT)
    parts = [[text] for text in rng.sample(texts, _COUNT)]
    question = f"Which document is about the {things[asked]}?"
    return Item("Read the documents.", parts, question, f"The {things[asked]} is in document", f" {asked + 1}")


TASKS: dict[str, Callable[[random.Random], Item]] = {
    "needle": needle,
    "lookup": lookup,
    "few-shot": few_shot,
    "which document": which,
}
