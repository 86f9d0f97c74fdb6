"""What requests ask of documents and modules."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from runtime.errors import InvalidRequest
from runtime.params import Reuse
from runtime.report import Report

Pairs = list[tuple[int, int]]
DocumentMethod = Literal["none", "a3", "cacheblend", "prophetkv", "passages", "legolink", "pie", "full"]
# What a module of a schema is encoded with: nothing, the modules around it, a set of modules.
Mode = Literal["independent", "nested", "scaffold"]

# Shorter documents, and shorter last chunks, are computed in full: they save few rows, and in full they are exact.
_SHORTEST = 32
# Methods that read documents encoded behind a lead, see `ChunksAsk.lead`.
LED = ("passages",)
# Defaults of `ReuseParams`: the share of the rows to recompute, and that of some methods; LegoLink's first rows.
RATIO, LEADING = 0.15, 16
RATIOS = {"passages": 0.2}
# Options of `ReuseParams` that only some methods take, with these methods.
TAKEN_BY = {
    "ratio": ("a3", "cacheblend", "prophetkv", "passages", "legolink"),
    "k": ("legolink",),
    "max_kl": ("auto",),
}


def shortest(chunk_tokens: int) -> int:
    """Least number of tokens in a document, or in its last chunk, whose KV is reused."""
    return min(_SHORTEST, chunk_tokens)


class ModuleAsk(msgspec.Struct):
    """A module that a request reads.

    Attributes:
        tokens: int32 little-endian, placeholders included.
        anchors: (index, position) pairs, see `runtime.kv.segments.Sequence`.
        holes: ranges [start, stop) of indices: placeholder rows, which are encoded but not kept.
        name: shown in answers; not part of the module's key.
    """

    tokens: bytes
    anchors: Pairs
    holes: Pairs = []
    name: str = ""


class ChunksAsk(msgspec.Struct, tag="chunks", tag_field="strategy"):
    """The chunks of a prompt, which are encoded apart from it, and how their rows are repaired.

    A prompt has documents or modules. The front end has checked ranges, and that positions differ.

    Attributes:
        method: chooses the rows that are computed again. none, for modules alone: no row, and the prompt's own tokens
            read all modules, those at later positions as well.
        documents: ranges [start, stop) of the prompt's tokens, ascending.
        names: the documents' names, shown in answers.
        modules: modules at positions of their own, which the prompt's tokens leave free.
        anchors: with modules, of the prompt's tokens; see `ModuleAsk`.
        schema: the modules' schema, a name to show in the tree.
        ratio: share of the chunks' rows that are computed again (A3's paper: of all rows); None: the default.
        granularity: whether the method chooses single rows (`token`) or whole pages.
        chunk_tokens: longer documents are encoded in pieces of this many tokens.
        shortest: shorter documents, and shorter last pieces, are computed in full.
        k: number of leading rows of each chunk that LegoLink computes again.
        lead: int32 little-endian tokens that chunks of documents are encoded behind; their own rows are not kept.
    """

    method: str = "none"
    documents: Pairs = []
    names: list[str] = []
    modules: list[ModuleAsk] = []
    anchors: Pairs = []
    schema: str = ""
    ratio: float | None = None
    granularity: Literal["page", "token"] = "token"
    chunk_tokens: int = 512
    shortest: int = 1
    k: int = LEADING
    lead: bytes = b""

    @property
    def kind(self) -> Literal["document", "module"]:
        """What a chunk is a part of."""
        return "document" if self.documents else "module"


class ChunksReport(Report, kw_only=True):
    """How a prompt's chunks were reused.

    Attributes:
        exact: whether the answer is that of an ordinary prompt with these tokens.
        method, ratio, granularity, k: as in `ChunksAsk`, for a prompt that is repaired; `k` only if LegoLink uses it.
        chosen_before: whether the rows were chosen for an earlier request with the same chunks.
        recomputed_rows: number of rows of chunks that were computed again.
        row_layers: rows x layers that were computed.
        reused_tokens, computed_tokens: number of the prompt's tokens that were cached, and of the others.
        auto: why the method `auto` chose this one.
        note: what else the client should know.
    """

    exact: bool = False
    method: str | UnsetType = UNSET
    ratio: float | UnsetType | None = UNSET
    granularity: Literal["page", "token"] | UnsetType = UNSET
    k: int | UnsetType = UNSET
    chosen_before: bool | UnsetType = UNSET
    recomputed_rows: int | UnsetType = UNSET
    row_layers: int | UnsetType = UNSET
    reused_tokens: int
    computed_tokens: int
    auto: str | UnsetType = UNSET
    note: str | UnsetType = UNSET

    def told(self, auto: str | UnsetType, note: str | UnsetType) -> None:
        """Add what the front end knows."""
        self.auto, self.note = auto, self.note if note is UNSET else note


class DocumentsReport(ChunksReport, tag="fusion", kw_only=True):
    """`documents`: their names; `computed_documents`: names of those with a part that was not cached before."""

    chunk_tokens: int
    documents: list[str]
    computed_documents: list[str]

    @property
    def computed_parts(self) -> tuple[str, list[str]]:
        return "documents", self.computed_documents


class ModulesReport(ChunksReport, tag="modules", kw_only=True):
    """How a prompt's modules were reused.

    Attributes:
        exact_modules: whether the KV of each module is that of the module alone.
        modules: names of the modules, in the order of their positions; `computed_modules`: of those not cached before.
    """

    exact_modules: bool = True
    modules: list[str]
    computed_modules: list[str]

    @property
    def computed_parts(self) -> tuple[str, list[str]]:
        return "modules", self.computed_modules


class ExactDocumentsReport(Report, tag="prefix", kw_only=True):
    """A prompt with documents of which only an exact prefix was reused. Fields as in `DocumentsReport`."""

    exact: bool = True
    method: str = "none"
    documents: list[str]
    reused_tokens: int
    computed_tokens: int
    auto: str | UnsetType = UNSET
    note: str | UnsetType = UNSET


class ReuseParams(Reuse):
    """Reuse of the KV of documents, or of modules, with a few of their rows computed again."""

    method: Literal[DocumentMethod, "auto"] = Field(
        description="selects the rows; none: an ordinary prompt, or modules as they are; auto: by the model's table"
    )
    ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of the documents' or modules' rows (A3's paper: of all) to recompute; "
        f"default: {RATIOS['passages']} for passages, else {RATIO}",
    )
    granularity: Literal["page", "token"] = Field(
        "token", description="rows are selected one by one, or by whole pages"
    )
    chunk_tokens: int = Field(512, ge=16, le=4096, description="documents are encoded in chunks of this many tokens")
    k: int | None = Field(None, ge=0, le=512, description=f"legolink: first rows of each chunk; default: {LEADING}")
    max_kl: float | None = Field(
        None, ge=0, le=100, description="auto: choose by this largest mean KL to full prefill, in nats"
    )

    def ask(self) -> None:
        """Nothing: a prompt has what is asked for its parts."""

    def check(self) -> None:
        for name, methods in TAKEN_BY.items():
            if getattr(self, name) is not None and self.method not in methods:
                raise InvalidRequest(f"{name} is an option of {', '.join(methods)}", param=f"reuse.{name}")
        for name in ("granularity", "chunk_tokens") if self.method == "auto" else ():
            if name in self.model_fields_set:
                raise InvalidRequest(f"auto takes the {name} that was measured; leave it out", param=f"reuse.{name}")
        if self.k is not None and self.ratio is not None:
            raise InvalidRequest("k and ratio exclude each other", param="reuse.k")
