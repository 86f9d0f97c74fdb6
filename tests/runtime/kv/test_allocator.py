"""The page allocator against a plain set."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kv.allocator import PageAllocator


class Plain:
    """The same choice of pages, by a look at all of them."""

    def __init__(self, num_pages: int):
        self.free = [True] * num_pages

    def extents(self) -> dict[int, int]:
        """Sizes of the free extents by their first pages."""
        sizes: dict[int, int] = {}
        for page in np.flatnonzero(self.free).tolist():
            first = next((start for start, size in sizes.items() if start + size == page), page)
            sizes[first] = page - first + 1
        return sizes

    def allocate(self, count: int, after: int) -> list[int] | None:
        if count > sum(self.free):
            return None
        pages: list[int] = []
        while len(pages) < count:
            sizes, want = self.extents(), count - len(pages)
            if not pages and after >= 0 and after + 1 in sizes:
                start = after + 1
            else:
                fitting = [(size, start) for start, size in sizes.items() if size >= want]
                _, start = min(fitting) if fitting else max((size, start) for start, size in sizes.items())
            taken = range(start, start + min(want, sizes[start]))
            pages += taken
            for page in taken:
                self.free[page] = False
        return pages


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60), st.randoms())
def test_pages_are_chosen_as_by_a_look_at_all_of_them(operations, random):
    allocator, plain = PageAllocator(24), Plain(24)
    held: list[int] = []
    for take, count in operations:
        if take:
            after = random.choice([-1, *held])
            pages = allocator.allocate(count, after)
            assert (None if pages is None else list(pages)) == plain.allocate(count, after)
            held.extend(pages or ())
        else:
            random.shuffle(held)
            allocator.release(held[:count])
            for page in held[:count]:
                plain.free[page] = True
            held = held[count:]
        allocator.check(held)
        assert dict(allocator._by_start) == plain.extents()
        assert allocator.num_free == 24 - len(held)


def test_books_that_disagree_are_noticed():
    PageAllocator(0).check([])
    allocator = PageAllocator(4)
    with pytest.raises(AssertionError, match="retain of a free page"):
        allocator.retain([1])
    allocator._add(2, 2)
    with pytest.raises(AssertionError, match="extents overlap"):
        allocator.check()


@settings(max_examples=80, deadline=None)
@given(st.randoms(), st.integers(1, 60))
def test_references_against_a_counter(random, steps):
    allocator, owned = PageAllocator(12), Counter()
    for _ in range(steps):
        kind = random.randrange(3)
        if kind == 0:
            owned.update(allocator.allocate(random.randrange(5)) or ())
        elif kind == 1 and owned:
            named = random.choices(list(owned), k=random.randrange(6))
            allocator.retain(named)
            owned.update(named)
        elif kind == 2:
            everything = list(owned.elements())
            named = random.sample(everything, random.randrange(len(everything) + 1))
            allocator.release(named)
            owned -= Counter(named)
        allocator.check(owned.elements())
        assert allocator.num_free == 12 - len(owned)
        with pytest.raises(AssertionError, match="more references than owners, or fewer"):
            allocator.check([*owned.elements(), 0])
    if owned:
        page = next(iter(owned))
        with pytest.raises(AssertionError, match="release of a free page"):
            allocator.release([page] * (owned[page] + 1))
        allocator.check(owned.elements())
