"""Pages between their owners: free, the tree's, a request's own; quotas, pins and evictions on the way."""

from array import array

import pytest
import torch

from radix import Namespace
from radix.eviction import LRU
from runtime.config import CacheConfig
from runtime.kv.cache import PagedCache
from runtime.kv.pool import KVPool
from runtime.kv.segments import Segment
from runtime.request import Request
from tests.runtime.requests import make_request

T = Namespace("t")
EVERYBODY = Namespace()


def make_cache(pages: int = 16, page_size: int = 2, quotas: dict[str, int] | None = None, **options) -> PagedCache:
    pool = KVPool(1, pages, page_size, 1, 1, torch.float32, torch.device("cpu"))
    return PagedCache(pool, CacheConfig(page_size=page_size, **options), quotas, clock=lambda: 0.0)


def key(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def keep(cache: PagedCache, *tokens: int, namespace: Namespace = EVERYBODY):
    """Compute some tokens and hand their pages to the tree; the node."""
    pages = cache.allocate(len(tokens) // cache.page_size, array("i"), namespace)
    return cache.insert(key(*tokens), pages, namespace)[0]


def reader(cache: PagedCache, *tokens: int, own: int = 0, namespace: Namespace = EVERYBODY) -> Request:
    """A request that reads what is cached of its tokens, and has `own` pages beside."""
    match = cache.tree.match(key(*tokens), namespace)
    node = cache.tree.lock_match(match)
    request = make_request(tokens, namespace=namespace)
    whole = len(match.pages) * cache.page_size
    request.read([Segment(match.pages, whole, node=node)] if node else [])
    request.sequence.start = whole
    request.sequence.num_computed = whole + own * cache.page_size
    request.sequence.pages = cache.allocate(own, match.pages, namespace)
    return request


def cached(cache: PagedCache, *tokens: int, namespace: Namespace = EVERYBODY) -> int:
    return len(cache.tree.match(key(*tokens), namespace).pages)


def test_pages_for_tokens():
    cache = make_cache(page_size=4)
    assert [cache.pages_for(tokens) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_pages_that_are_available():
    cache = make_cache()
    keep(cache, 1, 2, 3, 4)
    assert (cache.allocator.num_free, cache.num_available) == (14, 16)
    request = reader(cache, 1, 2, 3, 4, own=3)
    assert (cache.allocator.num_free, cache.num_available) == (11, 11)
    cache.release(request)
    assert (cache.allocator.num_free, cache.num_available) == (14, 16)
    cache.check([])


def test_pages_that_the_tree_has_already_are_given_back():
    cache = make_cache()
    first = keep(cache, 1, 2, 3, 4)
    pages = cache.allocate(3, array("i"), EVERYBODY)
    node, held = cache.insert(key(1, 2, 3, 4, 5, 6), pages, EVERYBODY, 7.0, "record")
    assert list(held) == [*first.pages, pages[2]]
    assert (list(node.pages), node.cost, node.meta) == ([pages[2]], 7.0, "record")
    assert first.cost == 0.0
    assert cache.allocator.num_free == 13
    cache.check([])


def test_a_request_that_leaves_has_nothing_and_what_it_read_is_used_last():
    cache = make_cache()
    for i in range(3):
        keep(cache, i, i)
    request = reader(cache, 0, 0, own=2)
    private = cache.allocate(1, array("i"), EVERYBODY)
    request.read([*request.segments, Segment(private, 2)])
    cache.check([request])
    request.sequence.pending = 3
    cache.release(request)
    cache.check([])
    sequence = request.sequence
    assert (request.segments, request.sequence.pending, len(sequence.pages), sequence.start, sequence.num_computed) == (
        (),
        0,
        0,
        0,
        0,
    )
    assert cache.allocator.num_free == 13
    cache.allocate(14, array("i"), EVERYBODY)
    assert [cached(cache, i, i) for i in range(3)] == [1, 0, 1]


def test_who_computed_shared_pages_gives_way_when_its_request_leaves():
    cache, shared = make_cache(quotas={"t": 2}), Namespace("public")
    cache.insert(key(1, 2, 3, 4, 5, 6), cache.allocate(3, array("i"), EVERYBODY), shared, owner=T)
    request = reader(cache, 1, 2, namespace=shared)
    request.message.account = "t"
    cache.release(request)
    assert cache.tree.quotas.pages(T) == 2


def test_tokens_that_nobody_else_keeps():
    cache = make_cache(pages=32)
    keep(cache, 1, 2, 3, 4, 5, 6)
    alone = reader(cache, 1, 2, 3, 4, own=2)
    assert cache.num_own_tokens(alone) == 8
    shares = reader(cache, 1, 2, 3, 4, 5, 6, own=1)
    assert cache.num_own_tokens(alone) == 4, "two pages stay with the other"
    assert cache.num_own_tokens(shares) == 4, "and of the other's three, its last"
    cache.release(shares)
    assert cache.num_own_tokens(alone) == 8
    cache.tree.pin(alone.segments[0].node)
    assert cache.num_own_tokens(alone) == 4
    assert cache.num_own_tokens(reader(cache, 9, 9, own=3)) == 6
    keep(cache, 5, 5, 6, 6)
    second = reader(cache, 5, 5, 6, 6)
    alone.read(alone.segments + second.segments)
    assert cache.num_own_tokens(alone) == 8, "four more of its own"
    reader(cache, 5, 5, 6, 6)
    assert cache.num_own_tokens(alone) == 4, "which somebody else keeps now"
    alone.read(alone.segments[:-1])
    alone.sequence.num_computed = 3
    assert cache.num_own_tokens(alone) == 0


def test_evictions_make_room_for_exactly_what_is_wanted():
    cache = make_cache(pages=8)
    for i in range(3):
        keep(cache, i, i, i, 9)
    assert cache.allocator.num_free == 2
    assert len(cache.allocate(2, array("i"), EVERYBODY)) == 2
    assert cache.tree.num_pages == 6
    pages = cache.allocate(3, array("i"), EVERYBODY)
    assert (len(pages), cache.tree.num_pages, cache.allocator.num_free) == (3, 3, 0)
    assert [cached(cache, i, i, i, 9) for i in range(3)] == [0, 1, 2]
    assert cache.allocate(4, array("i"), EVERYBODY) is None
    assert cache.tree.num_pages == 3, "for a request that gets nothing, nothing goes"
    assert len(cache.allocate(3, array("i"), EVERYBODY)) == 3
    assert cache.allocate(0, array("i"), EVERYBODY) is not None


def test_a_quota_bounds_the_pages_that_the_tree_will_hold():
    for coming, left in ((None, 1), (2, 2), (0, 4)):
        cache = make_cache(quotas={"t": 4})
        keep(cache, 1, 2, 3, 4, namespace=T)
        keep(cache, 5, 6, 7, 8, namespace=T)
        keep(cache, 5, 6, 7, 8)
        cache.allocate(3, array("i"), T, cached=coming)
        assert (cache.tree.quotas.pages(T), cache.tree.num_pages) == (left, left + 2)


def test_tenants_without_a_quota_of_their_own_have_the_configured_one():
    cache = make_cache(quotas={"t": 4}, tenant_quota=1)
    assert [cache.tree.quotas.over(Namespace(name), 5) for name in ("t", "other")] == [1, 4]
    assert make_cache(tenant_quota=2).tree.quotas.over(T, 5) == 3
    assert make_cache(quotas={"t": 4}).tree.quotas.over(Namespace("other"), 99) == 0
    assert make_cache().tree.quotas.over(Namespace("other"), 99) == 0


def test_flush_and_drop_spare_what_is_in_use():
    cache = make_cache()
    node = keep(cache, 1, 2, 3, 4)
    keep(cache, 5, 6)
    request = reader(cache, 1, 2)
    assert cache.drop(node) == 1
    assert cache.flush() == 1
    assert (cache.allocator.num_free, cache.tree.num_pages) == (15, 1)
    cache.release(request)
    assert cache.drop(next(cache.tree.nodes())) == 1
    assert (cache.allocator.num_free, cache.flush()) == (16, 0)


def test_what_is_configured():
    assert make_cache().enabled
    assert not make_cache(prefix_cache=False).enabled
    assert make_cache().events is None
    assert [make_cache(pages=9, pin_budget=share).holds.budget_pages for share in (0.5, 1, 0)] == [4, 9, 0]
    cache = make_cache()
    keep(cache, 1, 2)
    assert cache.pins.pin(array("i", [1, 2]), EVERYBODY, None, 5.0).expires_in_s == 5.0
    assert (cache.tree.num_pinned_pages, cache.pool.num_pages) == (1, 16)
    cache = make_cache(kv_events="tcp://127.0.0.1:1")
    keep(cache, 1, 2, 3, 4)
    (event,) = cache.events.take()
    assert (len(event.hashes), event.tokens) == (2, key(1, 2, 3, 4))
    assert isinstance(make_cache(eviction_policy="lru").tree.policy, LRU)
    assert make_cache(pages=40).tree.policy._most_ghosts == 40 + 4096, "foresight, of the pool's size"


def lost(cache, request):
    cache.allocate(1, array("i"), EVERYBODY)


def owned_twice(cache, request):
    request.sequence.pages.append(next(cache.tree.nodes()).pages[0])


def shared_segment(cache, request):
    request.read([*request.segments, Segment(next(cache.tree.nodes()).pages[:1], 2)])


def not_locked(cache, request):
    other = keep(cache, 7, 8)
    request.segments[0].pages = other.pages


def locked_by_nobody(cache, request):
    cache.release(request)
    cache.tree.lock(next(cache.tree.nodes()))


def the_tree_itself(cache, request):
    cache.tree.num_nodes += 1


@pytest.mark.parametrize("damage", [the_tree_itself, lost, owned_twice, shared_segment, not_locked, locked_by_nobody])
def test_the_books_are_checked(damage):
    cache = make_cache()
    keep(cache, 1, 2, 3, 4)
    request = reader(cache, 1, 2, 3, 4, own=1)
    cache.check([request])
    with pytest.raises(AssertionError):
        cache.check([])
    damage(cache, request)
    with pytest.raises(AssertionError):
        cache.check([request])
