"""Canvases of masks: each step decides some of a canvas' masks."""

import math
from typing import Generic, TypeVar

import numpy as np
import torch

from runtime.denoising import BidirectionalParams, BlockParams, MaskParams
from runtime.diffusion.fast_dllm import active_rows, by_factor, by_threshold
from runtime.models.diffusion import DiffusionSpec
from runtime.params import SamplingParams
from runtime.sampling.sampler import BadLogits

Params = TypeVar("Params", bound=MaskParams)


class Canvas(Generic[Params]):
    """The canvas of one request, from all masks to none.

    A canvas is the prompt and further positions, in blocks that are denoised from left to right. The mask itself is
    never chosen. Steps that would decide nothing are skipped.

    Attributes:
        tokens: int64 [N], the canvas.
        block: positions of the current block; empty once no mask is left.
        is_block_start: whether the next step is the block's first.
        num_steps: steps done.
    """

    def __init__(
        self,
        prompt: np.ndarray,
        params: Params,
        sampling: SamplingParams,
        spec: DiffusionSpec,
        generator: torch.Generator,
    ):
        """`params` must be `filled`."""
        assert params.block_length
        self.params, self.sampling, self.spec = params, sampling, spec
        self.prompt_len, self._length = len(prompt), params.block_length
        self._origin, self._steps, end = self._layout()
        masks = np.full(end - self.prompt_len, spec.mask_token_id, dtype=np.int64)
        self.tokens = np.concatenate((prompt.astype(np.int64), masks))
        self._undecided = np.arange(len(self.tokens)) >= self.prompt_len
        self._generator = generator
        self._times = torch.linspace(1, params.eps, self._steps + 1)
        self._bias = bias_of(sampling, generator.device)
        self.num_steps = 0
        self._begin(self.prompt_len)

    def _layout(self) -> tuple[int, int, int]:
        """The position at which blocks begin, the steps of each, and the length of the canvas."""
        raise NotImplementedError

    def _begin(self, start: int) -> None:
        """Enter the block that begins at a position."""
        first = start - (start - self._origin) % self._length
        self.block = range(start, min(first + self._length, len(self.tokens)))
        self._step = 0
        self.is_block_start = True
        self._skip()

    def _skip(self) -> None:
        while self._step < self._steps and self._count() == 0:
            self._step += 1

    @property
    def done(self) -> bool:
        return not self.block

    @property
    def shown(self) -> np.ndarray:
        """The canvas as streams show it."""
        return self.tokens

    @property
    def num_decided(self) -> int:
        """Number of positions after the prompt that are decided without a gap, for good."""
        undecided = self._undecided[self.prompt_len :]
        return int(undecided.argmax()) if undecided.any() else len(undecided)

    def candidates(self) -> np.ndarray:
        """Positions, int64 [n], whose logits the next step wants: the block's masks."""
        return self.block.start + np.flatnonzero(self._undecided[self.block.start : self.block.stop])

    @torch.inference_mode()
    def commit(self, logits: torch.Tensor) -> None:
        """Decide this step's masks.

        Args:
            logits: float32 [n, vocab], of the `candidates`; overwritten.

        Raises:
            BadLogits: if a row has a value that is not finite and could be chosen.
        """
        positions = self.candidates()
        logits[:, self.spec.mask_token_id] = -math.inf
        if self._bias is not None:
            logits.index_add_(1, self._bias[0], self._bias[1].expand(len(logits), -1))
        tokens, confidence = self._choose(logits)
        # One such value makes all probabilities of its row NaN.
        if not bool(confidence.isfinite().all()):
            raise BadLogits
        decided = self._decide(positions, tokens, confidence)
        self.tokens[positions[decided]] = tokens.cpu().numpy()[decided]
        self._undecided[positions[decided]] = False
        self.num_steps += 1
        self.is_block_start = False
        if self._is_left(len(decided)):
            self._begin(self.block.stop)
        else:
            self._skip()

    def _decide(self, positions: np.ndarray, tokens: torch.Tensor, confidence: torch.Tensor) -> np.ndarray:
        """Indices of the candidates whose tokens are taken; counts the step."""
        decided = self._select(confidence).cpu().numpy()
        self._step += 1
        return decided

    def _is_left(self, num_changed: int) -> bool:
        """Whether the block is done."""
        return not self._undecided[self.block.start : self.block.stop].any()

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A token for each row, int64 [n], and its confidence, float32 [n]."""
        temperature = 0.0 if self.sampling.greedy else self.sampling.divisor
        if self.params.algorithm in ("low_confidence", "joint_threshold"):
            return self._choose_llada(logits, temperature)
        if temperature:
            logits = logits / temperature
        probs = restrict(logits, self.sampling).softmax(-1)
        if temperature:
            noise = torch.empty_like(probs).exponential_(generator=self._generator)
            tokens = (probs / noise).argmax(-1)
            confidence = probs.gather(1, tokens[:, None])[:, 0]
        else:
            confidence, tokens = probs.max(-1)
        if self.params.algorithm == "topk_margin":
            top = probs.topk(2).values
            confidence = top[:, 0] - top[:, 1]
        elif self.params.algorithm == "entropy":
            confidence = (probs * (probs + 1e-10).log()).sum(-1)
        return tokens, confidence

    def _choose_llada(self, logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Gumbel-max with noise in float64, as LLaDA's quality depends on it; confidence without the noise."""
        probs = logits.softmax(-1)
        if not temperature:
            confidence, tokens = probs.max(-1)
            return tokens, confidence
        noise = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
        noise.exponential_(generator=self._generator)
        tokens = (restrict(logits, self.sampling).double() - temperature * noise.log()).argmax(-1)
        return tokens, probs.gather(1, tokens[:, None])[:, 0]

    def _select(self, confidence: torch.Tensor) -> torch.Tensor:
        """Indices of the candidates to decide."""
        params = self.params
        if params.threshold is not None:
            return by_threshold(confidence, params.threshold)
        if params.factor is not None:
            return by_factor(confidence, params.factor)
        if params.algorithm == "origin":
            draws = torch.rand(confidence.shape, generator=self._generator, device=confidence.device)
            return (draws < self._share()).nonzero()[:, 0]
        if params.alg_temp and params.algorithm != "low_confidence":
            weights = (confidence / params.alg_temp).softmax(-1)
            noise = torch.empty_like(weights).exponential_(generator=self._generator)
            confidence = weights / noise  # the largest of these races are a draw without replacement
        return confidence.topk(min(self._count(), len(confidence))).indices

    def _share(self) -> float:
        """Dream's schedule: the share of the masks that is decided at this step; all of them at the last."""
        if self._step >= self._steps - 1:
            return 1.0
        return float(1 - self._times[self._step + 1] / self._times[self._step])

    def _count(self) -> int:
        """Number of masks that this step decides, where the schedule fixes it."""
        if self.params.threshold is not None or self.params.factor is not None or self.params.algorithm == "origin":
            return 1  # at least
        if self.params.algorithm == "low_confidence":
            each, more = divmod(self._length, self._steps)
            return each + (self._step < more)
        left = int(self._undecided[self.block.start : self.block.stop].sum())
        # In float32, in which the published schedule rounds.
        return int(torch.tensor(float(left)) * self._share()) if self._step < self._steps - 1 else left


