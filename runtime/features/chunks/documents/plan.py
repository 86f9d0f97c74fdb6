"""Makes the `reuse` field of `AddRequest` from a prompt with documents and a request's reuse options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType

from runtime.asks import ReuseReport
from runtime.errors import InvalidRequest
from runtime.features.chunks.ask import (
    LEADING,
    LED,
    RATIO,
    RATIOS,
    TAKEN_BY,
    ChunksAsk,
    ChunksReport,
    DocumentMethod,
    ExactDocumentsReport,
    ReuseParams,
    shortest,
)
from runtime.features.chunks.documents.prompt import TokenizedPrompt
from runtime.features.chunks.documents.table import MeasuredMethod, choose, read_table
from runtime.features.chunks.schemas.compile import ModulePrompt
from runtime.frontend.output import PartedPrompt


@dataclass(frozen=True, slots=True)
class DocumentPrompt(PartedPrompt):
    """A prompt with documents.

    Attributes:
        tokens: token ids of the whole prompt.
        names: names of the documents, in order.
        ask: see `AddRequest`; None: only an exact prefix is reused.
        auto: why the method `auto` chose the prompt's method.
        note: what else the client should know of the reuse.
    """

    noun: ClassVar[str] = "documents"

    tokens: list[int]
    names: list[str]
    ask: ChunksAsk | None
    auto: str | UnsetType = UNSET
    note: str | UnsetType = UNSET

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def has_parts(self) -> bool:
        return bool(self.names)

    def report(self, engine: ReuseReport | None, cached_tokens: int) -> ReuseReport | None:
        if self.ask is None and engine is None and self.names:
            return ExactDocumentsReport(
                documents=list(dict.fromkeys(self.names)),
                reused_tokens=cached_tokens,
                computed_tokens=self.length - cached_tokens,
                auto=self.auto,
                note=self.note,
            )
        if isinstance(engine, ChunksReport):
            engine.told(self.auto, self.note)
        return engine


@dataclass(frozen=True, slots=True)
class DocumentPlanner:
    """Chooses how documents are reused.

    Attributes:
        default: method for requests that name none.
        table: the model's measured methods, for the method auto; None: the model has no table.
    """

    default: DocumentMethod = "none"
    table: list[MeasuredMethod] | None = None

    @classmethod
    def load(cls, default: DocumentMethod, directory: Path) -> DocumentPlanner:
        """The planner of a model directory. Raises ModelError for a broken table."""
        return cls(default, read_table(directory))

    def plan(self, prompt: TokenizedPrompt, asked: ReuseParams | None) -> DocumentPrompt:
        """Plan a prompt with the checked options `asked`, None for the default method. Raises InvalidRequest."""
        if not prompt.documents:
            refuse_reuse(asked)
            asked = ReuseParams(method="none")
        asked = asked or ReuseParams(method=self.default)
        auto: str | UnsetType = UNSET
        note: str | UnsetType = UNSET
        if asked.method == "auto":
            asked, auto = self._choose(asked)
        ask = None if asked.method == "none" else _ask(asked, prompt)
        if asked.method != "none" and min(map(_length, prompt.documents)) < (least := shortest(asked.chunk_tokens)):
            note = f"documents of fewer than {least} tokens are computed in full"
        if ask is None and asked.method != "none":  # nothing is reused, so no measurement applies
            auto = UNSET
        return DocumentPrompt(prompt.tokens.tolist(), prompt.names, ask, auto, note)

    def repair(self, prompt: ModulePrompt, asked: ReuseParams | None) -> ModulePrompt:
        """A prompt whose modules are repaired as a request asks, None: as their schema does. Raises InvalidRequest."""
        if asked is not None and "chunk_tokens" in asked.model_fields_set:
            raise InvalidRequest("modules are not cut into chunks; leave chunk_tokens out", param="reuse.chunk_tokens")
        asked = asked or prompt.repair or ReuseParams(method="none")
        auto: str | UnsetType = UNSET
        if asked.method == "auto":
            asked, auto = self._choose(asked)
            if asked.method == "none":  # as for documents, nothing approximate: all rows are computed
                asked = ReuseParams(method="legolink", ratio=1.0)
        given = prompt.ask
        ask = ChunksAsk(modules=given.modules, anchors=given.anchors, schema=given.schema, **_method(asked))
        return replace(prompt, ask=ask, auto=auto)

    def _choose(self, asked: ReuseParams) -> tuple[ReuseParams, str]:
        """The method for `auto`, and the reason."""
        table = self.table or []
        if (found := choose(table, asked.max_kl)) is None:
            reason = "no table for this model" if self.table is None else "no method was shown to lose so little"
            return ReuseParams(method="none"), reason
        return ReuseParams(**found.model_dump(include=set(ReuseParams.model_fields))), found.reason


def refuse_reuse(asked: ReuseParams | None) -> None:
    """Raise InvalidRequest if a request without documents and modules asks for their reuse."""
    if asked is not None and asked.method != "none":
        raise InvalidRequest("reuse is for prompts with documents or modules, and this one has none", param="reuse")


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _ask(asked: ReuseParams, prompt: TokenizedPrompt) -> ChunksAsk | None:
    """What a prompt asks; None if all documents are too short to be reused."""
    if max(map(_length, prompt.documents)) < shortest(asked.chunk_tokens):
        return None
    return ChunksAsk(
        documents=prompt.documents,
        names=prompt.names,
        chunk_tokens=asked.chunk_tokens,
        shortest=shortest(asked.chunk_tokens),
        lead=prompt.lead.tobytes() if asked.method in LED else b"",
        **_method(asked),
    )


def _method(asked: ReuseParams) -> dict[str, Any]:
    """The method of an ask, with its options."""
    defaults = {"ratio": RATIOS.get(asked.method, RATIO), "k": LEADING}
    taken = [name for name in defaults if asked.method in TAKEN_BY[name]]
    if "ratio" in taken and "k" in taken:  # they exclude each other
        taken.remove("ratio" if asked.ratio is None else "k")
    given = {name: getattr(asked, name) for name in taken}
    options = {name: defaults[name] if value is None else value for name, value in given.items()}
    return {"method": asked.method, "granularity": asked.granularity, **options}


def plan_encoding(prompt: TokenizedPrompt, method: str, chunk_tokens: int = 512) -> DocumentPrompt:
    """A prompt that only encodes its documents, as a method reads them. Submit it with `max_new_tokens` 0."""
    ask = _ask(ReuseParams(method="pie", chunk_tokens=chunk_tokens), prompt)
    if ask is not None and method in LED:
        ask.lead = prompt.lead.tobytes()
    return DocumentPrompt(prompt.tokens.tolist(), prompt.names, ask)
