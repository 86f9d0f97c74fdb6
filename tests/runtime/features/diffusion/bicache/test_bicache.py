"""BiCache's exact limits, and every setting between them against a plain reading of section 5.2."""

import random
from array import array

import pytest
import torch

from radix import Namespace
from runtime.calls import EraseTenant, FlushCache, GetPins, GetTree, PinNode, RemovePin
from runtime.features.diffusion.bicache.encodings import encoding_of
from runtime.features.diffusion.published import read_spec
from runtime.reuse.build import build
from tests.runtime.engine.driver import call
from tests.runtime.features.diffusion.bicache.driver import DenoiseDriver, make_core
from tests.runtime.features.diffusion.bicache.models import EOS
from tests.runtime.features.diffusion.bicache.reference import PlainBiCache, dream, llada, naive

draw = random.Random(9)
PREFIX = [draw.randrange(EOS) for _ in range(48)]
PROMPTS = [PREFIX + [draw.randrange(EOS) for _ in range(n)] for n in (1, 9, 30)]
GEN = 24


def setting(plain):
    return {"gen_length": GEN, "steps": 12, "block_length": 8 if plain.is_llada else GEN, "prefix_tokens": len(PREFIX)}


def plainly(plain, model, prompt):
    if plain.is_llada:
        return llada(model, prompt, GEN, 12, 8)
    algorithm = "entropy" if plain.layer(0).get("self_attn.q_proj.bias") is not None else "maskgit_plus"
    return dream(model, prompt, GEN, 12, algorithm, 1e-3)


def options(plain):
    if plain.is_llada:
        return setting(plain)
    algorithm = "entropy" if plain.layer(0).get("self_attn.q_proj.bias") is not None else "maskgit_plus"
    return {**setting(plain), "algorithm": algorithm}


def test_depth_and_interval_are_the_papers(any_dir, any_plain):
    """Cold, then warm, each depth and interval; layers reused too many or too few give other tokens."""
    drivers = [DenoiseDriver(make_core(any_dir, kernels=kernels)) for kernels in ("torch", "auto")]
    prompts, seen = (PROMPTS[0], PROMPTS[2]), {}
    for depth in range(any_plain.layers + 1):
        for interval in (1, 5):
            wanted = [plainly(any_plain, PlainBiCache(any_plain, 48, depth, interval), prompt) for prompt in prompts]
            same = {**options(any_plain), "depth": depth, "refresh_interval": interval}
            for driver in drivers:
                assert [driver.one(prompt, **same) for prompt in prompts] == wanted, (depth, interval)
            seen[depth, interval] = tuple(map(tuple, wanted))
    no_cache = tuple(tuple(plainly(any_plain, any_plain, prompt)) for prompt in prompts)
    assert seen[0, 1] == no_cache, "d = 0, R = 1 is no cache"
    assert seen[1, 1] == no_cache, "the first layer's KV depends on nothing else"
    assert seen[any_plain.layers, 1] == tuple(tuple(plainly(any_plain, naive(any_plain, 48), p)) for p in prompts)
    assert len({seen[depth, 1] for depth in range(1, any_plain.layers + 1)}) == any_plain.layers
    assert seen[2, 1] != seen[2, 5]
    counters = [driver.core.totals()["encoded_prefixes"] for driver in drivers]
    assert counters == [1, 1], "one prefix, whatever the depth"


def test_without_a_table_reuse_is_exact(any_dir, any_plain):
    """The default of a server: cold and warm, declared and found; a request's own depth has the paper's interval."""
    driver = DenoiseDriver(make_core(any_dir))
    wanted = [plainly(any_plain, any_plain, prompt) for prompt in PROMPTS]
    assert [driver.one(prompt, **options(any_plain)) for prompt in PROMPTS] == wanted
    report = driver.report(driver.last())
    assert (report["cached_tokens"], report["shallow_depth"], report["refreshes"]) == (48, 1, 12)
    found = {name: value for name, value in options(any_plain).items() if name != "prefix_tokens"}
    assert driver.one(PROMPTS[1], **found) == wanted[1]
    assert driver.report(driver.last())["cached_tokens"] == 48
    driver.one(PROMPTS[1], **options(any_plain), depth=2)
    assert driver.report(driver.last())["refreshes"] == 1


