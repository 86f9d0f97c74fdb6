"""Pages that are read once for several requests."""

import random
from array import array
from collections import Counter
from itertools import count

import numpy as np
import pytest
import torch

from runtime.batch import Read, RowSet, Span, Stage, rows_of
from runtime.reuse.build import Stretch, build, stretches
from tests.runtime.engine.driver import Driver, make_core


def tables(*pages: list[int]) -> list[bytes]:
    return sorted(array("i", table).tobytes() for table in pages)


def read(found: list[Stretch], of: list[bytes]) -> list[list[int]]:
    """The page tables, put together again from the stretches."""
    whole: list[dict[int, int]] = [{} for _ in of]
    for stretch in found:
        pages = array("i", of[stretch.first])[stretch.start : stretch.stop]
        for i in range(stretch.first, stretch.last):
            for at, page in enumerate(pages, start=stretch.start):
                assert at not in whole[i], "read twice"
                whole[i][at] = page
    return [[pages[at] for at in sorted(pages)] for pages in whole]


def test_one_request_reads_its_own():
    assert stretches(tables([1, 2, 3]), 16) == [Stretch(0, 1, 0, 3)]
    assert stretches([], 16) == []


def test_a_shared_prefix_is_read_once():
    found = stretches(tables([1, 2, 3, 7], [1, 2, 3, 8], [1, 2, 3, 9]), 64)
    assert found[0] == Stretch(0, 3, 0, 3)
    assert sorted(found[1:], key=lambda s: s.first) == [Stretch(i, i + 1, 3, 4) for i in range(3)]


def test_what_is_short_is_not_worth_a_merge():
    assert stretches(tables([1, 7], [1, 8]), 16) == [Stretch(1, 2, 0, 2), Stretch(0, 1, 0, 2)]
    assert len(stretches(tables([1, 7], [1, 8]), 256)) == 3


def test_a_table_that_ends_where_another_goes_on():
    given = tables([1, 2, 3], [1, 2, 3, 4])
    found = stretches(given, 256)
    assert read(found, given) == [[1, 2, 3], [1, 2, 3, 4]]
    assert Stretch(0, 2, 0, 3) in found
    assert Stretch(0, 1, 3, 3) in found, "its own part is empty"


def test_a_shared_prefix_ends_with_a_block_or_where_reads_end():
    prefix = list(range(21))
    given = tables([*prefix, 30], [*prefix, 31])
    assert Stretch(0, 2, 0, 20) in stretches(given, 16)
    assert read(stretches(given, 16), given) == [[*prefix, 30], [*prefix, 31]]
    assert Stretch(0, 2, 0, 20) in stretches(tables(prefix, prefix), 16), "their rows may go on"
    ended = [*prefix, -77]
    assert Stretch(0, 2, 0, 22) in stretches(tables(ended, ended), 16), "the last page is used in part"


@pytest.mark.parametrize("page_size", [1, 16, 64, 1024])
def test_random_trees_are_covered_exactly_once(page_size):
    draw, fresh = random.Random(page_size), count()
    for _ in range(200):
        made = [[next(fresh)]]
        for _ in range(draw.randrange(12)):
            base = draw.choice(made)
            made.append(base[: draw.randrange(len(base) + 1)] + [next(fresh) for _ in range(draw.randrange(1, 9))])
        given = tables(*made)
        found = stretches(given, page_size)
        assert read(found, given) == [list(array("i", table)) for table in given]
        for stretch in found:
            members = stretch.last - stretch.first
            assert members == 1 or (stretch.stop - stretch.start) * page_size * (members - 1) >= 256


def test_equal_masks_over_equal_pages_are_read_once():
    pages, keep = np.arange(2, dtype=np.int32), torch.tensor([True, False, True, True])
    reads = [
        Read(pages, 4, keep=keep),
        Read(pages, 4, keep=keep.clone()),
        Read(pages, 4, keep=~keep),
        Read(pages + 1, 4, keep=keep),
        Read(pages, 4, shift=3, keep=keep),
    ]
    sets = [
        RowSet(
            np.zeros(1, np.int64), np.zeros(1, np.int64), [Stage(range(1), np.zeros(1, np.int64), [read])], np.zeros(0)
        )
        for read in reads
    ]
    plan = build(sets, 1, 2).batch.groups[0].attention
    rows = [len(rows_of(edge, plan.num_rows)) for edge in plan.edges]
    assert rows == [2, 1, 1, 1]
    for edge in plan.edges:
        span = plan.spans[edge.span]
        assert (span.length, span.keep is not None) == (4, True)


