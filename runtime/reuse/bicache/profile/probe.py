"""Runs samples with and without reuse, and compares keys, values and output distributions."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from radix import Namespace
from runtime.diffusion.canvas import Denoiser
from runtime.engine.denoise_request import DenoiseRequest
from runtime.execution.executor import Executor
from runtime.params import DiffusionParams, SamplingParams
from runtime.reuse.bicache.plan import plan_denoise
from runtime.reuse.bicache.profile.samples import Sample

_GREEDY = SamplingParams(temperature=0)


class Probe:
    """Samples on an executor whose pool has pages of one token and room for an encoding and two canvases.

    The prefix, with what followed it then, is encoded alone into the first rows of the pool; the canvas with reuse
    follows, then the one without.
    """

    def __init__(self, executor: Executor):
        assert executor.pool.page_size == 1
        self.executor = executor
        assert executor.spec.diffusion is not None
        self._diffusion = executor.spec.diffusion

    def similarity(self, sample: Sample, per_token: bool) -> list[float]:
        """Cosine similarity of the prefix's keys and values, alone and in the full input at the first step, by layer.

        Args:
            sample: what is run.
            per_token: the mean of the tokens' similarities; else that of all tokens as one vector (equation 3).
        """
        self._run(self._alone(sample))
        self._run(self._full(sample))
        n = len(sample.prefix)
        pool, full = self.executor.pool, sample.encoded + sample.length
        found = []
        for layer in range(self.executor.spec.num_layers):
            alone, whole = (
                torch.cat((pool.k[layer, at : at + n].flatten(1), pool.v[layer, at : at + n].flatten(1)), dim=1).float()
                for at in (0, full)
            )
            if not per_token:
                alone, whole = alone.reshape(1, -1), whole.reshape(1, -1)
            found.append(float(F.cosine_similarity(alone.double(), whole.double(), dim=1).mean()))
        return found

    def divergence(self, sample: Sample, depth: int, steps: int) -> float:
        """KL divergence in nats of the masks' distributions with reuse from those without, the mean over masks.

        The first steps of the model without reuse are followed; with reuse the prefix is refreshed at each of them, so
        that what is measured is the depth and not the interval.
        """
        self._run(self._alone(sample))
        full = self._full(sample)
        found: list[float] = []
        while len(found) < steps and not full.denoiser.done:
            reusing = self._reusing(sample, depth)
            reusing.denoiser = full.denoiser
            with_reuse = self._log_probs(reusing)
            without = self._log_probs(full)
            found.append(float((without.exp() * (without - with_reuse)).sum(-1).mean()))
            full.denoiser.commit(without)
        return float(np.mean(found))

    def _log_probs(self, request: DenoiseRequest) -> torch.Tensor:
        logits = self._run(request).clone()
        # Never chosen, so it belongs to no distribution; and minus infinity twice is no number.
        logits[:, self._diffusion.mask_token_id] = -1e4
        return logits.log_softmax(-1)

    @torch.inference_mode()
    def _run(self, request: DenoiseRequest) -> torch.Tensor:
        spec = self.executor.spec
        batch = plan_denoise(
            [request.work(spec.num_layers)], spec.num_layers, spec.hidden_size, 1, self.executor.device
        )
        return self.executor.run(batch)

    def _alone(self, sample: Sample) -> DenoiseRequest:
        whole = replace(sample, prefix=[*sample.prefix, *sample.lost], lost=())
        request = self._reusing(whole, 1)
        request.is_encoding = True
        return request

    def _reusing(self, sample: Sample, depth: int) -> DenoiseRequest:
        n, start = len(sample.prefix), sample.encoded
        shared = range(n) if depth else range(0)
        request = self._request(sample, [*shared, *range(start, start + sample.length)])
        request.prefix_len, request.depth = n, depth
        request.encoding = Namespace(entry="prefix") if depth else None
        return request

    def _full(self, sample: Sample) -> DenoiseRequest:
        start = sample.encoded + sample.length
        return self._request(sample, range(start, start + sample.length))

    def _request(self, sample: Sample, pages: Iterable[int]) -> DenoiseRequest:
        """A request of one block, of whose masks each step decides one."""
        prompt = np.array([*sample.prefix, *sample.prompt], dtype=np.int64)
        params = DiffusionParams(gen_length=sample.gen_length, block_length=sample.gen_length)
        params = params.filled(self._diffusion.algorithm, _GREEDY)
        generator = torch.Generator(self.executor.device)
        return DenoiseRequest(
            rid="probe",
            tokens=array("i", prompt.tolist()),
            prompt_len=len(prompt),
            sampling=_GREEDY,
            stop_ids=frozenset(),
            max_tokens=sample.length,
            pages=array("i", pages),
            denoiser=Denoiser(prompt, params, _GREEDY, self._diffusion, generator),
            params=params,
            interval=1,
        )
