"""Greedy output of prompts with images is token-identical to transformers in float32, whatever the cache does."""

import json
import shutil
from array import array

import pytest

from radix import Namespace
from runtime.calls import AddPin, EraseTenant
from runtime.errors import PinRefused
from runtime.features.images.part import ImagesPart
from runtime.params import SamplingParams
from runtime.protocol import AddRequest
from tests.runtime.engine.driver import Driver, call, make_core
from tests.runtime.features.images.prompts import (
    NEW,
    OPTIONS,
    PROMPTS,
    B,
    answers,
    answers_of_a_batch,
    asked_of,
    check_evicted_and_retracted,
    encode,
    send,
    tiles,
)
from tests.runtime.features.images.seeing import CropsReference, LinesReference, Reference, save_seeing
from tests.runtime.features.tiers.engines import always


@pytest.fixture(scope="module", params=[("mistral3", LinesReference, 1), ("llava_onevision", CropsReference, 2)])
def sized(request, default_model_dir, tmp_path_factory):
    """A model for which the size of an image decides the number of its rows, and the number of an image's tiles."""
    kind, reference, count = request.param
    path = save_seeing(tmp_path_factory.mktemp("seeing") / kind, default_model_dir, kind)
    return asked_of(path, reference(path)), count


def test_cold_and_warm(seeing_dir, encoded, expected):
    driver = Driver(make_core(seeing_dir))
    assert answers(driver, encoded) == expected
    assert tiles(driver) == 5 + 3 + 5, "each tile is computed once, wherever it stands, and equal ones are one"
    assert answers(driver, encoded) == expected
    assert tiles(driver) == 13
    assert driver.cached("r5") >= len(encoded[0][0]) // 16 * 16 - 16


@pytest.mark.parametrize("options", OPTIONS[1:])
def test_in_chunks_that_end_within_an_image(seeing_dir, encoded, expected, options):
    driver = Driver(make_core(seeing_dir, **options))
    assert answers(driver, encoded) == expected
    assert answers(driver, encoded[:2]) == expected[:2]


def test_smolvlm(default_model_dir, tmp_path, encoded):
    path = save_seeing(tmp_path / "tiny-smolvlm", default_model_dir, "smolvlm")
    plain = Reference(path, "smolvlm")
    expected = [plain.greedy(text, images, NEW) for text, images in PROMPTS[:2]]
    assert answers(Driver(make_core(path, chunk_tokens=30)), encoded[:2]) == expected


@pytest.mark.parametrize("options", [{}, {"chunk_tokens": 7, "page_size": 1, "pool_tokens": 144}])
def test_images_of_any_size(sized, options):
    """Mistral 3 has other tokens between the rows of an image."""
    (path, prompts, expected), count = sized
    driver = Driver(make_core(path, **options))
    assert answers(driver, prompts) == expected
    assert tiles(driver) == 3 * count
    assert answers(driver, prompts) == expected
    assert tiles(driver) == 3 * count
    driver.flush()
    assert answers_of_a_batch(driver, prompts) == expected


def test_prompts_that_end_with_an_image(default_model_dir, tmp_path):
    """Their last row, of an image, is computed alone; later rows are of text."""
    path = save_seeing(tmp_path / "llava", default_model_dir, "llava_onevision")
    ends = [(f"{text}<image>", [B]) for text in ("a b c ", "one two three four five ", "a ")]
    _, prompts, expected = asked_of(path, CropsReference(path), ends)
    driver = Driver(make_core(path))
    assert answers(driver, prompts * 2) == expected * 2
    assert answers_of_a_batch(Driver(make_core(path, chunk_tokens=len(prompts[0][0]) - 1)), prompts) == expected


def test_random_weights_need_no_tensors(seeing_dir, tmp_path, encoded):
    path = tmp_path / "no-weights"
    shutil.copytree(seeing_dir, path, ignore=shutil.ignore_patterns("*.safetensors"))
    driver = Driver(make_core(path, random_weights=True))
    assert len(answers(driver, encoded[:1])[0]) == NEW


def test_restored_from_a_disk_after_a_restart(seeing_dir, tmp_path, encoded, expected):
    options = {"disk_cache": str(tmp_path / "kv"), "page_size": 4}
    driver = Driver(make_core(seeing_dir, **options))
    assert answers(driver, encoded[:2]) == expected[:2]
    driver.core.close()
    again = Driver(make_core(seeing_dir, **options))
    assert answers(again, encoded[:2]) == expected[:2]
    assert again.cached("r0") >= 64
    read = [(tokens, asked, again.cached(f"r{i}")) for i, (tokens, asked) in enumerate(encoded[:2])]
    behind = {(*tokens[run.start : run.stop],) for tokens, asked, end in read for run in asked.runs if run.stop > end}
    assert tiles(again) <= len(behind), "what the disk has needs no tower"


