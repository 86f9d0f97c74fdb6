"""DiffusionGemma against transformers' own `generate`, which draws from the same generator."""

import json
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

from runtime.config import make_config
from runtime.engine.core import EngineCore
from runtime.errors import InvalidRequest, ModelError
from runtime.features.diffusion.ask import DiffusionParams
from runtime.features.diffusion.noise import NoiseCanvas
from runtime.features.registry import open_preparers
from runtime.frontend.input_processor import InputProcessor
from runtime.frontend.output import Submission
from runtime.frontend.preparer import ServedModel
from runtime.models.implementation import context_of
from runtime.params import SamplingParams
from runtime.sampling.sampler import BadLogits
from tests.runtime.features.diffusion.bicache.driver import DenoiseDriver, make_core
from tests.runtime.features.diffusion.gemma import CANVAS, EOS, VOCAB, Published, save_gemma
from tests.runtime.frontend.listening import ids_of

# Some steps accept several positions, and some but one.
BOUND, STEPS = 1.0, 6
# Canvases end at different steps.
EARLY = {"stability_threshold": 0, "confidence_threshold": 1.2}
VARYING = {"full_attention": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    sampler = {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": BOUND}
    generation = {"max_denoising_steps": STEPS, "sampler_config": sampler, "t_max": 0.9}
    return save_gemma(tmp_path_factory.mktemp("gemma") / "gemma", generation)


@pytest.fixture(scope="module")
def published(path):
    return Published(path)


@pytest.fixture(scope="module")
def driver(path):
    return DenoiseDriver(make_core(path, page_size=16))


def text(length, seed=0):
    return random.Random(f"{length} {seed}").choices(range(3, 290), k=length)


def wanted(published, prompt, length, seed, **options):
    """The answer of transformers, with the fields that a test gives to both."""
    bound = EntropyBoundSamplerConfig(entropy_bound=BOUND)
    fields = {"max_denoising_steps": STEPS, "sampler_config": bound, "t_min": 0.4, "t_max": 0.9, **options}
    return published.generate(prompt, length, seed, **fields)


def drawn(seed, **sampling):
    return {"temperature": 1.0, "seed": seed, **sampling}


@pytest.mark.parametrize(("length", "page_size"), [(1, 1), (9, 16), (16, 16), (45, 1), (45, 16)])
def test_cold_and_warm_answers_are_those_of_transformers(path, published, length, page_size):
    """Of three canvases, the last of which is cut; the window is 9."""
    driver, prompt = DenoiseDriver(make_core(path, page_size=page_size)), text(length)
    expected = wanted(published, prompt, 2 * CANVAS + 5, seed=length)
    for cached in (0, length):
        assert driver.one(prompt, sampling=drawn(length), gen_length=2 * CANVAS + 5) == expected
        report = driver.report(driver.last())
        assert report == {"denoise_steps": 3 * STEPS, "cached_tokens": cached}


def test_a_canvas_ends_early(driver, published):
    """By stability and confidence, alone and together; each has its own number of steps."""
    counts = set()
    for i, fields in enumerate((EARLY, {**EARLY, "stability_threshold": 1, "confidence_threshold": 3.0})):
        for length in (5, 20):
            prompt = text(length, seed=20 + i)
            expected = wanted(published, prompt, 3 * CANVAS, seed=1, max_denoising_steps=12, **fields)
            answer = driver.one(prompt, sampling=drawn(1), gen_length=3 * CANVAS, steps=12, **fields)
            assert answer == expected
            counts.add(driver.report(driver.last())["denoise_steps"])
    assert len(counts) > 1
    assert min(counts) < 36


def test_schedules_and_bounds_of_a_request(driver, published):
    for fields in ({"t_min": 0.1, "t_max": 2.0}, {"entropy_bound": 8.0}, {"steps": 1}, {"steps": 3, "t_min": 0.0}):
        theirs = dict(fields)
        if "entropy_bound" in theirs:
            theirs = {"sampler_config": EntropyBoundSamplerConfig(**fields)}
        if "steps" in theirs:
            theirs["max_denoising_steps"] = theirs.pop("steps")
        expected = wanted(published, text(11), CANVAS + 1, seed=3, **theirs)
        assert driver.one(text(11), sampling=drawn(3), gen_length=CANVAS + 1, **fields) == expected


def test_an_end_of_sequence_ends_the_answer(driver, published):
    """Within a canvas; what the canvas has behind it is neither told nor kept."""
    prompt = text(14, seed=4)
    end = wanted(published, prompt, 2 * CANVAS, seed=4)[CANVAS + 4]
    expected = wanted(published, prompt, 4 * CANVAS, seed=4, eos_token_id=end, pad_token_id=0)
    answer = driver.one(prompt, sampling=drawn(4, stop_token_ids=[end]), gen_length=4 * CANVAS)
    assert answer == expected
    assert answer[-1] == end
    assert len(answer) < 2 * CANVAS
    finish = driver.events[driver.last()][-1].finish
    assert (finish.type, finish.matched) == ("stop", end)


def test_many_at_once_in_a_pool_that_is_too_small(path, published):
    """They share prefixes, are chunked, give way to each other amid a canvas, and evict what others left."""
    driver = DenoiseDriver(make_core(path, page_size=1, pool_tokens=128, step_tokens=32))
    prompts = [text(34, seed=5)[:shared] + text(40 - shared, seed=i) for i, shared in enumerate((0, 17, 34, 34, 25))]
    for i, prompt in enumerate(prompts):
        driver.denoise(f"r{i}", prompt, sampling=drawn(i), gen_length=25 + i)
    driver.run()
    for i, prompt in enumerate(prompts):
        assert driver.tokens[f"r{i}"] == wanted(published, prompt, 25 + i, seed=i)
    assert driver.core.scheduler.num_retracted
    assert sum(driver.core.cache.tree.stats.evicted.values())


def test_what_was_answered_is_reused_by_the_next_turn(driver, published):
    """By whole pages, but for the last canvas, which nothing has read."""
    prompt = text(20, seed=12)
    turn = prompt + driver.one(prompt, sampling=drawn(7), gen_length=3 * CANVAS) + [7, 8]
    assert driver.one(turn, sampling=drawn(8), gen_length=9) == wanted(published, turn, 9, seed=8)
    assert driver.report(driver.last())["cached_tokens"] == (20 + 2 * CANVAS) // 16 * 16


def test_streams_come_by_canvas(driver):
    answer = driver.one(text(9, seed=8), sampling=drawn(9), gen_length=2 * CANVAS + 3, stream_canvas=True)
    events = driver.events[driver.last()]
    assert [len(event.tokens) for event in events if event.tokens] == [CANVAS, CANVAS, 3]
    shown = [event.shown for event in events]
    assert [len(canvas) for canvas in shown] == sorted(len(canvas) for canvas in shown)
    assert shown[-1] == answer
    assert shown[0] != shown[1], "the likeliest tokens change"
    assert all(canvas[:CANVAS] == answer[:CANVAS] for canvas in shown[STEPS - 1 :])


def test_seeds(driver):
    """The same seed gives the same answer; greedy requests draw noise alone."""
    prompt, fields = text(12, seed=9), {"gen_length": CANVAS}
    one = driver.one(prompt, sampling=drawn(1), **fields)
    assert driver.one(prompt, sampling=drawn(2), **fields) != one
    assert driver.one(prompt, sampling=drawn(1), **fields) == one
    greedy = driver.one(prompt, sampling={"temperature": 0, "seed": 1}, **fields)
    assert driver.one(prompt, sampling={"temperature": 0.7, "top_k": 1, "seed": 1}, **fields) == greedy
    biased = driver.one(prompt, sampling=drawn(1, logit_bias={5: 100.0}), **fields)
    assert biased == [5] * CANVAS


def test_defaults_are_those_of_the_checkpoint(driver, published):
    info = driver.core.info.decoding
    assert (info.algorithm, info.block, info.mask_token_id) == ("entropy_bound", CANVAS, -1)
    filled = DiffusionParams().filled(info, SamplingParams())
    named = {name: getattr(filled, name) for name in ("entropy_bound", "steps", "t_min", "t_max")}
    assert named == {"entropy_bound": BOUND, "steps": STEPS, "t_min": 0.4, "t_max": 0.9}
    assert (filled.stability_threshold, filled.confidence_threshold) == (1, 0.005)
    assert (filled.gen_length, filled.block_length) == (128, CANVAS)


def test_half_precision(path, published):
    core = make_core(path, dtype="bfloat16")
    assert len(DenoiseDriver(core).one(text(30), sampling=drawn(1), gen_length=CANVAS + 1)) == CANVAS + 1


def test_no_page_is_left_behind_by_an_abort(driver):
    core = driver.core
    before = core.cache.num_available
    driver.denoise("gone", text(50, seed=10), gen_length=40)
    for _ in range(STEPS + 3):
        core.step()
    assert 0 < core.requests["gone"].num_output < 40
    core.abort("gone")
    assert core.cache.num_available == before
    core.cache.check([])


def test_a_pin_computes_a_prompt_alone(driver, published):
    prompt = text(37, seed=11)
    assert driver.pin(prompt) is None
    driver.run()
    assert len(driver.answer()) == 1
    assert driver.one(prompt, sampling=drawn(5), gen_length=5) == wanted(published, prompt, 5, seed=5)
    assert driver.report(driver.last())["cached_tokens"] == 32


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cfg_scale", 1.0),
        ("cache", "dual"),
        ("depth", 2),
        ("prefix_tokens", 4),
        ("threshold", 0.9),
        ("eps", 0.1),
        ("block_length", 4),
        ("algorithm", "entropy"),
        ("t_min", 0.95),
        ("max_post_edit_steps", 3),
        ("reuse", False),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(driver, field, value):
    info, sampling = driver.core.info.decoding, SamplingParams()
    with pytest.raises(InvalidRequest) as error:
        DiffusionParams(**{field: value}).filled(info, sampling).check(info, sampling, 4, 10)
    assert error.value.param == f"diffusion.{field}"


def test_a_canvas_that_cannot_be_a_whole_one_is_refused(path):
    """The last canvas is denoised as a whole, so that it needs room for all of it."""
    core = make_core(path, page_size=16, pool_tokens=64)
    driver = DenoiseDriver(core)
    assert len(driver.one(text(64 - CANVAS), gen_length=3)) == 3
    preparers = open_preparers(ServedModel(core.config, path, None, core.info))
    inputs, sampling = InputProcessor(core.info, None, core.config.scheduler, preparers), SamplingParams()
    sampling.max_new_tokens = 3
    assert ids_of(inputs.encode(Submission(text(64 - CANVAS), sampling))) == text(64 - CANVAS)
    with pytest.raises(InvalidRequest, match=f"{CANVAS} new ones may follow"):
        inputs.encode(Submission(text(65 - CANVAS), sampling))
    assert ids_of(inputs.encode(Submission(text(90), sampling, last_tokens=-1))) == text(90)[-(64 - CANVAS) :]
    sampling.max_new_tokens = None
    for most, prompt, length in ((None, 4, 5 * CANVAS), (None, 30, 2 * CANVAS), (7, 4, 7), (None, 52, CANVAS)):
        core.config.scheduler.max_output_tokens = most
        submission = inputs.encode(Submission(text(prompt), sampling))
        assert submission.decoding.gen_length == length, "no limit is set: what there is room for"
    with pytest.raises(InvalidRequest, match=f"{CANVAS} new ones may follow"):
        inputs.encode(Submission(text(53), sampling))


def test_logits_that_are_no_numbers_end_the_request(driver, path):
    info = driver.core.info.decoding
    params = DiffusionParams(gen_length=3).filled(info, SamplingParams())
    for sampling in (SamplingParams(), SamplingParams(temperature=0)):
        generator = torch.Generator().manual_seed(0)
        canvas = NoiseCanvas(
            np.array([1, 2]), params, sampling, generator, VOCAB, driver.core.executor.decoder.model.soften
        )
        logits = torch.randn(CANVAS, VOCAB)
        logits[3, 7] = torch.nan
        with pytest.raises(BadLogits):
            canvas.decide(*canvas.choose(logits))


def edited(path, tmp_path, name, **changes):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in path.iterdir():
        (copy / file.name).symlink_to(file)
    given = json.loads((path / name).read_text())
    given |= {key: given[key] | value if isinstance(value, dict) else value for key, value in changes.items()}
    (copy / name).unlink()
    (copy / name).write_text(json.dumps(given))
    return copy


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("config.json", {"tie_word_embeddings": False}, "weights of its decoder tied"),
        ("config.json", {"text_config": {"use_bidirectional_attention": "all"}}, "where its encoder is causal"),
        ("config.json", {"canvas_length": 0}, "canvas_length 0"),
        ("config.json", {"canvas_length": 256}, "leaves no room for a prompt in 256"),
        ("config.json", {"text_config": None}, "no text_config"),
        ("config.json", {"text_config": {"rope_parameters": VARYING}}, "rope scaling is 'dynamic'"),
        ("generation_config.json", {"t_max": -1.0}, "has a t_max that cannot be used"),
        ("generation_config.json", {"max_denoising_steps": 0}, "has a max_denoising_steps that cannot be used"),
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ("generation_config.json", {"t_min": 2.0}, "t_min is 2.0, more than its t_max, 0.9"),
        ("generation_config.json", {"sampler_config": {"entropy_bound": "much"}}, "entropy_bound that cannot be used"),
        ("generation_config.json", {"sampler_config": 3}, "sampler_config 3"),
        ("generation_config.json", {"sampler_config": {"_cls_name": "Other"}}, "supported is an EntropyBound"),
    ],
)
def test_checkpoints_that_cannot_be_served_are_refused(path, tmp_path, name, changes, words):
    with pytest.raises(ModelError, match=words):
        make_core(edited(path, tmp_path, name, **changes))


