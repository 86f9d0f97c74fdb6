"""Plans that grow are those that would be made anew, whatever happens between the steps."""

import random
from array import array

import numpy as np
import pytest

from runtime.batch import ForwardBatch
from runtime.features.drafts.part import Drafts
from runtime.reuse import planner
from runtime.reuse.planner import Planner
from tests.runtime.engine.driver import Driver, make_core


def seen(batch: ForwardBatch, page_size: int) -> list[tuple[object, ...]]:
    """Each row's token, position, slot, and the slots of the pool that it reads."""
    (group,) = batch.groups
    reads: list[list[np.ndarray]] = [[] for _ in batch.tokens]
    for edge in group.attention.edges:
        span = group.attention.spans[edge.span]
        slots = (span.pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[: span.length]
        for at, row in enumerate(np.arange(len(reads))[edge.rows]):
            reads[row].append(slots if edge.visible is None else slots[: edge.visible[at]])
    columns = (batch.tokens.tolist(), batch.positions.tolist(), group.kv_write.tolist())
    return [(*row, sorted(np.concatenate(read).tolist())) for *row, read in zip(*columns, reads, strict=True)]


def drive(core):
    """Requests come, end, leave and give way while others decode."""
    driver, draw = Driver(core), random.Random(5)
    prefix = [7, 8, 9] * 8
    for number in range(14):
        prompt = prefix[: draw.choice((0, 5, 24))] + [draw.randrange(20) for _ in range(draw.randrange(1, 12))]
        driver.add(f"{number}", prompt, max_new_tokens=draw.randrange(2, 100), temperature=draw.choice((0, 1)), seed=1)
        for _ in range(draw.randrange(12)):
            driver.step()
        if number % 5 == 4:
            core.abort(f"{number - 1}")
    driver.run()
    return driver.tokens


@pytest.mark.parametrize(("drafts", "overlap"), [(False, "off"), (True, "off"), (False, "on")])
def test_a_plan_that_grows_is_the_plan_made_anew(ids_dir, monkeypatch, drafts, overlap):
    """Within pages and over their ends, over steps with drafts, and for steps whose tokens are still on the device."""
    options = {"page_size": 4, "pool_tokens": 240, "overlap": overlap}
    known = drive(make_core(ids_dir, **options)) if drafts else {}
    core, guess = make_core(ids_dir, drafts="auto", **options), random.Random(6)
    plan, built, starts, grown = core.planner.plan, [], {}, []
    monkeypatch.setattr(planner, "build", lambda *a, made=planner.build: built.append(1) or made(*a))

    def compare(work):
        before, booked = len(built), [item.request.row_layers for item in work]
        found = plan(work)
        if len(built) == before and (overlap == "off" or work[0].ahead):
            grown.append(max(item.start - starts[item.request] for item in work))
        if all(item.num_rows == 1 for item in work):
            starts.update((item.request, item.start) for item in work)
        after = [item.request.row_layers for item in work]
        layers = core.executor.spec.num_layers
        anew = Planner(
            layers, core.info.page_size, 0, core.executor.device, core.executor.decoder.least_saved_tokens
        ).plan(work)
        for item, was, now in zip(work, booked, after, strict=True):
            assert item.request.row_layers - now == now - was
            item.request.row_layers = now
        assert seen(found.batch, core.info.page_size) == seen(anew.batch, core.info.page_size)
        assert (found.logit_rows, found.row_layers) == (anew.logit_rows, anew.row_layers)
        assert found.batch.logits_rows.tolist() == anew.batch.logits_rows.tolist()
        return found

    def propose(requests, room, beside):
        if not drafts or room < 12 * len(requests) or guess.randrange(2):
            return {}
        right = {request: known[request.rid][request.num_output :][: guess.randrange(12)] for request in requests}
        return {
            request: array("i", [*tokens, guess.randrange(20)][: request.max_length - len(request.tokens) - 1])
            for request, tokens in right.items()
        }

    monkeypatch.setattr(core.planner, "plan", compare)
    if overlap == "off":
        monkeypatch.setattr(core.part(Drafts).drafter, "propose", propose)
    assert drive(core).keys() >= known.keys()
    assert not core.counters["failed_steps"], "the plans of some step differed"
    assert len(grown) > 10
    assert core.counters["steps"] - len(grown) > 10
    assert (core.counters["drafted_tokens"] > 0) == drafts
    assert max(grown) > 9 if drafts else max(grown) == 1
