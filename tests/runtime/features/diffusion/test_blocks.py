"""Block diffusion against plain loops: every block from all before it and itself, computed anew at every step."""

import json
import random

import pytest

from runtime.engine.core import EngineCore
from runtime.errors import InvalidRequest, ModelError
from runtime.features.diffusion.ask import DiffusionParams
from runtime.params import SamplingParams
from tests.runtime.features.diffusion.bicache.driver import DenoiseDriver, make_core
from tests.runtime.features.diffusion.bicache.models import CONTEXT, MASK, save_tiny
from tests.runtime.features.diffusion.plain_blocks import KINDS, SURE, PlainBlocks


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def path(kind, tmp_path_factory):
    return save_tiny(kind, tmp_path_factory.mktemp(kind) / kind)


@pytest.fixture(scope="module")
def plain(kind, path):
    return PlainBlocks(kind, path)


@pytest.fixture(scope="module")
def driver(path):
    return DenoiseDriver(make_core(path, page_size=16))


@pytest.fixture(scope="module")
def editor(tmp_path_factory):
    """A driver of LLaDA2, and the plain loops."""
    path = save_tiny("llada2", tmp_path_factory.mktemp("editor") / "llada2")
    return DenoiseDriver(make_core(path, page_size=16)), PlainBlocks("llada2", path)


def text(length, seed=0):
    return random.Random(f"{length} {seed}").choices(range(3, 290), k=length)


@pytest.mark.parametrize("length", [1, 3, 4, 15, 16, 17, 45])
def test_cold_and_warm_answers_equal_the_plain_loop(driver, plain, length):
    prompt = text(length)
    expected = plain.denoise(prompt, 22, threshold=SURE)
    for _ in range(2):
        assert driver.one(prompt, gen_length=22, threshold=SURE) == expected
    assert driver.report(driver.last())["cached_tokens"] >= (length - 1) // 16 * 16


def test_what_was_answered_is_reused_by_the_next_turn(driver, plain):
    prompt = text(20, seed=1)
    turn = prompt + driver.one(prompt, gen_length=28, threshold=SURE)
    turn += [7, 8]
    assert driver.one(turn, gen_length=9, threshold=SURE) == plain.denoise(turn, 9, threshold=SURE)
    assert driver.report(driver.last())["cached_tokens"] >= 32


def test_a_prompt_that_parts_within_a_page_is_copied_in_whole_blocks(driver, plain):
    prompt = text(30, seed=2)
    driver.one(prompt, gen_length=16, threshold=SURE)
    for same in (17, 22, 29):
        other = prompt[:same] + text(20, seed=same)
        assert driver.one(other, gen_length=6, threshold=SURE) == plain.denoise(other, 6, threshold=SURE)
        cached = driver.report(driver.last())["cached_tokens"]
        assert cached >= 16
        assert cached % plain.attended == 0


@pytest.mark.parametrize("options", [{"steps": 1}, {"steps": 2}, {"steps": 3, "block_length": 4}, {"steps": 4}])
def test_schedules_equal_the_plain_loop(driver, plain, options):
    prompt = text(18, seed=3)
    expected = plain.denoise(prompt, 13, steps=options["steps"], block=options.get("block_length"))
    assert driver.one(prompt, gen_length=13, **options) == expected


def test_defaults_are_those_of_the_authors(driver, plain, kind):
    filled = DiffusionParams().filled(driver.core.info.decoding, SamplingParams())
    _, block, _, threshold = KINDS[kind]
    assert (filled.block_length, filled.threshold) == (block, threshold)
    prompt = text(9, seed=4)
    assert driver.one(prompt, gen_length=8) == plain.denoise(prompt, 8, threshold=threshold)


