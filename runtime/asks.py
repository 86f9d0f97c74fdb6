"""What requests ask of reuse strategies, on the way from the front end to the engine."""

from typing import Literal

import msgspec

from runtime.params import LEADING, PERCENTILE, TAU_MAX, TAU_MIN

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


class ReasoningAsk(msgspec.Struct, tag="reasoncache", tag_field="method"):
    """Sharing of reasoning steps; fields as in `runtime.params.ReasoningParams`."""

    percentile: float = PERCENTILE
    tau_max: float = TAU_MAX
    tau_min: float = TAU_MIN


ReuseAsk = ModulesAsk | DocumentsAsk | ReasoningAsk
