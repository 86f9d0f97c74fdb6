"""What requests ask of reuse strategies, on the way from the front end to the engine."""

from typing import Literal, get_args

import msgspec

from runtime.features.images.ask import ImagesAsk as ImagesAsk
from runtime.features.reasoning.ask import ReasoningAsk, ReasoningMethod, ReasoningParams
from runtime.params import LEADING, DocumentMethod, ReuseParams

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


ReuseAsk = ModulesAsk | DocumentsAsk | ReasoningAsk

# What requests say in `reuse`. A prompt with documents or modules has its ask itself.
AnyReuse = ReuseParams | ReasoningParams
ReuseMethod = Literal[DocumentMethod, ReasoningMethod]
REUSE_BY_METHOD: dict[str, type[AnyReuse]] = {
    method: kind for kind in get_args(AnyReuse) for method in get_args(kind.model_fields["method"].annotation)
}
