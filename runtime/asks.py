"""What requests ask of reuse strategies, and what these report, on the way between the front end and the engine."""

from typing import Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

from runtime.denoising import DenoisingReport, SharedPrefixReport
from runtime.features.reasoning.ask import ReasoningAsk, ReasoningMethod, ReasoningParams, ReasoningReport
from runtime.params import LEADING, DocumentMethod, ReuseParams
from runtime.report import Report

Pairs = list[tuple[int, int]]


class EntryAsk(msgspec.Struct):
    """An entry that a request reads.

    Attributes:
        tokens: int32 little-endian, placeholders included.
        anchors: (index, position) pairs, see `runtime.kv.segments.Sequence`.
        holes: ranges [start, stop) of indices: placeholder rows, which are encoded but not kept.
        name: shown in answers; not part of the entry's key.
    """

    tokens: bytes
    anchors: Pairs
    holes: Pairs = []
    name: str = ""


class ModulesAsk(msgspec.Struct, tag="modules", tag_field="method"):
    """The modules that a prompt imports, and the anchors of its own tokens. `schema`: a name to show in the tree."""

    entries: list[EntryAsk]
    anchors: Pairs = []
    schema: str = ""


class ModulesReport(Report, tag="modules", kw_only=True):
    """How a prompt's modules were reused.

    Attributes:
        exact_modules: whether the KV of each module is that of the module alone.
        modules: names of the modules, in the order of their positions; `computed_modules`: of those not cached before.
        reused_tokens, computed_tokens: number of the prompt's tokens that were cached, and of the others.
    """

    exact: bool = False
    exact_modules: bool = True
    modules: list[str]
    computed_modules: list[str]
    reused_tokens: int
    computed_tokens: int


class DocumentsAsk(msgspec.Struct, tag="fusion", tag_field="method"):
    """The documents of a prompt, and how they are reused. The front end has checked their ranges.

    Attributes:
        select: name of the method that chooses which rows are computed again.
        documents: ranges [start, stop) of the prompt's tokens, ascending.
        names: the documents' names, shown in answers.
        ratio: share of the documents' rows that are computed again (A3's paper: of all rows); None: the default.
        granularity: whether the method chooses single rows (`token`) or whole pages.
        chunk_tokens: longer documents are encoded in pieces of this many tokens.
        shortest: shorter documents, and shorter last pieces, are computed in full.
        k: number of leading rows of each chunk that LegoLink computes again.
    """

    select: str
    documents: Pairs
    names: list[str] = []
    ratio: float | None = None
    granularity: Literal["page", "token"] = "token"
    chunk_tokens: int = 512
    shortest: int = 1
    k: int = LEADING


class DocumentsReport(Report, tag="fusion", kw_only=True):
    """How a prompt's documents were reused. The options are those of `DocumentsAsk`.

    Attributes:
        method: `DocumentsAsk.select`.
        k: only if LegoLink uses it.
        documents: names of the documents; `computed_documents`: of those with a part that was not cached before.
        chosen_before: whether the rows were chosen for an earlier request with the same documents.
        recomputed_rows: number of document rows that were computed again.
        row_layers: rows x layers that were computed.
        reused_tokens, computed_tokens: number of the prompt's tokens that were cached, and of the others.
        auto: why the method `auto` chose this one.
        note: what else the client should know.
    """

    exact: bool = False
    method: str
    ratio: float | None
    granularity: Literal["page", "token"]
    chunk_tokens: int
    k: int | UnsetType = UNSET
    documents: list[str]
    computed_documents: list[str]
    chosen_before: bool
    recomputed_rows: int
    row_layers: int
    reused_tokens: int
    computed_tokens: int
    auto: str | UnsetType = UNSET
    note: str | UnsetType = UNSET


class ExactDocumentsReport(Report, tag="prefix", kw_only=True):
    """A prompt with documents of which only an exact prefix was reused. Fields as in `DocumentsReport`."""

    exact: bool = True
    method: str = "none"
    documents: list[str]
    reused_tokens: int
    computed_tokens: int
    auto: str | UnsetType = UNSET
    note: str | UnsetType = UNSET


ReuseAsk = ModulesAsk | DocumentsAsk | ReasoningAsk
ReuseReport = (
    ModulesReport | DocumentsReport | ExactDocumentsReport | ReasoningReport | DenoisingReport | SharedPrefixReport
)

# What requests say in `reuse`. A prompt with documents or modules has its ask itself.
AnyReuse = ReuseParams | ReasoningParams
ReuseMethod = Literal[DocumentMethod, ReasoningMethod]
REUSE_BY_METHOD: dict[str, type[AnyReuse]] = {
    method: kind for kind in get_args(AnyReuse) for method in get_args(kind.model_fields["method"].annotation)
}
