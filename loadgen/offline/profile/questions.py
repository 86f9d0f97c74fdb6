"""Questions with documents and right answers from a file of JSON lines, also in the form of Natural Questions."""

import random
import re
import string
from pathlib import Path

from pydantic import AliasChoices, BaseModel, Field, ValidationError, field_validator

from loadgen.harness.lines import UNREADABLE, numbered_lines
from runtime.errors import ModelError
from runtime.features.chunks.documents.prompt import Document, Segments, TokenizedPrompt, in_messages
from runtime.models.tokenizer import Tokenizer

_SYSTEM = "Write a short answer to the question, using only the given documents, some of which may be irrelevant."


class Passage(BaseModel):
    """A document of a question."""

    text: str = Field(min_length=1)
    title: str = ""


class AnsweredQuestion(BaseModel):
    """A line of the file: `{"question", "answers", "documents"}`; Natural Questions calls the documents `ctxs`.

    A document is a text, or an object with `text` and `title`. An answer is right if it contains one of `answers`.
    """

    question: str = Field(min_length=1)
    answers: list[str] = Field(min_length=1)
    documents: list[Passage] = Field(min_length=1, validation_alias=AliasChoices("documents", "ctxs"))

    @field_validator("documents", mode="before")
    @classmethod
    def _titled(cls, value: object) -> object:
        return [{"text": one} if isinstance(one, str) else one for one in value] if isinstance(value, list) else value

    def is_right(self, text: str) -> bool:
        """Whether a text contains an answer, but for case, punctuation and articles."""
        said = f" {_plain(text)} "
        return any(f" {_plain(answer)} " in said for answer in self.answers)

    def tokenize(self, tokenizer: Tokenizer) -> TokenizedPrompt:
        """The documents and the question as a user's message."""
        documents = [Document(one.text + "\n", one.title) for one in self.documents]
        user = {"role": "user", "content": [*documents, f"Question: {self.question}"]}
        found = in_messages([{"role": "system", "content": _SYSTEM}, user], tokenizer.apply_chat_template)
        assert isinstance(found, Segments)
        return found.tokenize(tokenizer, add_special_tokens=False)


def read_questions(path: Path) -> list[AnsweredQuestion]:
    """The questions of a file, which may be compressed (`.gz`). Raises ModelError."""
    try:
        texts = numbered_lines(path)
    except UNREADABLE as error:
        raise ModelError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    found = []
    for number, line in texts:
        try:
            found.append(AnsweredQuestion.model_validate_json(line))
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise ModelError(f"{path}, line {number}: {where}: {problem['msg']}") from None
    if not found:
        raise ModelError(f"{path} has no questions")
    return found


def draw(questions: list[AnsweredQuestion], samples: int, documents: int, seed: int) -> list[AnsweredQuestion]:
    """Some questions in random order, of which more samples draw more.

    Each has at least `documents` documents: others' first ones are mixed in.
    """
    drawn = random.Random(seed).sample(questions, len(questions))[:samples]
    return [_filled(one, questions, documents, random.Random(f"{seed} {i}")) for i, one in enumerate(drawn)]


def _filled(
    question: AnsweredQuestion, questions: list[AnsweredQuestion], documents: int, rng: random.Random
) -> AnsweredQuestion:
    missing = documents - len(question.documents)
    if missing <= 0:
        return question
    others = [one.documents[0] for one in questions if one is not question]
    mixed = [*question.documents, *rng.sample(others, min(missing, len(others)))]
    rng.shuffle(mixed)
    return question.model_copy(update={"documents": mixed})


def _plain(text: str) -> str:
    bare = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())
