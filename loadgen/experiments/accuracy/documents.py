"""Questions about four documents, made with a seed."""

import random
from collections.abc import Callable
from functools import partial

from loadgen.experiments.accuracy.parts import Item, filler, labels, needle, table
from loadgen.experiments.accuracy.vocabulary import word_list
from runtime.frontend.documents.prompt import Document, Segments, TokenizedPrompt, in_messages
from runtime.models.tokenizer import Tokenizer

_COUNT = 4


def tokenize(item: Item, tokenizer: Tokenizer) -> TokenizedPrompt:
    """The prompt up to the answer. Each part of the item becomes a document."""
    documents = [Document(part[0]) for part in item.parts]
    segments = Segments([item.head, *documents])
    if item.question is not None:
        system = {"role": "system", "content": [item.head, *documents]}
        found = in_messages([system, {"role": "user", "content": item.question}], tokenizer.apply_chat_template)
        assert isinstance(found, Segments)
        segments = found
    return Segments([*segments.parts, item.lead]).tokenize(tokenizer, add_special_tokens=item.question is None)


def which(rng: random.Random) -> Item:
    """Asks for the number of the document about a thing. The documents are in random order."""
    things = rng.sample(word_list(), _COUNT)
    texts = [f"Document {i}: The {thing} is here. {filler(rng, 40)}\n" for i, thing in enumerate(things, 1)]
    asked = rng.randrange(_COUNT)
    parts = [[text] for text in rng.sample(texts, _COUNT)]
    question = f"Which document is about the {things[asked]}?"
    return Item("Read the documents.", parts, question, f"The {things[asked]} is in document", f" {asked + 1}")


TASKS: dict[str, Callable[[random.Random], Item]] = {
    "needle": partial(needle, tokens=(60, 12), form="{text}\n"),
    "lookup": partial(table, lines=6, form="{key}: {value}\n"),
    "few-shot": partial(labels, lines=6, form="Text: {word}\nLabel: {colour}\n", lead="Text: {word}\nLabel:", head=""),
    "which document": which,
}
