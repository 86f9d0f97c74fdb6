"""Canvases of masks: each denoising step replaces some masks by tokens."""

import math
from typing import Generic, TypeVar

import numpy as np
import torch

from runtime.execution.transfers import index_on, upload
from runtime.features.diffusion.ask import BidirectionalParams, BlockParams, MaskParams
from runtime.features.diffusion.fast_dllm import active_rows, by_factor, by_threshold
from runtime.features.diffusion.published import DiffusionSpec
from runtime.params import SamplingParams
from runtime.sampling.sampler import BadLogits

Params = TypeVar("Params", bound=MaskParams)


class Canvas(Generic[Params]):
    """The canvas of one request: the prompt followed by masks, in blocks that are denoised from left to right.

    The mask token is never chosen. Steps of the schedule that would decide no mask are skipped.

    Attributes:
        tokens: int64 [N], the canvas.
        block: positions of the current block; empty when no mask is left.
        is_block_start: whether the next step is the block's first.
        num_steps: number of finished steps.
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
        """The start of the first block, the number of steps for each block, and the length of the canvas."""
        raise NotImplementedError

    def _begin(self, start: int) -> None:
        """Start the block that contains the position `start`, from there on."""
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
        """The tokens of the canvas for streams, int64 [N]."""
        return self.tokens

    @property
    def num_decided(self) -> int:
        """Number of positions between the prompt and the first position that may still change."""
        undecided = self._undecided[self.prompt_len :]
        return int(undecided.argmax()) if undecided.any() else len(undecided)

    def candidates(self) -> np.ndarray:
        """Positions, int64 [n], whose logits the next step needs: the block's masks."""
        return self.block.start + np.flatnonzero(self._undecided[self.block.start : self.block.stop])

    @torch.inference_mode()
    def choose(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """What `decide` needs of this step's logits, on their device, which is not waited for.

        Args:
            logits: float32 [n, vocab], for the `candidates`; overwritten.
        """
        logits[:, self.spec.mask_token_id] = -math.inf
        if self._bias is not None:
            logits.index_add_(1, self._bias[0], self._bias[1].expand(len(logits), -1))
        tokens, confidence = self._choose(logits)
        return [tokens, confidence, self._noise(confidence)]

    @torch.inference_mode()
    def decide(self, tokens: torch.Tensor, confidence: torch.Tensor, noise: torch.Tensor) -> None:
        """Decide the tokens of this step.

        Args:
            tokens: int64 [n], for the `candidates`, on the host like all that `choose` returned.
            confidence: float32 [n].
            noise: see `_noise`.

        Raises:
            BadLogits: if a row has a NaN or an infinite value that could be chosen.
        """
        positions = self.candidates()
        # One bad value makes all probabilities of its row NaN.
        if not bool(confidence.isfinite().all()):
            raise BadLogits
        decided = self._decide(positions, tokens, confidence, noise)
        self.tokens[positions[decided]] = tokens.numpy()[decided]
        self._undecided[positions[decided]] = False
        self.num_steps += 1
        self.is_block_start = False
        if self._is_left(len(decided)):
            self._begin(self.block.stop)
        else:
            self._skip()

    def _decide(
        self, positions: np.ndarray, tokens: torch.Tensor, confidence: torch.Tensor, noise: torch.Tensor
    ) -> np.ndarray:
        """Indices of the candidates that get their token now; advances the schedule."""
        decided = self._select(confidence, noise).numpy()
        self._step += 1
        return decided

    def _is_left(self, num_changed: int) -> bool:
        """Whether the block is finished. `num_changed`: number of tokens that this step set."""
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
        """Gumbel-max with float64 noise, which LLaDA's quality depends on; the confidence ignores noise."""
        probs = logits.softmax(-1)
        if not temperature:
            confidence, tokens = probs.max(-1)
            return tokens, confidence
        noise = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
        noise.exponential_(generator=self._generator)
        tokens = (restrict(logits, self.sampling).double() - temperature * noise.log()).argmax(-1)
        return tokens, probs.gather(1, tokens[:, None])[:, 0]

    def _noise(self, confidence: torch.Tensor) -> torch.Tensor:
        """Random numbers for the choice of candidates, float32 [n] on the device; empty if it is not random."""
        params = self.params
        if params.threshold is not None or params.factor is not None:
            return confidence.new_empty(0)
        if params.algorithm == "origin":
            return torch.rand(confidence.shape, generator=self._generator, device=confidence.device)
        if params.alg_temp and params.algorithm != "low_confidence":
            return torch.empty_like(confidence).exponential_(generator=self._generator)
        return confidence.new_empty(0)

    def _select(self, confidence: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Indices of the candidates to decide."""
        params = self.params
        if params.threshold is not None:
            return by_threshold(confidence, params.threshold)
        if params.factor is not None:
            return by_factor(confidence, params.factor)
        if params.algorithm == "origin":
            return (noise < self._share()).nonzero()[:, 0]
        if len(noise):
            # Exponential races: the largest values are a draw without replacement.
            confidence = (confidence / params.alg_temp).softmax(-1) / noise
        return confidence.topk(min(self._count(), len(confidence))).indices

    def _share(self) -> float:
        """Dream's schedule: the share of the remaining masks to decide in this step; 1 in the last step."""
        if self._step >= self._steps - 1:
            return 1.0
        return float(1 - self._times[self._step + 1] / self._times[self._step])

    def _count(self) -> int:
        """Number of masks that this step decides; 1 if the confidence or a draw determines the number."""
        if self.params.threshold is not None or self.params.factor is not None or self.params.algorithm == "origin":
            return 1
        if self.params.algorithm == "low_confidence":
            each, more = divmod(self._length, self._steps)
            return each + (self._step < more)
        left = int(self._undecided[self.block.start : self.block.stop].sum())
        # In float32, like the published schedule.
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
        """The positions that the next step computes, without those before `first`."""
        rows = range(first, len(self.tokens))
        return active_rows(self.params.cache, self.is_block_start, self.block, self.spec.logits_shift, rows)


class BlockCanvas(Canvas[BlockParams]):
    """The canvas of a block diffusion model, whose attention blocks begin at position 0.

    So the first denoised block may contain prompt tokens, and the canvas ends with a whole attention block, which has
    one or more denoised blocks. `steps` counts the steps of one denoised block. With the joint threshold, decided
    tokens may change until their block is finished.
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
        """Whether the next step only predicts a block's first token, from the last row of the block before it."""
        start = self.block.start
        return self.spec.logits_shift > 0 and start % self._unit == 0 and bool(self._undecided[start])

    @property
    def settled(self) -> int:
        """Number of leading positions in decided attention blocks, whose KV is final once it is computed."""
        return (self.block.start if self.block else len(self.tokens)) // self._unit * self._unit

    @property
    def end(self) -> int:
        """End (exclusive) of the positions that the next step computes."""
        return self.settled + (0 if self.leads else self._unit)

    def candidates(self) -> np.ndarray:
        """The block's masks, int64; with the joint threshold all positions of the block, which may be edited."""
        if self.leads:
            return np.array((self.block.start,))
        return np.array(self.block) if self._edits else super().candidates()

    def _noise(self, confidence: torch.Tensor) -> torch.Tensor:
        return confidence.new_empty(0) if self.leads or self._edits else super()._noise(confidence)

    def _decide(
        self, positions: np.ndarray, tokens: torch.Tensor, confidence: torch.Tensor, noise: torch.Tensor
    ) -> np.ndarray:
        if self.leads:
            return np.zeros(1, dtype=np.int64)
        if not self._edits:
            return super()._decide(positions, tokens, confidence, noise)
        self._step += 1
        return self._select_joint(positions, tokens, confidence)

    def _is_left(self, num_changed: int) -> bool:
        """Whether the block has no masks, and its tokens are not edited further."""
        may_edit = self._edits and num_changed and self._post_edits < (self.params.max_post_edit_steps or 0)
        return super()._is_left(num_changed) and not may_edit

    def _select_joint(self, positions: np.ndarray, tokens: torch.Tensor, confidence: torch.Tensor) -> np.ndarray:
        """Indices of masks to decide, by `threshold`, and of tokens to replace, by `edit_threshold`."""
        params, masked = self.params, self._undecided[positions]
        changed = tokens.numpy() != self.tokens[positions]
        selected = ~masked & changed & (confidence > (params.edit_threshold or 0.0)).numpy()
        if masked.any():
            masks = np.flatnonzero(masked)
            selected[masks[by_threshold(confidence[masks], params.threshold or 0.0)]] = True
        else:
            self._post_edits += 1
        return np.flatnonzero(selected)


def restrict(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Logits [n, vocab] with -inf for the tokens that top-p, and then top-k, exclude (Dream's order)."""
    if sampling.top_p < 1:
        values, tokens = logits.softmax(-1).sort(descending=True)
        dropped = values.cumsum(-1) - values >= sampling.top_p
        logits = logits.masked_fill(dropped.gather(1, tokens.argsort(-1)), -math.inf)
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    return logits


def bias_of(sampling: SamplingParams, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`logit_bias` as tokens, int64 [n], and their biases, float32 [n]; None: no bias."""
    if not sampling.logit_bias:
        return None
    biases = torch.tensor(list(sampling.logit_bias.values()))
    return index_on(list(sampling.logit_bias), device), upload(biases, device)
