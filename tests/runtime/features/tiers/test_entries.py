"""Modules, documents and encoded prefixes come back from tiers, after a restart too; what is approximate never does."""

import random
from dataclasses import replace

import pytest

from radix import Namespace
from runtime.features.tiers.tiering import Tiering
from tests.runtime.features.chunks.asks import build
from tests.runtime.features.chunks.plain import Module, Prompt, draw_tokens
from tests.runtime.features.diffusion.bicache.driver import DenoiseDriver
from tests.runtime.features.diffusion.bicache.driver import make_core as make_denoiser
from tests.runtime.features.diffusion.bicache.models import EOS
from tests.runtime.features.tiers.conftest import held
from tests.runtime.features.tiers.engines import always, evict, loaded, options_of
from tests.runtime.reuse.contract.subject import World
from tests.runtime.reuse.contract.subjects import Fusion, Modules


def module_prompt() -> Prompt:
    """Two modules, the second one with a hole, and own tokens behind them: 100 and 40 rows, and 70."""
    luck = random.Random(1)
    first = Module("first", draw_tokens(luck, 100), list(range(100)))
    second = Module("second", draw_tokens(luck, 45), list(range(100, 145)), holes=list(range(20, 25)))
    return Prompt([first, second], draw_tokens(luck, 70), list(range(145, 215)))


@pytest.mark.parametrize("tier", ["host", "disk", "store"])
def test_modules(ids_dir, tmp_path, tier):
    options = {"page_size": 8, "pool_tokens": 1024, "kernels": "torch"}
    driver = World(Modules(ids_dir), **options, **options_of(tier, tmp_path))
    always(driver.core)
    prompt = module_prompt()
    driver.ask("cold", prompt)
    driver.run()
    assert loaded(driver, "cold") == {}
    evict(driver.core)
    if tier != "host":
        driver.core.close()
        tokens = driver.tokens
        driver = World(Modules(ids_dir), **options, **options_of(tier, tmp_path))
        driver.tokens |= tokens
        always(driver.core)
    encoded = driver.core.totals()["encoded_modules"]
    driver.ask("warm", prompt)
    driver.run()
    assert driver.tokens["warm"] == driver.tokens["cold"]
    # All rows of both modules, the last page of one filled up, and a whole block of own tokens.
    assert loaded(driver, "warm") == {tier: 100 + 40 + 64}
    assert driver.core.totals()["encoded_modules"] == encoded
    driver.core.close()


@pytest.mark.parametrize("method", ["legolink", "a3", "full"])
def test_documents(ids_dir, tmp_path, method):
    """Chunks and the prefix come back; rows that were computed for this combination are computed again."""
    luck = random.Random(2)
    ask = build(luck, [draw_tokens(luck, 70), draw_tokens(luck, 50)], 72, method=method)
    ask = replace(ask, chunk_tokens=512)
    options = {"page_size": 8, "pool_tokens": 1024, "kernels": "torch"}
    driver = World(Fusion(ids_dir), **options, **options_of("disk", tmp_path))
    always(driver.core)
    driver.ask("cold", ask)
    driver.run()
    evict(driver.core)
    blocks = driver.core.part(Tiering).tiers.worker.states()["disk"].counts["written"]
    assert blocks == 1 + 2 + 1 + (method == "full"), "the prefix, the documents, and full reuse's question"
    driver.core.close()
    other = World(Fusion(ids_dir), **options, **options_of("disk", tmp_path))
    always(other.core)
    other.ask("warm", ask)
    other.run()
    assert other.tokens["warm"] == driver.tokens["cold"]
    assert other.core.totals()["encoded_documents"] == 1, "the end of the prefix is no whole block"
    assert other.core.part(Tiering).tiers.loaded_tokens == {"disk": 64 + 72 + 56 + (8 if method == "full" else 0)}
    other.core.close()


PREFIX = [random.Random(f"prefix {i}").randrange(EOS) for i in range(88)]
SETTING = {"gen_length": 16, "steps": 8, "block_length": 8, "prefix_tokens": 88, "depth": 2, "refresh_interval": 4}


def open_denoiser(path, tmp_path, tier, **options):
    driver = DenoiseDriver(make_denoiser(path, page_size=8, kernels="torch", **options_of(tier, tmp_path), **options))
    always(driver.core)
    return driver


