"""The `prefix` strategy: the longest cached prefix exists in all layers, the suffix is computed in all layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from radix import Match, Node, path
from runtime.kv.lookup import look_up
from runtime.kv.segments import Run, Segment
from runtime.request import Found, Request, Work
from runtime.reuse.in_order import InOrder


class PrefixStrategy(InOrder):
    """Exact prefix caching of causal models.

    The request's one segment is the part of its tokens that lies in the tree. It grows as whole pages of the sequence
    are committed.
    """

    name = "prefix"
    keeps_prompts = True
    steady = True

    def find(self, request: Request) -> Found:
        """The last token is never matched: its logits are wanted."""
        if not self.cache.enabled:
            return Found(0, Match())
        match = self.cache.tree.match(request.key(self._most(request)), request.namespace)
        return Found(len(match.pages) * self.cache.page_size + match.partial_rows, match)

    def reads(self, request: Request) -> list[Run]:
        return [Run(request.tokens[: self._most(request)], request.namespace)]

    def _most(self, request: Request) -> int:
        """Tokens that may be matched."""
        limit = len(request.tokens) - 1
        if request.wants_prompt_logprobs:
            limit = min(limit, max((request.sampler.prompt_logprobs_from or 0) - 1, 0))
        return limit

    def peer(self, request: Request, found: Found, computing: Sequence[Request]) -> tuple[Request, int] | None:
        """One whose tokens share a page more with this request's than the tree has."""
        if not self.cache.enabled or request.wants_prompt_logprobs:
            return None
        page_size = self.cache.page_size
        start = len(found.detail.pages) * page_size
        stop = start + page_size
        for other in computing:
            if request.namespace != other.namespace or stop > min(len(request.tokens) - 1, len(other.tokens)):
                continue
            # The one page first: most pairs differ there, and the whole prefix is compared for the others only.
            if request.tokens[start:stop] == other.tokens[start:stop] and request.key(stop) == other.key(stop):
                return other, stop
        return None

    def admit(self, request: Request, found: Found, headroom: int) -> bool:
        cache, match, sequence = self.cache, found.detail, request.sequence
        if request.message.explain and request.cached_tokens < 0:
            key = request.key(len(request.tokens))
            request.event.lookup = look_up(cache, key, request.namespace, self._most(request))
        node = cache.tree.lock_match(match)
        need = cache.pages_for(len(sequence.tokens)) - len(match.pages)
        fresh, rows = None, 0
        if need + headroom <= cache.num_available:
            # The page to copy from must outlive the eviction that makes room for its copy; where nothing else can
            # be evicted it goes too, and its rows are computed again.
            cache.tree.lock(match.partial_node)
            fresh = cache.allocate(need, match.pages, request.owner)
            cache.tree.unlock(match.partial_node)
            rows = match.partial_rows if fresh is not None else 0
            if fresh is None:
                fresh = cache.allocate(need, match.pages, request.owner)
        if fresh is None:
            cache.tree.unlock(node)
            return False
        cache.use(node)
        cache.pins.renew(node, request.owner)
        whole = len(match.pages) * cache.page_size
        request.segments = [Segment(match.pages, whole, node=node)] if node is not None else []
        sequence.start, sequence.pages, sequence.num_computed, sequence.seconds = whole, fresh, whole + rows, 0.0
        if rows:
            cache.pool.copy_rows(match.partial_page, fresh[0], rows)
        if request.cached_tokens < 0:
            request.cached_tokens = whole + rows
        return True

    def book(self, work: Work, saved: Sequence[torch.Tensor | None], seconds: float) -> bool:
        prefills = work.prefills
        work.request.sequence.num_computed += work.count
        work.request.sequence.seconds += seconds
        if prefills:
            self._commit(work.request)
        return True

    def _commit(self, request: Request) -> None:
        """Hand the full pages of the sequence to the tree, which may have some of them already."""
        cache, sequence = self.cache, request.sequence
        full = self._sure(request) // cache.page_size
        before = sequence.start // cache.page_size
        if not (cache.enabled and request.message.store) or full <= before:
            return
        own = request.segments[:1] if sequence.start else []
        segment = own[0] if own else Segment(sequence.pages[:0], 0)
        pages = segment.pages + sequence.pages[: full - before]
        key = request.key(full * cache.page_size)
        node, held = cache.insert(key, pages, request.namespace, sequence.seconds, owner=request.owner)
        sequence.seconds = 0.0
        cache.tree.lock(node)
        cache.tree.unlock(segment.node)
        sequence.pages = sequence.pages[full - before :]
        sequence.start = full * cache.page_size
        request.segments = [Segment(held, sequence.start, node=node), *request.segments[len(own) :]]

    def _sure(self, request: Request) -> int:
        """Leading computed tokens that the tree may have."""
        return request.sequence.num_computed

    def release(self, request: Request, keep: bool) -> None:
        if keep:
            self._commit(request)
        self.cache.release(request)

    def distrust(self, request: Request) -> None:
        """Drop the whole paths that the request read and wrote, and all below: any page may be the damaged one.

        So may be the page of another path from which the request's first own rows were copied.
        """
        read = [segment.node for segment in request.segments]
        self.cache.release(request)
        self._distrust_paths(read)
        left = self.cache.tree.match(request.key(len(request.tokens)), request.namespace)
        self._distrust_paths([left.node, left.partial_node])

    def _distrust_paths(self, nodes: Iterable[Node | None]) -> None:
        for top in [top for node in nodes for top in list(path(node))[-1:]]:
            self.cache.distrust(top)
