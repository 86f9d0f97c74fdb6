"""The contract of reuse strategies: each keeps every promise, whatever it reads and computes."""

import random
from dataclasses import fields, is_dataclass

import pytest
import torch

from radix import Namespace
from runtime.calls import EraseTenant, GetRequests
from runtime.models.tokenizer import Tokenizer
from runtime.request import Request
from tests.runtime.engine.driver import call
from tests.runtime.reuse.contract.subject import NEW, TENANT, Subject, World
from tests.runtime.reuse.contract.subjects import SUBJECTS, Prefix

SMALL = {"page_size": 4, "step_tokens": 24}


def some(subject: Subject, count: int, seed: int = 0) -> list:
    draw = random.Random(seed)
    return [subject.draw(draw) for _ in range(count)]


def state_of(request: Request) -> list[object]:
    """All fields of a request and of its lease's state, and the items of those that are lists."""
    found: list[object] = []
    for one in filter(is_dataclass, (request, request.sequence, *vars(request.lease).values())):
        values = [getattr(one, field.name) for field in fields(one)]
        found += [[*map(id, value)] if isinstance(value, list) else id(value) for value in values]
    return found


# -- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 16, "kernels": "torch"},
        {"page_size": 1, "step_tokens": 7, "overlap": "off"},
        {"page_size": 4, "step_tokens": 64, "chunk_tokens": 16, "overlap": "on"},
    ],
    ids=["torch", "small steps", "chunks"],
)
def test_in_its_limit_a_strategy_is_exact(subject, options):
    """Greedy, in float32: cold, warm, and behind a request that shares nothing."""
    draw = random.Random(1)
    (prompt, answer), other = subject.limit(draw), subject.draw(draw)
    world = World(subject, **options)
    assert world.one("cold", prompt) == answer
    world.ask("other", other)
    assert world.one("warm", prompt) == answer
    world.check()


@pytest.mark.parametrize("options", [{}, {"page_size": 1, "chunk_tokens": 3, "step_tokens": 64}, SMALL])
def test_cold_warm_and_batched_answers_are_right(subject, options):
    """The second time fewer rows are computed; the report adds up."""
    prompts, world, costs = some(subject, 3), World(subject, **options), []
    for i in range(2):
        before = world.row_layers
        world.one(f"{i}", prompts[0])
        assert (world.cached(f"{i}") > 0) == (i > 0)
        report = next((event.reuse.fields() for event in world.events[f"{i}"] if event.reuse), {})
        if "computed_tokens" in report:
            assert report["reused_tokens"] == world.cached(f"{i}")
            assert report["reused_tokens"] + report["computed_tokens"] == subject.size(prompts[0])
        costs.append(world.row_layers - before)
    assert costs[1] < costs[0]
    for i, prompt in enumerate([*prompts, prompts[1]]):
        world.ask(f"batch {i}", prompt)
    world.run()
    world.check()


def test_penalties_count_all_tokens_of_the_prompt(subject):
    draw = random.Random(3)
    prompt, plain = subject.limit(draw)[0], Prefix(subject.path)
    if subject.ordinary(prompt) is None:
        pytest.skip("no ordinary request has such a text")
    world, sampling = World(subject), {"repetition_penalty": 0.5}
    found = [world.one("reused", prompt, count=12, sampling=sampling)]
    found.append(world.one("ordinary", subject.ordinary(prompt), count=12, by=plain, sampling=sampling))
    assert found[0] == found[1] != world.one("without", prompt, count=12)


def test_an_answer_may_be_constrained(tiny_dir):
    """Of all causal strategies in one batch, as one grammar and its tokenizer serve them all."""
    subjects = [kind(tiny_dir) for kind in SUBJECTS.values() if kind.is_causal]
    world = World(subjects[0], page_size=4)
    for again in ("cold", "warm"):
        for i, subject in enumerate(subjects):
            world.ask(f"{again} {i}", some(subject, 1)[0], by=subject, sampling={"regex": "[0-9]{6,9}"})
    world.run()
    tokenizer = Tokenizer.load(subjects[0].path)
    assert all(tokenizer.decode(tokens).isdigit() for tokens in world.tokens.values())
    assert all(world.tokens[f"cold {i}"] == world.tokens[f"warm {i}"] for i in range(len(subjects)))