@pytest.mark.parametrize(("edit_threshold", "most"), [(0.0, 0), (0.0, 16), (SURE, 1)])
def test_the_joint_threshold_edits_as_published(editor, edit_threshold, most):
    """Cold, warm, and with others in the step; the next turn reads what was edited."""
    driver, plain = editor
    settings = {"algorithm": "joint_threshold", "threshold": SURE, "edit_threshold": edit_threshold}
    prompt, num_edits = text(21, seed=8), 0
    for _ in range(2):
        expected, more = plain.denoise_jointly(prompt, 13, SURE, edit_threshold, most)
        for _ in range(2):
            driver.denoise(f"beside{len(driver.tokens)}", text(9, seed=9), gen_length=20, threshold=SURE)
            assert driver.one(prompt, gen_length=13, max_post_edit_steps=most, **settings) == expected
        prompt, num_edits = prompt + expected, num_edits + more
    assert num_edits
    assert driver.report(driver.last())["cached_tokens"] >= 32


def test_an_editable_token_is_not_streamed(editor):
    """An answer comes by whole blocks, and its canvas at every step."""
    driver, _ = editor
    settings = {"algorithm": "joint_threshold", "threshold": SURE, "edit_threshold": 0.0, "stream_canvas": True}
    answer = driver.one(text(20, seed=10), gen_length=19, **settings)
    events = driver.events[driver.last()]
    shown = [token for event in events for token in event.tokens]
    assert shown == answer
    sizes = [len(event.tokens) for event in events if event.tokens]
    assert sizes == [4, 8, 7]
    decided = [sum(token != MASK for token in event.shown) for event in events]
    assert decided == sorted(decided)
    assert len(set(decided)) > 3


def test_models_that_do_not_edit_refuse_to(driver, kind, plain):
    info, sampling = driver.core.info.decoding, SamplingParams()

    def refused(**fields):
        with pytest.raises(InvalidRequest) as error:
            DiffusionParams(**fields).filled(info, sampling).check(info, sampling, 4, 10)
        return error.value.param

    assert refused(edit_threshold=0.5) == "diffusion.edit_threshold"
    assert refused(max_post_edit_steps=3) == "diffusion.max_post_edit_steps"
    if kind != "llada2":
        assert refused(algorithm="joint_threshold") == "diffusion.algorithm"
        return
    for field, value in (("steps", 3), ("block_length", 4), ("factor", 0.5)):
        assert refused(algorithm="joint_threshold", **{field: value}) == f"diffusion.{field}"
    filled = DiffusionParams(algorithm="joint_threshold").filled(info, sampling)
    assert (filled.threshold, filled.edit_threshold, filled.max_post_edit_steps) == (0.7, 0.5, 16)


def test_a_pin_computes_a_prompt_alone(driver, plain):
    prompt = text(37, seed=7)
    assert driver.pin(prompt) is None
    driver.run()
    assert len(driver.answer()) == 1
    assert driver.one(prompt, gen_length=5, threshold=SURE) == plain.denoise(prompt, 5, threshold=SURE)
    assert driver.report(driver.last())["cached_tokens"] >= 32


@pytest.mark.parametrize(
    ("field", "value"), [("cfg_scale", 1.0), ("cache", "dual"), ("depth", 2), ("prefix_tokens", 4), ("block_length", 3)]
)
def test_what_has_no_meaning_is_refused_by_name(driver, field, value):
    info, sampling = driver.core.info.decoding, SamplingParams()
    with pytest.raises(InvalidRequest) as error:
        DiffusionParams(**{field: value}).filled(info, sampling).check(info, sampling, 4, 10)
    assert error.value.param == f"diffusion.{field}"


def test_pages_hold_whole_blocks(path, plain):
    with pytest.raises(ModelError, match=f"--page-size {plain.attended}"):
        make_core(path, page_size=plain.attended // 2)


def test_the_context_ends_with_a_whole_block(tmp_path, kind):
    path = save_tiny(kind, tmp_path / kind)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT - 1}))
    core: EngineCore = make_core(path, page_size=16)
    assert core.info.context_length == CONTEXT - KINDS[kind][0]
    assert len(DenoiseDriver(core).one(text(core.info.context_length - 5), gen_length=5)) == 5