class BidirectionalCanvas(Canvas[BidirectionalParams]):
    """The canvas of LLaDA and Dream: `gen_length` masks, and `steps / blocks` steps for each block."""

    def _layout(self) -> tuple[int, int, int]:
        params = self.params
        assert params.gen_length
        assert params.steps
        steps = params.steps // (params.gen_length // self._length)
        return self.prompt_len, steps, self.prompt_len + params.gen_length

    def active(self, first: int) -> range:
        """The positions, from `first` on, whose rows the next step computes."""
        rows = range(first, len(self.tokens))
        return active_rows(self.params.cache, self.is_block_start, self.block, self.spec.logits_shift, rows)


class BlockCanvas(Canvas[BlockParams]):
    """The canvas of a block diffusion model, which attends by blocks that begin at position 0.

    So the first block has some of the prompt, and the canvas ends with a whole one. `steps` are those of each block
    that is denoised; these divide the blocks of attention. With the joint threshold, decided tokens may change until
    their block is left.
    """

    def _layout(self) -> tuple[int, int, int]:
        assert self.params.gen_length
        assert self.params.steps
        self._unit = self.spec.attended or 1
        self._edits = self.params.algorithm == "joint_threshold"
        return 0, self.params.steps, -(-(self.prompt_len + self.params.gen_length) // self._unit) * self._unit

    def _begin(self, start: int) -> None:
        self._post_edits = 0
        super()._begin(start)

    @property
    def num_decided(self) -> int:
        return self.block.start - self.prompt_len if self._edits and self.block else super().num_decided

    @property
    def leads(self) -> bool:
        """Whether the next token is read from the last row of the blocks before its own, which must be whole."""
        start = self.block.start
        return self.spec.logits_shift > 0 and start % self._unit == 0 and bool(self._undecided[start])

    @property
    def settled(self) -> int:
        """Leading positions in blocks of attention that are decided: their KV will not change."""
        return (self.block.start if self.block else len(self.tokens)) // self._unit * self._unit

    @property
    def end(self) -> int:
        """The position up to which the next step needs rows."""
        return self.settled + (0 if self.leads else self._unit)

    def candidates(self) -> np.ndarray:
        """The block's masks, or all positions that it may edit."""
        if self.leads:
            return np.array((self.block.start,))
        return np.array(self.block) if self._edits else super().candidates()

    def _decide(self, positions: np.ndarray, tokens: torch.Tensor, confidence: torch.Tensor) -> np.ndarray:
        if self.leads:
            return np.zeros(1, dtype=np.int64)
        if not self._edits:
            return super()._decide(positions, tokens, confidence)
        self._step += 1
        return self._select_joint(positions, tokens, confidence)

    def _is_left(self, num_changed: int) -> bool:
        """Whether the block has no mask, and none of its tokens may still be edited."""
        may_edit = self._edits and num_changed and self._post_edits < (self.params.max_post_edit_steps or 0)
        return super()._is_left(num_changed) and not may_edit

    def _select_joint(self, positions: np.ndarray, tokens: torch.Tensor, confidence: torch.Tensor) -> np.ndarray:
        """Indices of the masks to decide, by the threshold, and of the tokens to replace, by that of edits."""
        params, masked = self.params, self._undecided[positions]
        sure, changed = confidence.cpu(), tokens.cpu().numpy() != self.tokens[positions]
        selected = ~masked & changed & (sure > (params.edit_threshold or 0.0)).numpy()
        if masked.any():
            masks = np.flatnonzero(masked)
            selected[masks[by_threshold(sure[masks], params.threshold or 0.0)]] = True
        else:
            self._post_edits += 1
        return np.flatnonzero(selected)


def restrict(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Logits [n, vocab] with minus infinity for tokens that top-p and then, as in Dream, top-k leave out."""
    if sampling.top_p < 1:
        values, tokens = logits.softmax(-1).sort(descending=True)
        dropped = values.cumsum(-1) - values >= sampling.top_p
        logits = logits.masked_fill(dropped.gather(1, tokens.argsort(-1)), -math.inf)
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    return logits


def bias_of(sampling: SamplingParams, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Tokens int64 [n] whose logits are changed, and by how much, float32 [n]."""
    if not sampling.logit_bias:
        return None
    tokens = torch.tensor(list(sampling.logit_bias), dtype=torch.int64, device=device)
    return tokens, torch.tensor(list(sampling.logit_bias.values()), device=device)
