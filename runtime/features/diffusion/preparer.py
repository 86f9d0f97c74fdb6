"""Fills in what requests ask of diffusion models, in the server's process."""

from msgspec.structs import replace

from runtime.errors import InvalidRequest
from runtime.features.diffusion.ask import (
    DEFAULT_LENGTH,
    BidirectionalParams,
    DenoisingParams,
    DiffusionInfo,
    DiffusionParams,
)
from runtime.frontend.lengths import Lengths
from runtime.frontend.output import Encoded, PartedPrompt, Prompt, Submission
from runtime.frontend.preparer import Preparer, ServedModel


class RefusingPreparer(Preparer):
    """Refuses denoising parameters, for a model that chooses next tokens."""

    def place(self, submission: Submission, prompt: Prompt, exact: str | None) -> Prompt:
        if submission.decoding is not None:
            raise InvalidRequest("this model is not a diffusion model", param="diffusion")
        return prompt


class CanvasPreparer(Preparer):
    """Fills in the parameters of a diffusion model.

    Attributes:
        granule: positions in a canvas that is always denoised as a whole; 1 for models that denoise any number.
    """

    def __init__(self, served: ServedModel, model: DiffusionInfo):
        self._info, self._model, self._tokenizer = served.info, model, served.tokenizer
        self.granule = model.block if model.algorithm == "entropy_bound" else 1

    def why_exact(self, submission: Submission) -> str:
        return "by a diffusion model"

    def place(self, submission: Submission, prompt: Prompt, exact: str | None) -> Prompt:
        if isinstance(prompt, PartedPrompt) and prompt.length != len(prompt.tokens):
            raise InvalidRequest("a diffusion model takes no modules", param="prompt")
        if submission.logprobs is not None or submission.prompt_logprobs_from is not None:
            raise InvalidRequest("log-probabilities are not supported for diffusion models", param="logprobs")
        return prompt

    def fill(self, submission: Encoded, tokens: list[int], lengths: Lengths) -> Encoded:
        params, count = submission.decoding or DiffusionParams(), len(tokens)
        if isinstance(params, DiffusionParams):
            params = self._with_length_and_prefix(params, submission, tokens, lengths)
            params = params.filled(self._model, submission.sampling)
        params.check(self._model, submission.sampling, self._model.num_layers, count)
        lengths.check(count, params.gen_length, count)
        self._check_guidance(count, params)
        return replace(submission, decoding=params)

    def _with_length_and_prefix(
        self, params: DiffusionParams, submission: Submission, tokens: list[int], lengths: Lengths
    ) -> DiffusionParams:
        """The parameters with `prefix_tokens` of a chat, and with `gen_length` of a request without a limit."""
        shares = self._model.attended is None and params.prefix_tokens is None
        if shares and submission.shared_text and (shared_text := submission.shared_text()):
            shared = self._tokenizer.encode(shared_text, submission.add_special_tokens)
            differ = (i for i, (mine, theirs) in enumerate(zip(shared, tokens, strict=False)) if mine != theirs)
            params = params.model_copy(update={"prefix_tokens": next(differ, min(len(shared), len(tokens)))})
        if params.gen_length is None and submission.sampling.max_new_tokens is None:
            length = min(max(DEFAULT_LENGTH, self.granule), lengths.left(len(tokens), len(tokens)))
            params = params.model_copy(update={"gen_length": length})
        return params

    def _check_guidance(self, prompt: int, params: DenoisingParams) -> None:
        """Raise InvalidRequest if classifier-free guidance needs more pages than the pool has."""
        size, most = self._info.page_size, self._info.pool_tokens
        tokens = -(-(prompt + (params.gen_length or 0)) // size) * size
        if isinstance(params, BidirectionalParams) and params.cfg_scale and 2 * tokens > most:
            message = f"guidance needs 2 x {tokens} tokens of the KV pool, which holds {most}"
            raise InvalidRequest(message, param="diffusion.cfg_scale", code="context_length_exceeded")
