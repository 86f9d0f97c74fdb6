"""Decoding of diffusion models: each step decides some masks of a canvas, until none is left."""

import logging
from collections.abc import Sequence

import numpy as np
import torch

from runtime.errors import RametError
from runtime.execution.transfers import Download, index_on
from runtime.features.diffusion.ask import BidirectionalParams, BlockParams, DenoisingParams, NoiseParams
from runtime.features.diffusion.canvas import BidirectionalCanvas, BlockCanvas
from runtime.features.diffusion.noise import NoiseCanvas, Soften
from runtime.features.diffusion.published import DiffusionSpec
from runtime.protocol import Finish, TokenEvent
from runtime.request import Decoding, Request, Work
from runtime.sampler_state import StepResult

log = logging.getLogger("ramet.engine")

# The divergence that is reported for logits that are not finite.
_MOST_NATS = 1e4

AnyCanvas = BidirectionalCanvas | BlockCanvas | NoiseCanvas


def divergence(exact: torch.Tensor, other: torch.Tensor, mask_token_id: int) -> torch.Tensor:
    """Mean over rows of the KL divergence in nats of other distributions from exact ones, given as logits [n, vocab].

    The mask token is left out, because it is never chosen. The result, float32 [] on the device of the logits, is
    finite even if they are not.
    """
    p, q = (
        logits.index_fill(1, index_on([mask_token_id], logits.device), -1e4).log_softmax(-1)
        for logits in (exact, other)
    )
    nats = (p.exp() * (p - q)).sum(-1).mean()
    return nats.clamp_min(0).where(nats.isfinite(), _MOST_NATS)


def canvas_of(request: Request) -> AnyCanvas | None:
    """The canvas of a request of a diffusion model; None: the request wants no tokens."""
    canvas = request.decoding_state
    assert canvas is None or isinstance(canvas, AnyCanvas)
    return canvas


class CanvasDecoding(Decoding):
    """Decides tokens of a request's canvas, which is the prompt followed by masks or random tokens."""

    counted = ("denoise_steps",)

    def __init__(
        self,
        spec: DiffusionSpec,
        device: torch.device,
        vocab_size: int = 0,
        soften: Soften | None = None,
    ):
        """`device`: where the logits are; `vocab_size`, `soften`: only for DiffusionGemma, see `NoiseCanvas`."""
        super().__init__()
        self._spec, self._device = spec, device
        self._vocab_size, self._soften = vocab_size, soften

    def open(self, request: Request, params: DenoisingParams | None) -> None:
        """Give the request a canvas, unless it wants no tokens."""
        if not request.wants_tokens:
            return
        assert params is not None
        generator = torch.Generator(self._device)
        if request.sampler.params.seed is None:
            generator.seed()
        else:
            generator.manual_seed(request.sampler.params.seed)
        prompt = np.array(request.tokens, dtype=np.int64)
        sampling = request.sampler.params
        if isinstance(params, NoiseParams):
            assert self._soften is not None
            request.decoding_state = NoiseCanvas(prompt, params, sampling, generator, self._vocab_size, self._soften)
        elif isinstance(params, BlockParams):
            request.decoding_state = BlockCanvas(prompt, params, sampling, self._spec, generator)
        elif isinstance(params, BidirectionalParams):
            request.decoding_state = BidirectionalCanvas(prompt, params, sampling, self._spec, generator)
        request.max_length = request.prompt_len + (params.gen_length or 0)

    def wanted(self, work: Work) -> np.ndarray:
        """The rows that predict the block's masks, int64; none if this step ends before the block."""
        canvas = canvas_of(work.request)
        if canvas is None:
            return np.empty(0, dtype=np.int64)
        rows = canvas.candidates() - self._spec.logits_shift - work.start
        return rows if rows[-1] < work.count else rows[:0]

    def choose(
        self, work: Sequence[Work], logit_rows: Sequence[Sequence[slice]], logits: torch.Tensor, version: int = 0
    ) -> None:
        """Start one transfer of what `book` needs of all requests.

        A second row set is either the canvas without its prompt, for guidance, or the trial of a reuse depth.
        """
        self._failures: dict[Request, Exception] = {}
        self._chosen: dict[Request, list[torch.Tensor]] = {}
        for item, (mine, *more) in zip(work, logit_rows, strict=True):
            if (canvas := canvas_of(item.request)) is None or mine.start == mine.stop:
                continue
            wanted, nats = logits[mine], []
            if more and item.note is not None:
                nats.append(divergence(wanted, logits[more[0]], self._spec.mask_token_id))
            elif more and isinstance(canvas, BidirectionalCanvas):
                wanted = logits[more[0]] + (canvas.params.cfg_scale + 1) * (wanted - logits[more[0]])
            try:
                self._chosen[item.request] = nats + canvas.choose(wanted)
            except Exception as error:
                self._failures[item.request] = error
        tensors = [tensor for chosen in self._chosen.values() for tensor in chosen]
        self._download = Download(tensors, logits.device) if tensors else None

    def book(self, work: Work, result: StepResult) -> TokenEvent | None:
        """Take what a denoising step chose."""
        request, canvas = work.request, canvas_of(work.request)
        if canvas is None:
            return request.take_event([], Finish("length"))
        self.counters["denoise_steps"] += 1
        try:
            chosen = self._read(request)
            if work.note is not None:
                work.note(float(chosen.pop(0)))
            canvas.decide(*chosen)
        except RametError:
            raise
        except Exception as error:
            log.exception("no token could be chosen for request %s", request.rid)
            raise RametError(f"no token could be chosen: {type(error).__name__}") from error
        return self._report(request)

    def _read(self, request: Request) -> list[torch.Tensor]:
        """What was chosen for a request, on the host. Raises the error of its choice."""
        if request in self._failures:
            raise self._failures[request]
        if self._download is not None:
            host, self._download = iter(self._download.wait()), None
            self._chosen = {one: [next(host) for _ in chosen] for one, chosen in self._chosen.items()}
        return self._chosen[request]

    def _report(self, request: Request) -> TokenEvent | None:
        """The event of new final tokens: those before the first undecided position, up to the first stop token.

        Final tokens never change, so a stop token among them ends the request.
        """
        canvas = canvas_of(request)
        assert canvas is not None
        output = canvas.shown[request.prompt_len : request.max_length]
        new = output[request.num_output : canvas.num_decided].tolist()
        stop = next((i for i, token in enumerate(new) if token in request.sampler.stop_ids), None)
        finish = Finish("length") if len(request.tokens) + len(new) == request.max_length else None
        if stop is not None:
            new, finish = new[: stop + 1], Finish("stop", matched=new[stop])
        shown = output.tolist() if canvas.params.stream_canvas else None
        if not new and finish is None and shown is None:
            return None
        request.tokens.extend(new)
        event = request.take_event(new, finish)
        event.shown = shown
        return event
