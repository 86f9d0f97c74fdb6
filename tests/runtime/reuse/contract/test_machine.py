"""Random lives of requests of all strategies on one core: whatever happens, each answer is its strategy's own."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from radix import Namespace
from runtime.calls import EraseTenant
from tests.runtime.execution.attention.stand_in import options_of
from tests.runtime.reuse.contract.subject import Subject, World
from tests.runtime.reuse.contract.subjects import SUBJECTS

# Any of fusion draws all its methods.
CAUSAL = ("prefix", "reasoning", "modules", "fusion-a3")
TENANTS = [Namespace(), Namespace("a"), Namespace("a", "salt")]


class Lives(RuleBasedStateMachine):
    """Requests come and go, are retracted and aborted, steps fail, pages are evicted and tenants erased.

    The pool holds few prompts; prompts share parts, and come again. The engine checks its pages after each step.
    """

    subjects: list[Subject]
    options: dict
    seen = 0

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        steps=st.sampled_from([{"step_tokens": 7}, {"step_tokens": 64, "chunk_tokens": 16}, {"step_tokens": 256}]),
        pool_tokens=st.sampled_from([480, 4096]),
        max_running=st.sampled_from([2, 16]),
        overlap=st.sampled_from(["on", "off"]),
        schedule_policy=st.sampled_from(["fcfs", "lpm", "balanced"]),
    )
    def begin(self, page_size, steps, **options):
        fixed = {"page_size": max(page_size, self.options.get("page_size", 1)), **steps, **options}
        fixed = self.options | fixed
        self.world = World(self.subjects[0], **fixed)

    @rule(
        which=st.integers(0, 99),
        seed=st.integers(0, 20),
        count=st.sampled_from([1, 6, 40]),
        tenant=st.sampled_from(TENANTS),
        store=st.sampled_from([True, True, True, False]),
    )
    def ask(self, which, seed, count, tenant, store):
        subject = self.subjects[which % len(self.subjects)]
        prompt = subject.anything(seed)
        self.world.ask(f"r{len(self.world.tokens)}", prompt, count, by=subject, namespace=tenant, store=store)

    @precondition(lambda self: self.world.core.busy)
    @rule(count=st.sampled_from([1, 1, 3, 20]))
    def step(self, count):
        for _ in range(count):
            if self.world.core.busy:
                self.world.step()

    @precondition(lambda self: self.world.core.requests)
    @rule(which=st.integers(0, 99))
    def abort(self, which):
        alive = [*self.world.core.requests]
        self.world.abort(alive[which % len(alive)])

    @precondition(lambda self: self.world.core.scheduler.running and self.world.core._in_flight is None)
    @rule(which=st.integers(0, 99))
    def retract(self, which):
        running = self.world.core.scheduler.running
        self.world.retract(running[which % len(running)].rid)

    @precondition(lambda self: self.world.core.busy)
    @rule(error=st.sampled_from([torch.OutOfMemoryError, RuntimeError]))
    def fail(self, error):
        """In one step: without memory it is run in parts, and after another error its requests end."""
        executor = self.world.core.executor
        run = executor.run

        def fail(batch):
            if error is RuntimeError or len(batch.tokens) > 5:
                raise error("a secret")
            return run(batch)

        executor.run = fail
        try:
            self.world.step()
        finally:
            del executor.run

    @rule(what=st.sampled_from(["some pages", "some pages", "all", "a tenant"]))
    def take(self, what):
        """Take from the cache what no live request uses."""
        if what == "some pages":
            self.world.evict()
        elif what == "all":
            self.world.flush()
        else:
            self.world.begin(1, EraseTenant("a"))
            while self.world.answer() is None:  # no steps: their number would depend on a thread
                self.world.settle()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        self.world.run()
        self.world.check(None)
        for rid, finish in self.world.finish.items():
            assert finish.type in ("length", "abort", "error") or rid not in self.world.asked, finish
            assert "secret" not in (finish.message or "")
        self.world.flush()
        assert self.world.tree.num_pages == 0
        assert self.world.core.cache.allocator.num_free == self.world.core.cache.pool.num_pages
        self.world.core.close()


def live(subjects: list[Subject], examples: int, **options) -> None:
    machine = type("Machine", (Lives,), {"subjects": subjects, "options": options})
    found = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        phases=[Phase.generate],  # to shrink a life takes long
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=found)


@pytest.mark.parametrize("name", [name for name, subject in SUBJECTS.items() if not subject.is_causal])
def test_diffusion_lives(request, name):
    live([SUBJECTS[name].make(request.getfixturevalue)], 2 if name == "images" else 5)  # erasing ends a process


@pytest.mark.parametrize(("backend", "examples"), [("torch", 6), ("native", 12), ("flashinfer", 2)])
def test_causal_strategies_live_beside_each_other(tiny_dir, monkeypatch, backend, examples):
    live([SUBJECTS[name](tiny_dir) for name in CAUSAL], examples, **options_of(backend, monkeypatch))
