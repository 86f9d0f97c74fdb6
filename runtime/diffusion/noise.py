"""The canvas of DiffusionGemma: random tokens, of which each step accepts some and draws the others anew."""

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch.distributions import Categorical

from runtime.denoising import NoiseParams
from runtime.diffusion.canvas import bias_of, restrict
from runtime.params import SamplingParams
from runtime.sampling.sampler import BadLogits

# Below, quotients of capped logits would leave float32.
_LEAST_TEMPERATURE = 1e-4
# Computed together; each takes several copies of its logits, which are large.
_ENTROPY_ROWS = 16


class NoiseCanvas:
    """The canvases of one request, one after the other.

    A step draws a token for each position at a temperature that falls from `t_max` to `t_min`, and accepts those of
    least entropy, while the entropies of the others that are accepted add up to no more than `entropy_bound`
    (Ben-Hamu et al., 2025). All other positions are drawn anew from the whole vocabulary. The step's distributions
    come back as soft embeddings. A canvas ends after `steps`, or as soon as the likeliest tokens did not change in
    `stability_threshold` steps and their mean entropy is below `confidence_threshold`; they are the answer.

    The draws are those of transformers' `generate` for a batch of one, from the request's own generator.

    Attributes:
        tokens: int64 [n], the prompt, the canvases that ended, and the present one's noise.
        shown: likewise, with the present one's likeliest tokens, once it has any, in place of the noise.
        soft: [block, hidden], see `CanvasRows`.
        settled: leading tokens that will not change.
        num_steps: steps done.
    """

    def __init__(
        self,
        prompt: np.ndarray,
        params: NoiseParams,
        sampling: SamplingParams,
        generator: torch.Generator,
        vocab_size: int,
        soften: Callable[[torch.Tensor], torch.Tensor],
    ):
        """`params` must be `filled`; `soften`: see `Executor.soften`."""
        assert params.block_length
        self.params, self._sampling, self._generator = params, sampling, generator
        self._vocab_size, self._soften = vocab_size, soften
        self._length, self.prompt_len = params.block_length, len(prompt)
        self._bias = bias_of(sampling, generator.device)
        self.num_steps = 0
        self._begin(prompt.astype(np.int64))

    def _begin(self, before: np.ndarray) -> None:
        """Enter the canvas behind some tokens."""
        self.settled = len(before)
        self.soft: torch.Tensor | None = None
        self._left = self.params.steps or 1
        self._history = deque[torch.Tensor](maxlen=self.params.stability_threshold)
        self.shown, self.tokens = before, np.concatenate((before, self._noise().cpu().numpy()))

    def _noise(self) -> torch.Tensor:
        device = self._generator.device
        return torch.randint(0, self._vocab_size, (self._length,), generator=self._generator, device=device)

    @property
    def end(self) -> int:
        """The position up to which the next step needs rows."""
        return len(self.tokens)

    @property
    def num_decided(self) -> int:
        """Number of positions after the prompt that are decided."""
        return self.settled - self.prompt_len

    def candidates(self) -> np.ndarray:
        """Positions, int64 [block], whose logits the next step wants."""
        return np.arange(self.settled, self.end)

    @torch.inference_mode()
    def commit(self, logits: torch.Tensor) -> None:
        """Denoise by this step's logits, float32 [block, vocab]. Raises BadLogits where they are not finite."""
        if self._bias is not None:
            logits = logits.index_add(1, self._bias[0], self._bias[1].expand(len(logits), -1))
        logits = logits / self._temperature()
        parts = (Categorical(logits=rows, validate_args=False).entropy() for rows in logits.split(_ENTROPY_ROWS))
        entropy = torch.cat(list(parts))
        if not bool(entropy.isfinite().all()):
            raise BadLogits
        best, before = logits.argmax(-1), self.tokens[: self.settled]
        drawn, noise = self._draw(logits, best), self._noise()
        self.num_steps += 1
        self._left -= 1
        self.shown = np.concatenate((before, best.cpu().numpy()))
        sure = bool(entropy.mean() < (self.params.confidence_threshold or 0.0))
        if not self._left or (sure and self._is_stable(best)):
            self._begin(self.shown)
            return
        self._history.append(best)
        self.soft = self._soften(logits)
        self.tokens = np.concatenate((before, torch.where(self._accepted(entropy), drawn, noise).cpu().numpy()))

    def _temperature(self) -> torch.Tensor:
        """In float32, in which the published schedule rounds."""
        low, high = self.params.t_min or 0.0, self.params.t_max or 0.0
        share = torch.tensor(self._left, dtype=torch.int32) / (self.params.steps or 1)
        return (low + (high - low) * share).clamp_min(_LEAST_TEMPERATURE)

    def _draw(self, logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """A token for each row, int64 [block], with the request's own temperature, top-p and top-k upon the model's."""
        if self._sampling.greedy:
            return best
        if self._sampling.temperature != 1:
            logits = logits / self._sampling.divisor
        probs = restrict(logits, self._sampling).softmax(-1)
        return torch.multinomial(probs, num_samples=1, generator=self._generator)[:, 0]

    def _accepted(self, entropy: torch.Tensor) -> torch.Tensor:
        """The accepted positions, bool [block]: by ascending entropy, while those before add up to the bound."""
        least, order = entropy.sort()
        within = least.cumsum(-1) - least <= (self.params.entropy_bound or 0.0)
        return torch.zeros_like(within).scatter(-1, order, within)

    def _is_stable(self, best: torch.Tensor) -> bool:
        history = self._history
        return len(history) == history.maxlen and all(torch.equal(best, other) for other in history)
