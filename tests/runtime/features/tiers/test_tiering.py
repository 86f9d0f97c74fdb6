"""Pins and prefixes that a second start takes over, and operators' calls on tiers."""

from array import array

import pytest
import torch

from radix import Namespace
from runtime.calls import AddPin, EraseTenant, FlushCache, GetOutline, GetPins, GetTree
from runtime.features.tiers.tiering import Tiering
from runtime.features.tiers.tiers import Tiers
from tests.runtime.engine.driver import Driver, call
from tests.runtime.features.tiers.engines import NEW, draw, evict, loaded, open_core, options_of

PROMPTS = [draw(0, 150) + draw(i, 60) for i in range(3)]


def pin(core, tokens, **options):
    call(core, AddPin(array("i", tokens).tobytes(), **options))


def test_pins_come_back_by_themselves(ids_dir, tmp_path):
    """With its name and the rest of its time; other prefixes are loaded when they are asked for."""
    first = open_core(ids_dir, pool_tokens=2048, pin_budget=0.5, **options_of("disk", tmp_path))
    driver = Driver(first)
    pin(first, PROMPTS[0][:128], name="system", ttl_s=1000)
    pin(first, draw(8, 64), ttl_s=1e-3)
    tokens = driver.together([PROMPTS[1], PROMPTS[1]], max_new_tokens=NEW)
    first.close()
    second = open_core(ids_dir, pool_tokens=2048, pin_budget=0.5, **options_of("disk", tmp_path))
    assert second.busy
    again = Driver(second)
    again.run()
    (pinned,) = call(second, GetPins()).pins
    assert pinned.name == "system"
    assert pinned.tokens == 128
    assert 900 < pinned.expires_in_s <= 1000
    assert again.together([PROMPTS[1]], max_new_tokens=NEW) == tokens[:1]
    assert again.cached("r0") == 192
    assert loaded(again, "r0") == {"disk": 64}, "the pin has brought the common beginning"
    second.close()


def test_a_pin_whose_blocks_are_lost_is_computed_again(ids_dir, tmp_path):
    first = open_core(ids_dir, **options_of("disk", tmp_path))
    pin(first, PROMPTS[0][:128], name="system")
    first.close()
    for file in (tmp_path / "disk").rglob("*.kv"):
        file.unlink()
    second = open_core(ids_dir, **options_of("disk", tmp_path))
    Driver(second).run()
    assert [one.name for one in call(second, GetPins()).pins] == ["system"]
    second.close()