def test_reuse_is_off_where_it_is_not_wanted(any_dir, any_plain):
    driver = DenoiseDriver(make_core(any_dir))
    wanted = plainly(any_plain, any_plain, PROMPTS[1])
    assert driver.one(PROMPTS[1], **options(any_plain), depth=4, reuse=False) == wanted
    assert driver.report(driver.last())["prefix_ratio"] == 0
    off = DenoiseDriver(make_core(any_dir, reuse="none"))
    assert off.one(PROMPTS[1], **options(any_plain), depth=4) == wanted
    assert driver.core.state()["pages_tree"] == off.core.state()["pages_tree"] == 0


@pytest.mark.parametrize(("kernels", "boundary_bytes"), [("torch", 0), ("auto", 1 << 28)])
def test_a_mixed_batch_says_what_each_says_alone(any_dir, any_plain, monkeypatch, kernels, boundary_bytes):
    """Different prefixes, depths, intervals, lengths and caches share every step; they come and go."""
    other = [draw.randrange(EOS) for _ in range(32)]
    cases = [
        (PROMPTS[0], {"prefix_tokens": 48, "depth": 2, "refresh_interval": 3}),
        (PROMPTS[1], {"prefix_tokens": 48, "depth": 3, "refresh_interval": 5}),
        (PROMPTS[2], {"prefix_tokens": 32, "depth": 2, "refresh_interval": 1, "gen_length": 8}),
        (other + PREFIX[:20], {"prefix_tokens": 40, "depth": 4, "gen_length": 32, "steps": 8}),
        (PROMPTS[1], {"prefix_tokens": 48, "depth": 0, "refresh_interval": 4}),
        (PROMPTS[2], {"prefix_tokens": 48, "depth": 3, "refresh_interval": 2, "cache": "dual", "block_length": 8}),
        ([*other, 3], {"reuse": False, "cache": "prefix", "block_length": 8, "algorithm": "low_confidence"}),
        (PROMPTS[1], {"prefix_tokens": 48, "depth": 3, "refresh_interval": 4, "cfg_scale": 0.7}),
        (PROMPTS[0], {"prefix_tokens": 48, "depth": 2, "sampling": {"temperature": 0.8, "seed": 4}}),
    ]
    cases = [(prompt, {"gen_length": 16, **case}) for prompt, case in cases]
    monkeypatch.setattr("runtime.features.diffusion.bicache.strategy._BOUNDARY_BYTES", boundary_bytes)
    alone = [DenoiseDriver(make_core(any_dir, kernels=kernels)).one(prompt, **case) for prompt, case in cases]
    for stagger in (0, 1):
        driver = DenoiseDriver(make_core(any_dir, kernels=kernels))
        for again in range(2):
            for i, (prompt, case) in enumerate(cases):
                driver.denoise(f"{again}-{i}", prompt, **case)
                for _ in range(stagger):
                    driver.step()
        driver.run()
        for again in range(2):
            assert [driver.tokens[f"{again}-{i}"] for i in range(len(cases))] == alone
        assert driver.core.totals()["encoded_prefixes"] == 3


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_guidance_is_lladas_with_and_without_reuse(any_dir, any_plain, kernels):
    driver = DenoiseDriver(make_core(any_dir, kernels=kernels))
    same = {"gen_length": 16, "steps": 8, "block_length": 8, "algorithm": "low_confidence", "cfg_scale": 1.5}
    wanted = llada(any_plain, PROMPTS[1], 16, 8, 8, cfg_scale=1.5)
    assert driver.one(PROMPTS[1], **same) == wanted != llada(any_plain, PROMPTS[1], 16, 8, 8)
    reused = llada(PlainBiCache(any_plain, 48, 3, 4), PROMPTS[1], 16, 8, 8, cfg_scale=1.5)
    assert driver.one(PROMPTS[1], **same, prefix_tokens=48, depth=3, refresh_interval=4) == reused