def test_an_encoder_with_weights_of_its_own_is_refused(path, tmp_path):
    """A file may hold both; transformers ties them where they are the same."""
    copy = edited(path, tmp_path, "generation_config.json", of_a_later_version=True)
    name = "layers.1.self_attn.o_proj.weight"
    tensors = load_file(path / "model.safetensors")
    for more, matches in ((0.0, True), (0.5, False)):
        both = tensors | {f"model.encoder.language_model.{name}": tensors[f"model.decoder.{name}"] + more}
        (copy / "model.safetensors").unlink()
        save_file(both, copy / "model.safetensors", metadata={"format": "pt"})
        with nullcontext() if matches else pytest.raises(ModelError, match=f"its own, e.g. {name}"):
            make_core(copy)


def test_options_that_have_no_meaning_are_refused(path):
    with pytest.raises(ModelError, match="--reuse a3: gemma is a diffusion model"):
        make_core(path, reuse="a3")
    with pytest.raises(ModelError, match="architecture is DiffusionGemmaForBlockDiffusion; supported are"):
        make_core(path, model_impl="ramet")


def test_the_context_is_that_of_the_text(path):
    assert context_of(make_config(model=str(path)).model, path) == 256
    core: EngineCore = make_core(path)
    assert (core.info.context_length, core.info.eos_token_ids) == (256, [EOS])