@pytest.mark.parametrize("file", ["preprocessor_config.json", "config.json"])
def test_a_disk_has_no_images_of_one_that_sees_otherwise(seeing_dir, seeing, sight, tmp_path, encoded, expected, file):
    """With the same weights. Prompts of text alone are still read from there."""
    options = {"disk_cache": str(tmp_path / "kv"), "page_size": 4}
    text = "Name three colours, and " + "one more, and " * 20
    prompts, said = [encoded[0], encode(sight, seeing, text, [])], seeing.greedy(text, [], NEW)
    driver = Driver(make_core(seeing_dir, **options))
    assert answers(driver, prompts) == [expected[0], said]
    driver.core.close()
    path = shutil.copytree(seeing_dir, tmp_path / "other")
    fields = json.loads((path / file).read_text())
    if file == "config.json":
        fields["vision_config"]["hidden_act"] = "relu"
    else:
        fields["image_std"] = [2.0, 0.1, 0.5]
    (path / file).write_text(json.dumps(fields))
    want = Reference(path).greedy(*PROMPTS[0], NEW)
    assert want != expected[0]
    again = Driver(make_core(path, **options))
    always(again.core)
    assert answers(again, prompts) == [want, said]
    assert again.cached("r0") < encoded[0][1].runs[0].start + 4
    assert again.cached("r1") >= 64


def test_a_batch_with_text(seeing_dir, encoded, expected):
    driver = Driver(make_core(seeing_dir, step_tokens=64))
    assert answers_of_a_batch(driver, encoded) == expected


def test_evicted_and_retracted(asked):
    check_evicted_and_retracted(asked)


def test_computed_again_without_the_tower_while_its_states_are_kept(seeing_dir, encoded, expected):
    driver = Driver(make_core(seeing_dir))
    assert answers(driver, encoded[:1]) == expected[:1]
    assert answers(driver, encoded[:1], store=False) == expected[:1]
    driver.flush()  # of the tree and of the states
    assert answers(driver, encoded[:1]) == expected[:1]
    assert tiles(driver) == 10


def test_tenants_and_salts_share_neither_tokens_nor_states(seeing_dir, encoded, expected):
    driver = Driver(make_core(seeing_dir))
    for tenant in ("a", "b", "a"):
        assert answers(driver, encoded[:1], namespace=Namespace(tenant), account=tenant) == expected[:1]
    assert tiles(driver) == 10
    assert answers(driver, encoded[:1], namespace=Namespace("a", "salt"), account="a") == expected[:1]
    assert tiles(driver) == 15, "nor do salts of a tenant"
    call(driver.core, EraseTenant("b"))
    assert answers(driver, encoded[:1], namespace=Namespace("b"), account="b") == expected[:1]
    assert tiles(driver) == 20, "nothing is left of an erased tenant"


def test_a_pin_computes_no_images(seeing_dir, encoded):
    with pytest.raises(PinRefused, match="has images"):
        call(make_core(seeing_dir), AddPin(array("i", encoded[0][0]).tobytes()))


def test_what_the_tree_has_needs_no_tower(seeing_dir, encoded, expected):
    """Not even where the states are gone: only the tiles behind the cached prefix are computed."""
    driver = Driver(make_core(seeing_dir, page_size=1))
    assert answers(driver, encoded[1:2]) == expected[1:2]
    before = tiles(driver)
    driver.core.part(ImagesPart)._states.erase()
    assert answers(driver, encoded[1:2]) == expected[1:2]
    assert tiles(driver) == before


def test_a_tower_that_fails_ends_its_request_alone(seeing_dir, encoded, expected, monkeypatch):
    driver = Driver(make_core(seeing_dir))
    tower = driver.core.part(ImagesPart)._states._tower
    monkeypatch.setattr(tower, "states", lambda tiles: 1 / 0)
    send(driver, "sees", encoded[0])
    send(driver, "reads", encoded[4])
    driver.run()
    assert driver.finish["sees"].type == "error"
    assert driver.tokens["reads"] == expected[4]
    monkeypatch.undo()
    assert answers(driver, encoded[:1]) == expected[:1]


def test_aborted_while_the_tower_computes(seeing_dir, encoded, expected):
    driver = Driver(make_core(seeing_dir))
    send(driver, "gone", encoded[0])
    driver.abort("gone")
    driver.run()
    assert driver.finish["gone"].type == "abort"
    assert answers(driver, encoded[:1]) == expected[:1]


def test_penalties_and_drafts_know_no_token_of_an_image(seeing_dir, encoded):
    driver = Driver(make_core(seeing_dir, drafts="auto", overlap="off", page_size=1))
    tokens, asked = encoded[0]
    driver.send("r", tokens, {"max_new_tokens": 40, "repetition_penalty": 1.1, "ignore_eos": True}, images=asked)
    driver.run()
    # The beginning of a prompt in the tree, which goes on with an image there.
    driver.add("s", tokens[:3], max_new_tokens=40)
    driver.run()
    assert len(driver.tokens["s"]) == 40
    assert all(token >= 0 for rid in "rs" for token in driver.tokens[rid])


def test_negative_tokens_without_images_are_refused(seeing_dir, encoded):
    driver = Driver(make_core(seeing_dir))
    events = driver.core.handle(AddRequest("r", array("i", encoded[0][0]).tobytes(), SamplingParams()))
    assert "out of range" in events[0].finish.message