def test_what_several_requests_need_is_computed_once(subject):
    (prompt,) = some(subject, 1)
    world = World(subject, page_size=4)
    world.one("alone", prompt)
    alone, world = world.row_layers, World(subject, page_size=4, step_tokens=32)
    for i in range(3):
        world.ask(f"{i}", prompt)
    world.run()
    world.check()
    # BiCache computes a prefix once, but each request denoises a canvas of its own.
    assert world.row_layers < (2 if subject.grows else 3) * alone


def test_a_look_up_changes_nothing(subject, monkeypatch):
    """Neither of the request that looks, nor of those that it might wait for."""
    world, prompts, looks = World(subject, **SMALL), some(subject, 2), []

    def compare(real):
        def look(*args):
            before = [state_of(one) for one in world.requests.values()]
            found = real(*args)
            assert [state_of(one) for one in world.requests.values()] == before
            looks.append(found)
            return found

        return look

    add = world.core.scheduler.add

    def watch(request):
        for hook in ("look", "peer", "reads"):
            setattr(request.lease, hook, compare(getattr(request.lease, hook)))
        add(request)

    monkeypatch.setattr(world.core.scheduler, "add", watch)
    for i, prompt in enumerate([*prompts, *prompts, prompts[0]]):
        world.ask(f"{i}", prompt)
        if i % 2:
            world.step()
        world.requests[f"{i}"].lease.reads()
    world.run()
    assert len(looks) > 10


def test_without_a_cache_nothing_is_kept(subject):
    prompts, world = some(subject, 2), World(subject, prefix_cache=False)
    for i, prompt in enumerate([*prompts, *prompts]):
        world.ask(f"{i}", prompt)
    world.run()
    world.check()
    assert {world.cached(rid) for rid in world.asked} == {0}
    assert world.tree.num_pages == 0


# -- memory ------------------------------------------------------------------------------------------------------


def test_a_request_retracted_at_any_step_ends_right(subject):
    world, prompts = World(subject, **SMALL), some(subject, 12)
    for steps, prompt in enumerate(prompts, 1):
        world.ask(f"{steps}", prompt)
        for _ in range(steps):
            if world.core.busy:
                world.step()
        if world.core.scheduler.running:
            world.retract(f"{steps}")
        world.run()
    assert world.core.scheduler.num_retracted > 3
    world.check()


def test_a_request_aborted_at_any_step_leaves_nothing_behind(subject):
    """Neither pages nor locks; requests that waited for it compute what it did not."""
    world, prompts = World(subject, **SMALL), some(subject, 12)
    for steps, prompt in enumerate(prompts, 1):
        world.ask(f"gone {steps}", prompt)
        world.ask(f"{steps}", prompt)
        for _ in range(steps):
            if world.core.busy:
                world.step()
        if f"gone {steps}" not in world.finish:
            world.abort(f"gone {steps}")
        world.run()
    world.check(None)
    assert all(len(world.tokens[f"{steps}"]) == NEW for steps in range(1, 13))
    world.flush()
    assert world.tree.num_pages == 0
    assert world.core.cache.allocator.num_free == world.core.cache.pool.num_pages


def test_a_pool_that_is_too_small_evicts_and_retracts(subject):
    world = World(subject, page_size=4, pool_tokens=4 * subject.needs, max_running=16)
    for i, prompt in enumerate(some(subject, 6) * 2):
        world.ask(f"{i}", prompt, 40)
    world.run()
    assert (world.core.scheduler.num_retracted > 0) == subject.grows
    assert world.core.state().labelled["evicted_tokens_by_cause"]["room"]
    world.check(40)


