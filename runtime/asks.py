"""What requests ask of reuse strategies, and what these report, on the way between the front end and the engine."""

from typing import Literal, get_args

from runtime.features.chunks.ask import (
    ChunksAsk,
    DocumentMethod,
    DocumentsReport,
    ExactDocumentsReport,
    ModulesReport,
    ReuseParams,
)
from runtime.features.diffusion.ask import Algorithm as Algorithm
from runtime.features.diffusion.ask import (
    BidirectionalParams,
    BlockParams,
    DenoisingParams,
    DenoisingReport,
    DiffusionInfo,
    NoiseParams,
    SharedPrefixReport,
)
from runtime.features.diffusion.ask import DiffusionParams as DiffusionParams
from runtime.features.diffusion.ask import Unshared as Unshared
from runtime.features.images.ask import ImagesAsk as ImagesAsk
from runtime.features.reasoning.ask import ReasoningAsk, ReasoningMethod, ReasoningParams, ReasoningReport

ReuseAsk = ChunksAsk | ReasoningAsk
ReuseReport = (
    ModulesReport | DocumentsReport | ExactDocumentsReport | ReasoningReport | DenoisingReport | SharedPrefixReport
)

# What prompts with parts ask.
PartsAsk = ChunksAsk
# What requests say in `reuse`. A prompt with parts has its ask itself.
AnyReuse = ReuseParams | ReasoningParams
ReuseMethod = Literal[DocumentMethod, ReasoningMethod]
REUSE_BY_METHOD: dict[str, type[AnyReuse]] = {
    method: kind for kind in get_args(AnyReuse) for method in get_args(kind.model_fields["method"].annotation)
}
# Reads a `reuse` without a known method, and refuses it.
UNKNOWN_REUSE: type[AnyReuse] = ReuseParams

# What requests ask of decodings that do not choose next tokens, and the settings of such models.
DecodingParams = DenoisingParams
DecodingInfo = DiffusionInfo
DECODING_PARAMS: tuple[type[DecodingParams], ...] = (BidirectionalParams, BlockParams, NoiseParams)
