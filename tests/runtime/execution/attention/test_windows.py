"""Plans within a window, against the mask that the window means."""

import numpy as np
import pytest
import torch

from runtime.batch import AttentionPlan, ForwardBatch, LayerGroup, Read, RowSet, Span, Stage, causal_visible, rows_of
from runtime.execution.attention.paged_index import by_call, visible_of, visible_pairs
from runtime.execution.attention.windows import Window, narrowed, windowed, within
from runtime.reuse.build import build


def positions_seen(plan: AttentionPlan, page_size: int) -> dict[int, list[tuple[int, int]]]:
    """The (pool slot, position) pairs that each row sees."""
    found: dict[int, list[tuple[int, int]]] = {row: [] for row in range(plan.num_rows)}
    for edge in plan.edges:
        span = plan.spans[edge.span]
        slots = (span.pages[:, None] * page_size + np.arange(page_size)).flatten()
        for row, seen in zip(rows_of(edge, plan.num_rows), visible_pairs(edge, plan).numpy(), strict=True):
            found[int(row)] += [(int(slots[i]), span.position + int(i)) for i in np.flatnonzero(seen)]
    return {row: sorted(pairs) for row, pairs in found.items()}


def prefix_plan(page_size: int) -> tuple[AttentionPlan, np.ndarray]:
    """Two requests that share their first 32 positions: one prefills 7 rows, the other decodes; one row more is new."""
    plan = AttentionPlan(9)
    shared = Span(np.arange(32 // page_size, dtype=np.int32), 32)
    plan.add(slice(0, 8), shared)
    for first, rows, length in ((100, slice(0, 7), 12), (300, slice(7, 8), 20)):
        pages = np.arange(first, first + -(-length // page_size), dtype=np.int32)
        plan.add(rows, Span(pages, length, position=32), causal_visible(length, rows.stop - rows.start))
    plan.add(torch.tensor([8]), Span(np.array([500], dtype=np.int32), 1))
    return plan, np.array([*range(37, 44), 51, 0])


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [Window(1), Window(5), Window(16), Window(30), Window(99), Window(10, True)])
def test_rows_see_the_window_before_them(window, page_size):
    plan, positions = prefix_plan(page_size)
    narrow = within(plan, positions, window, page_size)
    for row, pairs in positions_seen(plan, page_size).items():
        at = int(positions[row])
        first = at // window.size * window.size if window.chunked else at - window.size + 1
        assert positions_seen(narrow, page_size)[row] == [pair for pair in pairs if pair[1] >= first]
    # At the most one page in part before the first key that a row of the edge sees.
    for edge in narrow.edges:
        assert edge.hidden is None or int(edge.hidden.min()) < page_size


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("size", [1, 5, 11, 16, 30, 37, 51, 99])
def test_what_rows_share_in_part_each_request_reads_alone(size, page_size):
    plan, positions = prefix_plan(page_size)
    narrow = within(plan, positions, Window(size), page_size)
    found, window = windowed(narrow, page_size)
    assert positions_seen(found, page_size) == positions_seen(narrow, page_size)
    by_kind = by_call(found, page_size, window)
    if size > 51:
        assert found is narrow
        return
    assert by_kind.keys() == {"causal"}
    assert window == size or all(edge.hidden is None for edge in found.edges)
    assert sorted(row for edge in found.edges for row in rows_of(edge, 9)) == [*range(9)]
    for edge in by_kind["causal"].edges:
        visible = visible_of(edge, by_kind["causal"])
        hidden = np.zeros_like(visible) if edge.hidden is None else edge.hidden
        assert (hidden == np.maximum(visible - size, 0)).all(), "kernels hide what is before the window"


def test_spans_that_do_not_follow_each_other_are_not_joined():
    plan, positions = prefix_plan(4)
    narrow = within(plan, positions, Window(30), 4)
    chunked = within(plan, positions, Window(10, True), 4)
    assert windowed(chunked, 4)[1] is None, "rows see different numbers of keys"
    narrow.spans[0].position -= 4
    assert windowed(narrow, 4) == (narrow, None)
    narrow.spans[0].position += 4
    narrow.spans[0].keep = torch.ones(narrow.spans[0].length, dtype=torch.bool)
    assert windowed(narrow, 4) == (narrow, None)


@pytest.mark.parametrize("visible", [1, 5])
def test_planned_spans_have_the_positions_of_their_rows(visible):
    """Of requests that share 64, 128 and no pages; where one read is shared, and what each reads behind it."""
    pages = np.arange(200, dtype=np.int32)
    ends = np.array([300], np.int32), pages[180:]
    tables = [pages[:160], np.append(pages[:128], ends[0]), np.append(pages[:64], ends[1]), pages[170:180]]
    reads = [
        Read(own, length, visible=None if visible == 1 else causal_visible(length, visible), position=at)
        for own, length, at in zip(tables, (640, 514, 333, 39), (0, 0, 0, 7), strict=True)
    ]
    flat, writes = np.zeros(visible, np.int64), np.zeros(visible, np.int64)
    plan = build([RowSet(flat, flat, [Stage(range(1), writes, [one])], flat) for one in reads], 1, 4)
    found = positions_seen(plan.batch.groups[0].attention, 4)
    for i, one in enumerate(reads):
        slots = (one.pages[:, None] * 4 + np.arange(4)).flatten().tolist()
        for row, seen in enumerate([one.length] if one.visible is None else one.visible):
            expected = sorted((slots[at], one.position + at) for at in range(seen))
            assert found[plan.logits[i].start + row] == expected


def test_layer_groups_are_cut_where_windows_change():
    plan, positions = prefix_plan(4)
    group = LayerGroup(range(5), None, torch.arange(9), plan)
    group.load, group.save = ["load"], ["save"]
    batch = ForwardBatch(torch.arange(9), torch.from_numpy(positions), [group], torch.arange(9))
    groups = narrowed(batch, [None, Window(5), Window(5), None, None], 4).groups
    assert [one.layers for one in groups] == [range(1), range(1, 3), range(3, 5)]
    assert [one.load for one in groups] == [["load"], [], []]
    assert [one.save for one in groups] == [[], [], ["save"]]
    assert groups[0].attention is groups[2].attention is plan
    kept = [narrowed(batch, [Window(size)] * 5, 4).groups[0].attention is plan for size in (51, 52)]
    assert kept == [False, True], "position 51 does not see position 0 if it is 51 before it"
    assert sum(len(span.pages) for span in groups[1].attention.spans) < sum(len(span.pages) for span in plan.spans)
