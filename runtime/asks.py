"""What requests ask of reuse strategies, on the way from the front end to the engine."""

from typing import Literal, get_args

from runtime.features.chunks.ask import ChunksAsk, DocumentMethod, ReuseParams
from runtime.features.reasoning.ask import ReasoningAsk, ReasoningMethod, ReasoningParams

ReuseAsk = ChunksAsk | ReasoningAsk

# What requests say in `reuse`. A prompt with documents or modules has its ask itself.
AnyReuse = ReuseParams | ReasoningParams
ReuseMethod = Literal[DocumentMethod, ReasoningMethod]
REUSE_BY_METHOD: dict[str, type[AnyReuse]] = {
    method: kind for kind in get_args(AnyReuse) for method in get_args(kind.model_fields["method"].annotation)
}