def pages_read(core, rid, layer):
    """Pages that the attention of a layer reads in a request's next step, and those that it writes."""
    request = core.requests[rid]
    work = request.lease.work(4096)
    spec = core.executor.spec
    batch = build(request.lease.rows(work), spec.num_layers, 16, spec.hidden_size, torch.device("cpu")).batch
    group = next(g for g in batch.groups if layer in g.layers)
    read = {int(page) for edge in group.attention.edges for page in group.attention.spans[edge.span].pages}
    rows = len(batch.tokens) if group.rows is None else len(group.rows)
    return read, {int(slot) // 16 for slot in group.kv_write if slot >= 0}, rows, len(batch.logits_rows)


@pytest.mark.parametrize("depth", range(1, 7))
def test_exactly_the_first_layers_read_the_trees_pages(deep_dir, depth):
    """At a refresh and between; the tree's pages are never written, and no logits are computed for prefix rows."""
    core = make_core(deep_dir)
    driver = DenoiseDriver(core)
    driver.one(PROMPTS[1], gen_length=16, prefix_tokens=48, depth=depth)
    driver.denoise("r", PROMPTS[1], gen_length=16, prefix_tokens=48, depth=depth, refresh_interval=3)
    tree = {page for node in core.cache.tree.nodes() for page in node.pages}
    assert len(tree) == 3
    core.scheduler._admit([], 256)
    for step in range(4):
        for layer in range(6):
            read, written, rows, wanted = pages_read(core, "r", layer)
            assert (tree <= read) if layer < depth else not (tree & read), (step, layer)
            assert not tree & written
            refreshing = step % 3 == 0 and depth < 6
            prefix_rows = 48 if refreshing and layer >= depth - 1 else 0
            assert rows == 9 + 16 + prefix_rows, (step, layer)
            own_prefix = set(core.requests["r"].sequence.pages[:3])
            assert bool(own_prefix & written) == (refreshing and layer >= depth)
            assert wanted <= 16
        driver.step()
    driver.run()


# -- on the tree ---------------------------------------------------------------------------------------------


def encoded(core):
    return sorted(node.meta.encoded_tokens for node in core.cache.tree.nodes())


def test_prefixes_of_two_lengths_share_no_page(deep_dir):
    core = make_core(deep_dir)
    driver = DenoiseDriver(core)
    tokens = {}
    for length in (48, 32, 48, 32):
        driver.denoise(str(len(tokens)), PROMPTS[1], gen_length=8, prefix_tokens=length, depth=4)
        driver.run()
        tokens[str(len(tokens))] = length
    reports = [driver.report(str(i)) for i in range(4)]
    assert [r["cached_tokens"] for r in reports] == [0, 0, 48, 32]
    assert [r["shallow_depth"] for r in reports] == [4] * 4
    assert encoded(core) == [32, 48]
    assert core.cache.tree.num_pages == 5
    same_start = PREFIX[:32] + PREFIX[:16][::-1]
    driver.one([*same_start, 1], gen_length=8, prefix_tokens=48, depth=4)
    assert encoded(core) == [32, 48, 48], "the same length and beginning, and another end"


def test_the_longest_encoded_prefix_is_discovered(deep_dir):
    core = make_core(deep_dir)
    driver = DenoiseDriver(core)
    assert driver.one(PROMPTS[2], gen_length=8) is not None
    assert encoded(core) == [], "nobody said what is shared"
    for length in (16, 48):
        driver.one(PROMPTS[0], gen_length=8, prefix_tokens=length)
    driver.one(PROMPTS[2], gen_length=8)
    assert driver.report(driver.last())["cached_tokens"] == 48
    driver.one(PREFIX[:40], gen_length=8)
    assert driver.report(driver.last())["cached_tokens"] == 16
    driver.one(PROMPTS[2], gen_length=8, namespace=Namespace("another"))
    assert driver.report(driver.last())["cached_tokens"] == 0, "tenants share nothing"
    driver.one(PROMPTS[2], gen_length=8, prefix_tokens=0)
    assert driver.report(driver.last())["cached_tokens"] == 0, "nothing is declared as shared"
    driver.flush()
    driver.one(PROMPTS[2], gen_length=8)
    assert driver.report(driver.last())["cached_tokens"] == 0


def test_a_prompt_that_is_its_prefix_shares_all_but_the_row_of_the_first_mask(any_dir):
    driver = DenoiseDriver(make_core(any_dir))
    driver.one(PREFIX, gen_length=8, prefix_tokens=48, depth=1)
    shift = read_spec(any_dir).logits_shift
    assert driver.report(driver.last())["encoded_tokens"] == 48 - 16 * shift


def test_too_large_to_share_is_served_without(deep_dir):
    core = make_core(deep_dir, pool_tokens=96)
    driver = DenoiseDriver(core)
    tokens = driver.one(PROMPTS[2], gen_length=16, prefix_tokens=48, depth=6)
    report = driver.report(driver.last())
    assert (report["prefix_ratio"], report["unshared"]) == (0, "no_room")
    assert tokens == DenoiseDriver(make_core(deep_dir)).one(PROMPTS[2], gen_length=16)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"reuse": False, "prefix_tokens": 48}, "off"),
        ({}, "no_prefix"),
        ({"prefix_tokens": 0}, "no_prefix"),
        ({"prefix_tokens": 15}, "too_short"),
        ({"prefix_tokens": 48, "depth": 0}, "no_layer"),
    ],
)
def test_an_answer_says_why_it_shares_no_prefix(deep_dir, fields, why):
    driver = DenoiseDriver(make_core(deep_dir))
    driver.one(PROMPTS[1], gen_length=4, **fields)
    assert driver.report(driver.last())["unshared"] == why
    given = fields | {"reuse": True, "prefix_tokens": 48, "depth": 1}
    driver.one(PROMPTS[1], gen_length=4, **given)
    assert "unshared" not in driver.report(driver.last())


