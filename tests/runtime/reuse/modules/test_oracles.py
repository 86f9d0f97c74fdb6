"""Prompt modules against prefix caching, full prefill, and transformers with positions and a block mask."""

from __future__ import annotations

import random

import pytest

from tests.runtime.execution.attention.stand_in import options_of
from tests.runtime.reuse.modules.plain import (
    ModuleDriver,
    Prompt,
    Reference,
    Schema,
    draw_prompt,
    draw_schema,
    draw_tokens,
)

OUTPUTS = (2, 24, 48)


@pytest.fixture(scope="module")
def reference(tiny_dir) -> Reference:
    return Reference(tiny_dir)


@pytest.mark.parametrize(
    ("backend", "page_size", "requests"),
    [("torch", 1, 50), ("torch", 16, 50), ("native", 1, 50), ("native", 16, 50), ("flashinfer", 16, 20)],
)
def test_random_lives_give_the_tokens_of_transformers(tiny_dir, reference, monkeypatch, backend, page_size, requests):
    """Chunks, batches with ordinary requests, a pool that is too small, aborts, flushes and a step ahead."""
    draw = random.Random(f"{backend} {page_size}")
    compared = aborted = evicted = retracted = 0
    for life in range(2):
        options = {
            "page_size": page_size,
            "pool_tokens": [320, draw.choice([400, 4096])][life],
            "step_tokens": [draw.choice([64, 256]), 7][life],
            "chunk_tokens": draw.choice([3, 16, None]),
            "max_running": [16, 3][life],
            "overlap": draw.choice(["on", "off"]),
            "schedule_policy": draw.choice(["fcfs", "lpm", "dfs", "balanced"]),
            **options_of(backend, monkeypatch),
        }
        driver = ModuleDriver(tiny_dir, **options)
        schemas = [draw_schema(draw, str(s)) for s in range(3)]
        gone = live(driver, draw, schemas, requests // 2)
        aborted += len(gone)
        for rid, prompt in driver.prompts.items():
            got = driver.tokens[rid]
            assert got == reference.best(prompt, got), (life, rid, options)
            assert rid in gone or len(got) == driver.wanted[rid]
            compared += len(got)
        assert driver.core.counters["encoded_modules"] > 0
        state = driver.core.admin.state()
        evicted += state["evicted_tokens_by_cause"]["room"]
        retracted += state["retracted_requests"]
    assert compared > 8 * requests
    assert aborted
    assert evicted
    assert retracted or backend == "flashinfer"


def live(driver: ModuleDriver, draw: random.Random, schemas: list[Schema], count: int) -> set[str]:
    """Run random requests; returns those that were aborted."""
    aborted: set[str] = set()

    def between(step: int) -> None:
        alive = [rid for rid in driver.tokens if rid not in driver.finish]
        if alive and draw.random() < 0.02:
            rid = draw.choice(alive)
            aborted.add(rid)
            driver.abort(rid)
        if draw.random() < 0.02:
            driver.flush()
        if len(driver.tokens) < count and draw.random() < 0.5:
            add()

    def add() -> None:
        rid = f"r{len(driver.tokens)}"
        prompt = draw_prompt(draw, draw.choice(schemas))
        driver.wanted[rid] = draw.choice(OUTPUTS)
        if draw.random() < 0.2:
            tokens = prompt.tokens + draw_tokens(draw, 9)
            driver.prompts[rid] = Prompt([], tokens, list(range(len(tokens))))
            driver.add(rid, tokens, max_new_tokens=driver.wanted[rid])
        else:
            driver.ask(rid, prompt, driver.wanted[rid])

    for _ in range(6):
        add()
    driver.run(between)
    while len(driver.tokens) < count:
        add()
    driver.run(between)
    return aborted