def _drawn_reads(draw: random.Random, roots: list[list[int]], num_rows: int, page_size: int) -> list[Read]:
    """Reads of one row set, each of another path: whole, causal, with left out rows, and by some of the rows."""
    reads = []
    for root in draw.sample(roots, draw.randrange(1, 4)):
        pages = np.array(root[: draw.randrange(1, len(root) + 1)], dtype=np.int32)
        length = len(pages) * page_size - draw.choice([0, 0, draw.randrange(page_size)])
        rows = draw.choice([None, None, slice(draw.randrange(num_rows), None)])
        count = num_rows - (0 if rows is None else rows.start)
        visible = np.sort(np.array(draw.choices(range(1, length + 1), k=count), dtype=np.int32))
        keep = torch.tensor(draw.choices([True, False], k=length))
        masks = {"keep": draw.choice([None, None, keep]), "visible": draw.choice([None, visible])}
        reads.append(Read(pages, length, shift=draw.choice([0, 0, 5]), rows=rows, **masks))
    return reads


def _seen(rows: np.ndarray, of: Read | Span, visible: np.ndarray | None, page_size: int) -> Counter:
    """(row, slot in the pool, shift) of everything that rows see of a read or of a span."""
    found = Counter()
    for i, row in enumerate(rows.tolist()):
        for at in range(of.length if visible is None else int(visible[i])):
            if of.keep is None or of.keep[at]:
                found[row, int(of.pages[at // page_size]) * page_size + at % page_size, of.shift] += 1
    return found


@pytest.mark.parametrize("page_size", [1, 4])
def test_each_row_sees_what_its_reads_say(page_size):
    """However reads are shared and merged, and whatever they leave out."""
    draw = random.Random(page_size)
    for _ in range(300):
        fresh = count(1)
        stem = [next(fresh) for _ in range(4)]
        roots = [[*stem[: draw.randrange(5)], *(next(fresh) for _ in range(draw.randrange(1, 4)))] for _ in range(5)]
        sets = []
        for _ in range(draw.randrange(1, 5)):
            rows = draw.randrange(1, 4)
            stage = Stage(range(1), np.zeros(rows, np.int64), _drawn_reads(draw, roots, rows, page_size))
            sets.append(RowSet(np.zeros(rows, np.int64), np.zeros(rows, np.int64), [stage], np.arange(rows)))
        plan = build(sets, 1, page_size, least_saved_tokens=draw.choice([1, 8]))
        attention, expected, found = plan.batch.groups[0].attention, Counter(), Counter()
        for one, logits in zip(sets, plan.logits, strict=True):
            its = plan.batch.logits_rows[logits].numpy()
            for read in one.stages[0].reads:
                expected += _seen(its if read.rows is None else its[read.rows], read, read.visible, page_size)
        for edge in attention.edges:
            rows = rows_of(edge, attention.num_rows)
            found += _seen(rows, attention.spans[edge.span], edge.visible, page_size)
        assert found == expected


def test_requests_under_one_node_attend_to_it_together(ids_dir, monkeypatch):
    """The plan has one edge for the shared part, and the output is what each request gives alone."""
    plans = []
    core = make_core(ids_dir)
    run = core.executor.run
    monkeypatch.setattr(core.executor, "run", lambda batch: plans.append(batch.groups[0].attention) or run(batch))
    driver, alone = Driver(core), Driver(make_core(ids_dir, prefix_cache=False))
    root = list(range(3000, 3320))
    driver.together([root], max_new_tokens=1)
    prompts = [[*root, 5 * i, *range(i, i + 3 * i)] for i in range(1, 6)] + [[9] * 40]
    together = driver.together(prompts, max_new_tokens=20)
    edges = [(edge, plan.spans[edge.span].length) for plan in plans for edge in plan.edges]
    counts = [edge.rows.stop - edge.rows.start for edge, _ in edges]
    shared = [i for i, (edge, _) in enumerate(edges) if edge.visible is None and counts[i] > 1]
    assert len(shared) >= 20
    assert {edges[i][1] for i in shared} == {320}
    assert counts[shared[-1]] == 5
    assert together == [alone.together([prompt], max_new_tokens=20)[0] for prompt in prompts]