def test_pins_and_quotas_see_encodings(deep_dir):
    core = make_core(deep_dir, pool_tokens=320)
    driver = DenoiseDriver(core)
    key = array("i", PREFIX).tobytes()
    assert driver.pin(PREFIX) is None, "it is encoded first"
    driver.run()
    (pin,) = driver.answer()
    assert pin.tokens == 48
    assert core.totals()["encoded_prefixes"] == 1
    assert core.totals()["denoise_steps"] == 0
    for i in range(8):
        shared = [i * 30 + j for j in range(32)]
        driver.one([*shared, 5], gen_length=8, prefix_tokens=32, depth=4)
    assert core.state()["evicted_tokens"] > 0
    namespace = encoding_of(key, Namespace())
    assert len(core.cache.tree.match(key, namespace).pages) == 3, "pinned"
    assert call(core, GetPins()).pinned_tokens == 48
    node = core.cache.tree.match(key[: 32 * 4], namespace).node
    again = call(core, PinNode(node.pages[0], 0))
    assert again.tokens == 48, "the node's own path, not an encoding of its own"
    assert core.cache.pins.pins[again.id].node.namespace == namespace
    assert call(core, RemovePin(again.id))
    assert call(core, RemovePin(pin.id))
    tenant = DenoiseDriver(make_core(deep_dir, tenant_quota=4, hold_time="900"))
    for i in range(4):
        tenant.one([*range(i, i + 40)], gen_length=8, prefix_tokens=32, depth=4, namespace=Namespace("t"))
        tenant.one([*range(i, i + 40)], gen_length=8, prefix_tokens=32, depth=4, namespace=Namespace("u"))
    assert tenant.core.state().labelled["evicted_tokens_by_cause"]["quota"] > 0
    assert tenant.core.cache.tree.num_pages == 8
    for i in range(4):
        tenant.one([*range(i, i + 40)], gen_length=8, prefix_tokens=32, depth=4, namespace=Namespace(salt="s"))
    assert tenant.core.cache.tree.quotas.pages(Namespace(salt="s")) == 4, "nobody is named: the salt is the tenant"
    assert tenant.core.cache.tree.num_pages == tenant.core.state()["pages_held"] == 12
    shown = call(tenant.core, GetTree(tenant="t")).nodes
    version = tenant.core.strategies.default.table.version
    meta = {"encoded_tokens": 32, "depth_table": version, "depths": {"0": 1}, "similarity": {}}
    assert [node.meta for node in shown] == [meta, meta]


def test_a_pin_of_what_is_being_encoded_waits_for_it(deep_dir):
    """For another pin, for a request, or for none, if that request is aborted and the cache flushed."""
    core = make_core(deep_dir)
    driver = DenoiseDriver(core)
    for first in ("pin", "request", "aborted"):
        driver.flush()
        if first == "pin":
            assert driver.pin(PREFIX, 2) is None
        else:
            driver.denoise(first, [*PREFIX, 1, 2], prefix_tokens=48, gen_length=8)
        assert driver.pin(PREFIX) is None
        if first == "aborted":
            driver.step()
            driver.abort(first)
            driver.flush()
        driver.run()
        for number in [1] + [2] * (first == "pin"):
            (pin,) = driver.answer(number)
            assert call(core, RemovePin(pin.id))


@pytest.mark.parametrize(
    ("store", "asked", "is_known"),
    [(True, None, True), (False, None, False), (True, FlushCache(), False), (True, EraseTenant(""), False)],
)
def test_boundary_states_are_kept_no_longer_than_the_kv(deep_dir, store, asked, is_known):
    core = make_core(deep_dir)
    DenoiseDriver(core).one(PROMPTS[1], gen_length=8, prefix_tokens=48, depth=4, store=store)
    if asked is not None:
        call(core, asked)
    assert bool(core.strategies.default.boundaries) == is_known
