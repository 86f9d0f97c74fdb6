"""Steps of graphs: a plan of single rows is one only if it reads, row by row, what the plan reads."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.batch import AttentionPlan, Span
from runtime.execution.attention.graph_step import GraphStep, graph_step
from runtime.execution.attention.paged_index import causal_window

PAGE, ROWS = 4, 3
# An edge: first row, rows behind it, keys of its span, hidden ones, and whether it has something that a step has not.
EDGES = st.tuples(
    st.integers(0, ROWS - 1),
    st.integers(1, ROWS),
    st.integers(1, 9),
    st.integers(0, 3),
    st.sampled_from(["", "", "", "", "shift", "visible", "keep"]),
)


def made(edges) -> AttentionPlan:
    plan, pages = AttentionPlan(ROWS), iter(range(1000))
    for first, count, length, hidden, odd in edges:
        rows = range(first, min(first + count, ROWS))
        span = Span(np.array([next(pages) for _ in range(-(-length // PAGE))], dtype=np.int32), length)
        span.shift = 3 if odd == "shift" else 0
        span.keep = np.arange(length) > 0 if odd == "keep" else None
        visible = np.arange(len(rows), dtype=np.int32) if odd == "visible" else None
        hides = np.full(len(rows), min(hidden, length - 1), dtype=np.int32) if hidden else None
        plan.add(slice(rows.start, rows.stop), span, visible, hides)
    return plan


def keys(span: Span, begin: int, stop: int) -> set[tuple[int, int]]:
    return {(int(span.pages[i // PAGE]), i % PAGE) for i in range(begin, stop)}


def read_by_plan(plan: AttentionPlan, row: int) -> set[tuple[int, int]]:
    found = set()
    for edge in plan.edges:
        if edge.rows.start <= row < edge.rows.stop:
            span, hidden = plan.spans[edge.span], 0 if edge.hidden is None else int(edge.hidden[row - edge.rows.start])
            found |= keys(span, hidden, span.length)
    return found


def read_by_step(step: GraphStep, row: int) -> set[tuple[int, int]]:
    own = step.own[row].span
    found = keys(own, 0 if step.window is None else max(own.length - step.window, 0), own.length)
    for level in step.levels:
        for shared in level:
            if shared.first <= row < shared.stop:
                found |= keys(shared.span, 0, shared.span.length)
    return found


@settings(max_examples=100, deadline=None)
@given(own=st.lists(EDGES, min_size=ROWS, max_size=ROWS), others=st.lists(EDGES, max_size=2))
def test_a_decode_step_reads_what_the_plan_reads(own, others):
    plan = made([(row, 1, *rest) for row, (_, _, *rest) in enumerate(own)] + others)
    window = causal_window(plan)
    step = graph_step(plan, window)
    odd = any(odd for *_, odd in (*own, *others))
    several = any(count > 1 and first < ROWS - 1 and hidden for first, count, _, hidden, _ in others)
    alone = any(count == 1 or first == ROWS - 1 for first, count, *_ in others)
    if odd or several or alone:
        assert step is None
        return
    if step is not None:
        assert [read_by_step(step, row) for row in range(ROWS)] == [read_by_plan(plan, row) for row in range(ROWS)]
        for level in step.levels:
            assert all(one.stop <= two.first for one, two in pairwise(level))
    else:
        assert window is None
        assert any(hidden for _, _, _, hidden, _ in own), "rows without a window fit"