def test_whatever_is_accepted_comes_to_its_end(subject):
    if not subject.refuses:
        pytest.skip("the frontend refuses its requests")
    accepted, prompts = 0, some(subject, 2)
    pools = range(6, subject.needs, subject.needs // 10)
    for pages in pools:
        world = World(subject, page_size=4, pool_tokens=4 * pages)
        for i, prompt in enumerate(prompts):
            world.ask(f"{i}", prompt)
        accepted += len(world.asked)
        world.run()
        world.check()
        refused = world.finish.keys() - world.asked.keys()
        assert all(world.finish[rid].code == "context_length_exceeded" for rid in refused)
    assert 2 <= accepted < 2 * len(pools), "it depends on the size"


def test_in_the_least_pool_that_holds_it_a_request_ends(subject):
    """Retracted at any step; stored or not, when some of its pages are there."""
    if not subject.refuses:
        pytest.skip("the frontend refuses its requests")
    (prompt,), few, enough = some(subject, 1), 1, subject.needs
    while enough - few > 1:
        middle = (few + enough) // 2
        world = World(subject, page_size=4, pool_tokens=4 * middle)
        world.ask("a", prompt)
        few, enough = (few, middle) if world.asked else (middle, enough)
    world = World(subject, page_size=4, pool_tokens=4 * enough, step_tokens=24)
    for steps in range(1, 12):
        world.flush()
        for store in (True, False):
            rid = f"{steps} {store}"
            world.ask(rid, prompt, store=store)
            for _ in range(steps):
                if world.core.busy:
                    world.step()
            if world.core.scheduler.running:
                world.retract(rid)
            for _ in range(100):
                if world.core.busy:
                    world.step()
            assert rid in world.finish, "it waits for room that there never is"
            world.evict()
    world.check()


def test_what_was_evicted_in_part_is_computed_again(subject):
    (prompt,), world = some(subject, 1), World(subject, page_size=4)
    world.one("cold", prompt)
    world.one("warm", prompt)
    for i in range(6):
        assert all(world.evict() for _ in range(3)), "the answer's pages, and some of the prompt's"
        world.one(f"{i}", prompt)
        assert world.cached(f"{i}") < world.cached("warm")
    world.check()


def test_a_step_that_is_too_large_for_the_memory_is_run_in_parts(subject, monkeypatch):
    world, prompts = World(subject, page_size=4), some(subject, 3)
    run = world.core.executor.run

    def small(batch):
        if len(batch.tokens) > subject.most_rows:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return run(batch)

    monkeypatch.setattr(world.core.executor, "run", small)
    for i, prompt in enumerate(prompts):
        world.ask(f"{i}", prompt)
    world.run()
    world.check()
    assert world.core.state()["failed_requests"] == 0
    assert world.core.state()["failed_steps"] > 3


def test_a_failing_step_leaves_nothing_behind(subject, monkeypatch):
    """Whatever it computed: chunks, a look, own rows, or a token."""
    world, (prompt,) = World(subject, **SMALL), some(subject, 1)
    run = world.core.executor.run
    for steps in range(12):
        world.ask(f"{steps}", prompt)
        for _ in range(steps):
            if world.core.busy:
                world.step()
        with monkeypatch.context() as patched:
            patched.setattr(world.core.executor, "run", lambda batch: (_ for _ in ()).throw(RuntimeError("a secret")))
            if world.core.busy:
                world.step()
        assert world.core.executor.run == run
        world.run()
        assert "secret" not in (world.finish[f"{steps}"].message or "")
    assert [finish.type for finish in world.finish.values()].count("error") > 3
    world.one("after", prompt)
    world.check(None)
    assert len(world.tokens["after"]) == NEW


# -- whose KV it is ----------------------------------------------------------------------------------------------


def test_nothing_approximate_lies_under_exact_keys(subject):
    """An ordinary request with the same text answers as the model does, and its KV is not read as the strategy's."""
    prompts, plain = some(subject, 4), Prefix(subject.path)
    if subject.ordinary(prompts[0]) is None:
        pytest.skip("no ordinary request has such a text")
    for page_size in (1, 4):
        world = World(subject, page_size=page_size)
        for i, prompt in enumerate(prompts):
            text = subject.ordinary(prompt)
            if i % 2:
                world.one(f"before {i}", text, by=plain)
            world.one(f"{i}", prompt)
            world.ask(f"text {i}", text, by=plain)
            world.ask(f"turn {i}", [*text, *world.tokens[f"{i}"], 77], by=plain)
            world.run()
        world.check()


def test_a_request_that_may_not_be_stored_leaves_nothing(subject):
    """It reads what others have stored, all of it or a part."""
    world, (prompt, other) = World(subject, page_size=4), some(subject, 2)
    for i in range(2):
        world.one(f"private {i}", prompt, store=False)
        assert world.cached(f"private {i}") == 0
        assert world.tree.num_pages == 0
    world.one("stored", other)
    pages = world.tree.num_pages
    world.one("reads", other, store=False)
    assert world.cached("reads") > 0
    assert world.tree.num_pages == pages
    for i in range(4):
        assert world.evict()
        pages = world.tree.num_pages
        world.one(f"part {i}", other, store=False)
        assert world.tree.num_pages == pages, "what is there in part is not completed"
    world.check()


def test_tenants_and_salts_never_meet(subject):
    world, (prompt,) = World(subject, page_size=4), some(subject, 1)
    spaces = [Namespace("a"), Namespace("b"), Namespace("a", "salt"), Namespace("a")]
    costs = []
    for i, namespace in enumerate(spaces):
        before = world.row_layers
        world.one(f"{i}", prompt, namespace=namespace)
        costs.append(world.row_layers - before)
    world.check()
    assert [world.cached(f"{i}") > 0 for i in range(4)] == [False, False, False, True]
    assert costs[0] == costs[1] == costs[2] > costs[3]
    assert world.tenants() == {"a", "b"}


def test_an_erased_tenant_leaves_nothing(subject):
    world, (prompt, other) = World(subject, page_size=4), some(subject, 2)
    for tenant in ("a", "b"):
        world.one(tenant, prompt, namespace=Namespace(tenant))
    assert call(world.core, EraseTenant("a")).erased_tokens > 0
    assert world.tenants() == {"b"}
    world.one("again", prompt, namespace=TENANT)
    world.one("kept", prompt, namespace=Namespace("b"))
    assert (world.cached("again"), world.cached("kept") > 0) == (0, True)
    world.one("other", other, namespace=TENANT)
    world.check()


def test_a_tenant_over_its_quota_is_served(subject):
    world = World(subject, tenant_quota=2, page_size=4)
    for i, prompt in enumerate(some(subject, 3)):
        world.one(f"{i}", prompt, namespace=TENANT)
        assert world.tree.num_pages <= 2
    world.check()


def test_bad_numbers_leave_the_cache(subject):
    """The requests that read them at once end with an error, and the next one computes them anew."""
    world, (prompt,) = World(subject, page_size=4), some(subject, 1)
    world.one("a", prompt)
    for node in world.tree.nodes():
        for page in node.pages:
            world.core.executor.pool.v[:, page * 4] = torch.nan
    for rid in ("bad", "worse"):
        world.ask(rid, prompt)
    world.run()
    for rid in ("bad", "worse"):
        assert "finite" in world.finish[rid].message
        del world.asked[rid]
    world.one("again", prompt)
    world.check()


# -- what is told ------------------------------------------------------------------------------------------------


def test_operators_see_requests_in_all_their_steps(subject):
    world, (prompt,) = World(subject, **SMALL), some(subject, 1)
    world.ask("a", prompt)
    while world.core.busy:
        (shown,) = call(world.core, GetRequests(9))
        assert shown.prompt_tokens == subject.size(prompt)
        assert shown.output_tokens == len(world.tokens["a"])
        assert shown.computed_tokens >= 0
        assert shown.max_tokens == NEW
        world.step()