@pytest.mark.parametrize("tier", ["host", "disk", "store"])
def test_encoded_prefixes(any_dir, tmp_path, tier):
    driver = open_denoiser(any_dir, tmp_path, tier)
    prompts = [[*PREFIX, 5, 6], [*PREFIX, 7, 8, 9]]
    cold = [driver.one(prompt, **SETTING) for prompt in prompts]
    evict(driver.core)
    if tier != "host":
        driver.core.close()
        driver = open_denoiser(any_dir, tmp_path, tier)
    encoded = driver.core.totals()["encoded_prefixes"]
    assert [driver.one(prompt, **SETTING) for prompt in prompts] == cold
    assert driver.core.totals()["encoded_prefixes"] == encoded
    assert [event[0].admission.loaded_tokens for event in list(driver.events.values())[-2:]] == [{tier: 88}, {}]
    undeclared = {name: value for name, value in SETTING.items() if name != "prefix_tokens"}
    assert driver.one(prompts[0], **undeclared) == cold[0], "what was loaded is discovered"
    assert driver.report(driver.last())["cached_tokens"] == 88
    driver.core.close()


def test_a_pinned_encoding_comes_back_at_the_next_start(deep_dir, tmp_path):
    driver = open_denoiser(deep_dir, tmp_path, "disk")
    cold = driver.one([*PREFIX, 5, 6], **SETTING)
    (node,) = (node for node in driver.core.cache.tree.nodes() if node.meta is not None)
    driver.core.cache.pins.pin_node(node)
    driver.core.close()
    driver = open_denoiser(deep_dir, tmp_path, "disk")
    driver.run()
    (pin,) = driver.core.cache.pins.pins.values()
    assert (pin.tokens, pin.node.meta.describe()["encoded_tokens"]) == (88, 88)
    assert driver.one([*PREFIX, 5, 6], **SETTING) == cold
    assert driver.core.totals()["encoded_prefixes"] == 0
    driver.core.close()


def test_an_encoding_of_which_a_block_is_lost_is_encoded_again(deep_dir, tmp_path):
    driver = open_denoiser(deep_dir, tmp_path, "host")
    cold = driver.one([*PREFIX, 5, 6], **SETTING)
    evict(driver.core)
    host = driver.core.part(Tiering).tiers.worker._tiers["host"]._store
    keys = held(host)
    assert len(keys) == 2
    host.delete([min(keys, key=lambda key: len(host.get(key)))])
    assert driver.one([*PREFIX, 5, 6], **SETTING) == cold
    assert driver.core.totals()["encoded_prefixes"] == 2
    assert driver.core.part(Tiering).tiers.loaded_tokens == {}, "a part of it is of no use"
    driver.core.close()


def test_entries_that_must_not_be_stored_outlive_nothing(ids_dir, deep_dir, tmp_path):
    options = {"page_size": 8, "pool_tokens": 1024, "kernels": "torch"}
    driver, modules = World(Fusion(ids_dir), **options, **options_of("host", tmp_path)), Modules(ids_dir)
    luck = random.Random(3)
    ask = build(luck, [draw_tokens(luck, 70), draw_tokens(luck, 50)], 72, method="a3")
    driver.ask("kept", ask, namespace=Namespace("other"))
    driver.run()
    driver.ask("module", module_prompt(), by=modules, namespace=Namespace("other"))
    driver.run()
    evict(driver.core)
    for rid in ("one", "two"):
        driver.ask(rid, ask, store=False)
        driver.ask(f"{rid} module", module_prompt(), by=modules, store=False)
        driver.run()
        assert driver.tokens[rid] == driver.tokens["kept"]
        assert driver.tokens[f"{rid} module"] == driver.tokens["module"]
        assert driver.cached(rid) == driver.cached(f"{rid} module") == 0
    assert driver.core.cache.tree.num_pages == 0
    driver.core.close()
    denoiser = open_denoiser(deep_dir, tmp_path, "host")
    denoiser.denoise("one", [*PREFIX, 5, 6], **SETTING)
    denoiser.core.requests["one"].message.store = False
    denoiser.run()
    assert denoiser.core.cache.tree.num_pages == 0
    assert not denoiser.core.strategies.default.boundaries
    assert len(denoiser.core.strategies.default.encodings) == 0
    assert denoiser.one([*PREFIX, 5, 6], **SETTING) == denoiser.tokens["one"]
    denoiser.core.close()
