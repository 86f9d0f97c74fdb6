"""Runs samples with and without reuse of the prefix, and compares KV and output distributions."""

from array import array
from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F

from loadgen.offline.profile.samples import Sample
from runtime.config import CacheConfig, DiffusionConfig
from runtime.execution.executor import Executor
from runtime.features.diffusion.ask import DiffusionParams
from runtime.features.diffusion.bicache.depth_table import NO_TABLE
from runtime.features.diffusion.bicache.plan import Share, bidirectional
from runtime.features.diffusion.bicache.strategy import BiCache, BiCacheLease
from runtime.features.diffusion.decoding import CanvasDecoding, divergence
from runtime.features.diffusion.published import DiffusionSpec
from runtime.kv.cache import PagedCache
from runtime.kv.segments import Segment, Sequence
from runtime.params import SamplingParams
from runtime.protocol import AddRequest
from runtime.request import Request
from runtime.reuse.build import build
from runtime.sampler_state import SamplerState

_GREEDY = SamplingParams(temperature=0)


class Probe:
    """Runs samples on an executor. Its pool has pages of one token, and room for a prefix and two canvases.

    The first rows of the pool hold the encoded prefix, the next ones the canvas with reuse, then the one without.
    """

    def __init__(self, executor: Executor, spec: DiffusionSpec):
        assert executor.pool.page_size == 1
        self.executor = executor
        self._diffusion = spec
        self._decoding = CanvasDecoding(self._diffusion, executor.device)
        cache = PagedCache(executor.pool, CacheConfig())
        self._strategy = BiCache(DiffusionConfig(), NO_TABLE, spec, executor.spec.num_layers, cache)

    def similarity(self, sample: Sample) -> tuple[list[float], list[float]]:
        """By layer, the cosine similarity of the prefix's KV encoded alone and in the full input of the first step.

        The first list takes all tokens as one vector (equation 3), the second is the mean over single tokens.
        """
        self._run(self._alone(sample))
        self._run(self._full(sample))
        n = len(sample.prefix)
        pool, full = self.executor.pool, n + sample.length
        of_all, of_tokens = [], []
        for layer in range(self.executor.spec.num_layers):
            alone, whole = (
                torch.cat(
                    (pool.k[layer, at : at + n].flatten(1), pool.v[layer, at : at + n].flatten(1)), dim=1
                ).double()
                for at in (0, full)
            )
            of_all.append(float(F.cosine_similarity(alone.flatten(), whole.flatten(), dim=0)))
            of_tokens.append(float(F.cosine_similarity(alone, whole, dim=1).mean()))
        return of_all, of_tokens

    def divergence(self, sample: Sample, depth: int, steps: int) -> float:
        """The KL divergence in nats of distributions with reuse from those without, as a mean over masks.

        Both canvases get the tokens that the model without reuse decides in its first `steps` steps. With reuse the
        prefix is refreshed in each step, so that the depth is measured and not the interval.
        """
        self._run(self._alone(sample))
        full = self._full(sample)
        found: list[float] = []
        canvas = bidirectional(full)
        while len(found) < steps and not canvas.done:
            reusing = self._reusing(sample, depth)
            reusing.decoding_state = canvas
            with_reuse = self._run(reusing).clone()
            without = self._run(full)
            found.append(float(divergence(without, with_reuse, self._diffusion.mask_token_id)))
            canvas.decide(*(chosen.cpu() for chosen in canvas.choose(without)))
        return float(np.mean(found))

    @torch.inference_mode()
    def _run(self, request: Request) -> torch.Tensor:
        spec = self.executor.spec
        sets = request.lease.rows(request.lease.work(request.max_length))
        plan = build(sets, spec.num_layers, 1, spec.hidden_size, self.executor.device)
        return self.executor.run(plan.batch)

    def _alone(self, sample: Sample) -> Request:
        """A request that encodes the prefix."""
        n = len(sample.prefix)
        request = self._request(sample, sample.prefix, Share(length=n, depth=1, is_encoding=True), range(0))
        request.read([Segment(array("i", range(n)), n)])
        return request

    def _reusing(self, sample: Sample, depth: int) -> Request:
        n = len(sample.prefix)
        share = Share(length=n, depth=depth)
        request = self._request(sample, [*sample.prefix, *sample.prompt], share, range(n, n + sample.length))
        request.read([Segment(array("i", range(n)), n)] if depth else [])
        return request

    def _full(self, sample: Sample) -> Request:
        start = len(sample.prefix) + sample.length
        prompt = [*sample.prefix, *sample.prompt]
        return self._request(sample, prompt, Share(), range(start, start + sample.length))

    def _request(self, sample: Sample, prompt: list[int], share: Share, pages: Iterable[int]) -> Request:
        """A request with one block, in which each step decides one mask."""
        asked = DiffusionParams(gen_length=sample.gen_length, block_length=sample.gen_length)
        params = asked.filled(self._diffusion, _GREEDY)
        request = Request(
            AddRequest("probe", b""),
            SamplerState(_GREEDY),
            Sequence(array("i", prompt), pages=array("i", pages)),
            len(prompt),
            len(prompt) + sample.gen_length,
            self._strategy,
            self._decoding,
        )
        request.lease = BiCacheLease(self._strategy, request, share)
        self._decoding.open(request, params)
        return request