def test_a_damaged_note_is_none(ids_dir, tmp_path):
    first = open_core(ids_dir, **options_of("disk", tmp_path))
    pin(first, PROMPTS[0][:128])
    first.close()
    (note,) = (tmp_path / "disk").glob("pins-*")
    assert note.stat().st_mode & 0o777 == 0o600
    data = bytearray(note.read_bytes())
    for at in (0, len(data) // 2, len(data) - 1):
        note.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        second = open_core(ids_dir, **options_of("disk", tmp_path))
        Driver(second).run()
        assert call(second, GetPins()).pins == []
        second.part(Tiering)._resume = None
        second.close()


def test_a_tenant_is_erased_from_every_tier(ids_dir, tmp_path):
    options = options_of("host", tmp_path) | options_of("disk", tmp_path) | options_of("store", tmp_path)
    core = open_core(ids_dir, **options)
    driver, spaces = Driver(core), (Namespace("a"), Namespace("a", "salt"), Namespace("b"))
    driver.pin(PROMPTS[1][:128], namespace=Namespace("a"))
    for space in spaces:
        driver.together([PROMPTS[0]], max_new_tokens=NEW, namespace=space)
    evict(core)
    core.part(Tiering).note()
    other_model = tmp_path / "disk" / "pins-other"
    other_model.write_bytes(b"what another model noted")
    done = call(core, EraseTenant("a"))
    assert not other_model.exists()
    assert done.erased_tokens == 128
    assert done.erased_blocks == {"host": 6, "disk": 6, "store": 6}
    assert call(core, GetPins()).pins == []
    assert {pin.namespace.tenant for pin in core.part(Tiering)._resume.read()} <= {"b"}
    for i, space in enumerate(spaces):
        driver.add(f"again {i}", PROMPTS[0], max_new_tokens=NEW, namespace=space)
        driver.run()
        assert bool(loaded(driver, f"again {i}")) == (space.tenant == "b")
    core.close()


def test_a_load_under_way_brings_back_nothing_of_an_erased_tenant(ids_dir, tmp_path):
    core = open_core(ids_dir, **options_of("host", tmp_path))
    driver = Driver(core)
    for tenant in "ab":
        driver.together([PROMPTS[0]], max_new_tokens=NEW, namespace=Namespace(tenant))
    evict(core)
    for tenant in "ab":
        driver.add(tenant, PROMPTS[0], max_new_tokens=NEW, namespace=Namespace(tenant))
    for load in core.part(Tiering).tiers.loads:
        assert load.parts[0].loading.result(), "it is read, and not yet in the pool"
    driver.begin(1, EraseTenant("a"))
    driver.run()
    assert [loaded(driver, tenant) for tenant in "ab"] == [{}, {"host": 192}]
    core.close()


def test_public_pages_that_are_loaded_count_for_who_asked_for_them(ids_dir, tmp_path):
    core = open_core(ids_dir, tenant_quota=99, **options_of("host", tmp_path))
    driver, pages = Driver(core), core.cache.tree.quotas.pages
    for account in "ab":
        driver.add(account, PROMPTS[0], max_new_tokens=NEW, namespace=Namespace("public"), account=account)
        driver.run()
        assert [pages(Namespace(name)) for name in (account, "public")] == [core.cache.tree.num_pages, 0]
        evict(core)
    assert loaded(driver, "b") == {"host": 192}
    core.close()


def test_a_flush_reaches_tiers_when_asked(ids_dir, tmp_path):
    core = open_core(ids_dir, **options_of("host", tmp_path))
    driver = Driver(core)
    driver.together(PROMPTS[:1], max_new_tokens=NEW)
    evict(core)
    assert driver.flush().erased_blocks is None
    driver.together(PROMPTS[:1], max_new_tokens=NEW)
    assert loaded(driver, "r1") == {"host": 192}
    assert call(core, FlushCache(tiers=True)).erased_blocks == {"host": 3}
    driver.together(PROMPTS[:1], max_new_tokens=NEW)
    assert loaded(driver, "r2") == {}
    driver.together(PROMPTS[:1], max_new_tokens=NEW)  # the second use, which writes them again
    core.part(Tiering).tiers.worker.drain()
    driver.flush()
    driver.together(PROMPTS[:1], max_new_tokens=NEW)
    assert loaded(driver, "r4") == {"host": 192}
    core.close()


def test_the_tree_says_which_tiers_hold_a_node(ids_dir, tmp_path):
    def places():
        found = call(core, GetTree())
        return [found.tiers[node.id] for node in found.nodes]

    core = open_core(ids_dir, **options_of("host", tmp_path), **options_of("disk", tmp_path))
    driver = Driver(core)
    driver.together(PROMPTS[:1], max_new_tokens=NEW)
    assert places() == [[]]
    driver.together(PROMPTS[:1], max_new_tokens=NEW)
    core.part(Tiering).tiers.worker.drain()
    assert places()[0] == ["host", "disk"], "what is used twice is written"
    shown = call(core, GetOutline(10, 0))
    assert [shown.tiers[block.id] for block in shown.blocks[:2]] == [[], ["host", "disk"]], "a root has none"
    driver.flush()
    assert core.part(Tiering).tiers.keys == {}
    driver.together(PROMPTS[:1], max_new_tokens=NEW)
    assert places()[0] == ["host", "disk"], "it has come from there"
    call(core, FlushCache(tiers=True))
    for _ in range(2):
        driver.together(PROMPTS[:1], max_new_tokens=NEW)
    core.part(Tiering).tiers.worker.drain()
    assert places()[0] == ["host", "disk"], "what was erased and is used twice is written again"
    core.close()


def test_writing_the_tree_and_closing_have_one_limit(ids_dir, tmp_path, monkeypatch):
    core, limits, close = open_core(ids_dir, **options_of("disk", tmp_path)), [], Tiers.close
    monkeypatch.setattr(Tiers, "save_all", lambda tiers, until: limits.append(until))
    monkeypatch.setattr(Tiers, "close", lambda tiers, until: limits.append(until) or close(tiers, until))
    core.close()
    assert len(limits) == 2
    assert len({*limits}) == 1


def test_kv_that_is_distrusted_leaves_the_tiers(ids_dir, tmp_path):
    core = open_core(ids_dir, **options_of("host", tmp_path))
    driver = Driver(core)
    driver.together(PROMPTS[:1], max_new_tokens=NEW)
    evict(core)
    run, done = core.executor.run, []

    def bad(batch):
        return torch.full_like(run(batch), torch.nan) if not done else run(batch)

    core.executor.run = bad
    driver.add("bad", PROMPTS[0], max_new_tokens=NEW)
    driver.run()
    assert driver.finish["bad"].type == "error"
    assert core.part(Tiering).tiers.loaded_tokens == {"host": 192}
    done.append(True)
    core.part(Tiering).tiers.worker.drain()
    driver.add("good", PROMPTS[0], max_new_tokens=NEW)
    driver.run()
    assert loaded(driver, "good") == {}
    assert driver.tokens["good"] == driver.tokens["r0"]
    core.close()


@pytest.mark.parametrize("space", [10.0, 3e-5])
def test_the_end_writes_what_was_used_once_within_the_disks_space(ids_dir, tmp_path, caplog, space):
    """The most used first; the log has how much the disk holds, and why not all."""
    options = options_of("disk", tmp_path) | {"disk_space": space}
    first = open_core(ids_dir, pool_tokens=2048, **options)
    driver = Driver(first)
    for prompt in PROMPTS:
        driver.together([prompt], max_new_tokens=NEW)
    with caplog.at_level("INFO", "ramet.engine"):
        first.close()
    told = [record.getMessage() for record in caplog.records if "the disk holds" in record.getMessage()][-1]
    second = open_core(ids_dir, pool_tokens=2048, **options)
    again = Driver(second)
    again.together([PROMPTS[0]], max_new_tokens=NEW)
    assert ("no space is left" in told) == (space < 1)
    assert again.cached("r0") == (192 if space > 1 else 64)
    second.close()
