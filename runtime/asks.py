"""What requests ask of reuse strategies, on the way from the front end to the engine."""

from typing import Literal, get_args

import msgspec

from runtime.features.reasoning.ask import ReasoningAsk, ReasoningMethod, ReasoningParams
from runtime.params import LEADING, DocumentMethod, ReuseParams

Pairs = list[tuple[int, int]]


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

    @property
    def kind(self) -> Literal["document", "module"]:
        """What a chunk is a part of."""
        return "document" if self.documents else "module"


ReuseAsk = ChunksAsk | ReasoningAsk

# What requests say in `reuse`. A prompt with documents or modules has its ask itself.
AnyReuse = ReuseParams | ReasoningParams
ReuseMethod = Literal[DocumentMethod, ReasoningMethod]
REUSE_BY_METHOD: dict[str, type[AnyReuse]] = {
    method: kind for kind in get_args(AnyReuse) for method in get_args(kind.model_fields["method"].annotation)
}
