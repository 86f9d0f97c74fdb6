"""The canvas of DiffusionGemma: each step accepts some of its random tokens and draws the others again."""

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch.distributions import Categorical

from runtime.features.diffusion.ask import NoiseParams
from runtime.features.diffusion.canvas import bias_of, restrict
from runtime.params import SamplingParams
from runtime.sampling.sampler import BadLogits

# With a lower temperature, logits / temperature could overflow float32.
_LEAST_TEMPERATURE = 1e-4
# Rows whose entropy is computed at once, since each row needs several copies of its large logits.
_ENTROPY_ROWS = 16


# Returns mean embeddings [n, hidden] of the distributions of logits [n, vocab].
Soften = Callable[[torch.Tensor], torch.Tensor]


class NoiseCanvas:
    """The canvases of one request, one after the other.

    A step draws a token for each position, at a temperature that falls from `t_max` to `t_min`. It accepts positions by
    ascending entropy, while the entropies of those accepted before sum to at most `entropy_bound` (Ben-Hamu et al.,
    2025). All other positions get uniformly random tokens. The next step reads the distributions as soft embeddings.
    A canvas ends after `steps`, or when the likeliest tokens equal those of the last `stability_threshold` steps and
    their mean entropy is below `confidence_threshold`. Then the likeliest tokens are the answer.

    With the same seed, the draws equal those of transformers' `generate` for a batch of one.

    Attributes:
        tokens: int64 [n], the prompt, the finished canvases and the current canvas with its random tokens.
        shown: `tokens` with the likeliest tokens of the last step in the current canvas; before it, without the canvas.
        soft: soft embeddings [block, hidden], of the last step's distributions; None in a canvas' first step.
        settled: number of leading tokens that will not change.
        num_steps: number of finished steps.
    """

    def __init__(
        self,
        prompt: np.ndarray,
        params: NoiseParams,
        sampling: SamplingParams,
        generator: torch.Generator,
        vocab_size: int,
        soften: Soften,
    ):
        """`params` must be `filled`."""
        assert params.block_length
        self.params, self._sampling, self._generator = params, sampling, generator
        self._vocab_size, self._soften = vocab_size, soften
        self._length, self.prompt_len = params.block_length, len(prompt)
        self._bias = bias_of(sampling, generator.device)
        self.num_steps = 0
        self._begin(prompt.astype(np.int64))

    def _begin(self, before: np.ndarray) -> None:
        """Start the next canvas after the tokens `before`, int64."""
        self.settled = len(before)
        self.soft: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None  # between `choose` and `decide`
        self._left = self.params.steps or 1
        self._history = deque[torch.Tensor](maxlen=self.params.stability_threshold)
        self.shown, self.tokens = before, np.concatenate((before, self._noise().cpu().numpy()))

    def _noise(self) -> torch.Tensor:
        device = self._generator.device
        return torch.randint(0, self._vocab_size, (self._length,), generator=self._generator, device=device)

    @property
    def end(self) -> int:
        """End (exclusive) of the positions that the next step computes."""
        return len(self.tokens)

    @property
    def num_decided(self) -> int:
        """Number of positions after the prompt that are decided."""
        return self.settled - self.prompt_len

    def candidates(self) -> np.ndarray:
        """Positions, int64 [block], whose logits the next step needs."""
        return np.arange(self.settled, self.end)

    @torch.inference_mode()
    def choose(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """What `decide` needs of this step's logits, float32 [block, vocab], on their device, without a wait for it."""
        if self._bias is not None:
            logits = logits.index_add(1, self._bias[0], self._bias[1].expand(len(logits), -1))
        self._logits = logits = logits / self._temperature()
        parts = (Categorical(logits=rows, validate_args=False).entropy() for rows in logits.split(_ENTROPY_ROWS))
        entropy = torch.cat(list(parts))
        best = logits.argmax(-1)
        drawn, noise = self._draw(logits, best), self._noise()
        return [entropy, entropy.mean(), best, torch.where(self._accepted(entropy), drawn, noise)]

    @torch.inference_mode()
    def decide(self, entropy: torch.Tensor, mean: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor) -> None:
        """Take the next canvas. Raises BadLogits if the logits are not finite.

        Args:
            entropy: of each row, float32 [block], on the host like all that `choose` returned.
            mean: of these, float32 [].
            best: the likeliest tokens, int64 [block].
            tokens: the next canvas, int64 [block].
        """
        logits, self._logits = self._logits, None
        if not bool(entropy.isfinite().all()):
            raise BadLogits
        before = self.tokens[: self.settled]
        self.num_steps += 1
        self._left -= 1
        self.shown = np.concatenate((before, best.numpy()))
        sure = bool(mean < (self.params.confidence_threshold or 0.0))
        if not self._left or (sure and self._is_stable(best)):
            self._begin(self.shown)
            return
        self._history.append(best)
        assert logits is not None
        self.soft = self._soften(logits)
        self.tokens = np.concatenate((before, tokens.numpy()))

    def _temperature(self) -> torch.Tensor:
        """The temperature of this step, in float32 like the published schedule."""
        low, high = self.params.t_min or 0.0, self.params.t_max or 0.0
        share = torch.tensor(self._left, dtype=torch.int32) / (self.params.steps or 1)
        return (low + (high - low) * share).clamp_min(_LEAST_TEMPERATURE)

    def _draw(self, logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """Draw a token for each row, int64 [block], with the request's temperature, top-p and top-k."""
        if self._sampling.greedy:
            return best
        if self._sampling.temperature != 1:
            logits = logits / self._sampling.divisor
        probs = restrict(logits, self._sampling).softmax(-1)
        # As torch.multinomial draws, which however waits for the device to look for NaN.
        return (probs / torch.empty_like(probs).exponential_(generator=self._generator)).argmax(-1)

    def _accepted(self, entropy: torch.Tensor) -> torch.Tensor:
        """Whether each position is accepted, bool [block], from its entropy [block]; see the class."""
        least, order = entropy.sort()
        within = least.cumsum(-1) - least <= (self.params.entropy_bound or 0.0)
        return torch.zeros_like(within).scatter(-1, order, within)

    def _is_stable(self, best: torch.Tensor) -> bool:
        history = self._history
        return len(history) == history.maxlen and all(torch.equal(best, other) for other in history)
