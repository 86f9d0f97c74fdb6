"""Several ranks: a block holds the heads of all of them."""

from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.features.tiers.engines import NEW, draw, evict, loaded, open_core, options_of

PROMPTS = [draw(0, 150) + draw(i, 60) for i in range(2)]


def test_blocks_of_two_ranks_come_back_to_two(ids_dir, tmp_path):
    plain = Driver(make_core(ids_dir, prefix_cache=False, kernels="torch"))
    expected = plain.together(PROMPTS, max_new_tokens=NEW)
    core = open_core(ids_dir, tensor_parallel=2, threads=1, **options_of("disk", tmp_path))
    driver = Driver(core)
    assert driver.together(PROMPTS, max_new_tokens=NEW) == expected
    evict(core)
    assert driver.together(PROMPTS, max_new_tokens=NEW) == expected
    assert loaded(driver, "r2") == {"disk": 192}
    core.close()
    alone = Driver(open_core(ids_dir, **options_of("disk", tmp_path)))
    alone.together(PROMPTS, max_new_tokens=NEW)
    assert loaded(alone, "r0") == {}, "one rank cannot read what two have written"
    alone.core.close()
