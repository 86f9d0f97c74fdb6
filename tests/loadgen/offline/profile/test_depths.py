"""The profile of depths against plain readings of the checkpoint, and the tables that it writes."""

import json
import random

import pytest
import torch
import torch.nn.functional as F

from loadgen.offline.profile.depths import Profiler, open_results, paper_depth
from loadgen.offline.profile.probe import Probe
from loadgen.offline.profile.samples import Sample, Samples
from loadgen.offline.profile.settings import DepthSettings
from runtime.config import make_config
from runtime.errors import ModelError
from runtime.execution.building import build_executor
from runtime.features.diffusion.published import read_spec
from server.cli import main
from tests.runtime.features.diffusion.bicache.driver import DenoiseDriver, make_core
from tests.runtime.features.diffusion.bicache.models import EOS, MASK, save_tiny
from tests.runtime.features.diffusion.bicache.reference import PlainBiCache

draw = random.Random(11)
SAMPLE = Sample([draw.randrange(EOS) for _ in range(37)], [draw.randrange(EOS) for _ in range(9)], 6)


def make_probe(path, length=64, **options):
    config = make_config(model=str(path), dtype="float32", device="cpu", page_size=1, pool_tokens=4 * length, **options)
    return Probe(build_executor(config, path), read_spec(path))


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_similarity_is_equation_3(any_dir, any_plain, kernels):
    tokens = SAMPLE.prefix + SAMPLE.prompt + [MASK] * SAMPLE.gen_length
    alone, full = any_plain.hidden(SAMPLE.prefix)[1], any_plain.hidden(tokens)[1]
    flat, per_token = [], []
    for (k, v), (k_full, v_full) in zip(alone, full, strict=True):
        a = torch.cat((k.flatten(1), v.flatten(1)), dim=1)
        b = torch.cat((k_full[:37].flatten(1), v_full[:37].flatten(1)), dim=1)
        flat.append(float(F.cosine_similarity(a.flatten(), b.flatten(), dim=0)))
        per_token.append(float(F.cosine_similarity(a, b, dim=1).mean()))
    probe = make_probe(any_dir, kernels=kernels)
    assert probe.similarity(SAMPLE) == (pytest.approx(flat, abs=1e-4), pytest.approx(per_token, abs=1e-4))
    assert flat[0] == pytest.approx(1)
    assert min(flat) < 0.99


def test_divergence_is_the_outputs(any_dir, any_plain):
    tokens = SAMPLE.prefix + SAMPLE.prompt + [MASK] * SAMPLE.gen_length

    def distributions(model):
        return model.logits(tokens)[-SAMPLE.gen_length :].clamp_min(-1e4).log_softmax(-1)

    without = distributions(any_plain)
    probe = make_probe(any_dir)
    for depth in (1, 2, 4):
        with_reuse = distributions(PlainBiCache(any_plain, 37, depth, 1))
        expected = float((without.exp() * (without - with_reuse)).sum(-1).mean())
        assert probe.divergence(SAMPLE, depth, 1) == pytest.approx(expected, rel=1e-2, abs=1e-5)
    assert probe.divergence(SAMPLE, 1, 3) == pytest.approx(0, abs=1e-5), "the first layer's KV depends on nothing"
    assert probe.divergence(SAMPLE, 4, 1) > 1e-3


def test_the_papers_rule():
    high, low = [1.0, 0.98, 0.99, 0.5, 0.99], [1.0, 0.98, 0.99, 0.99, 0.99]
    assert paper_depth([high], 0.97) == 3, "layers after the first that falls short do not count"
    assert paper_depth([high, low], 0.97) == 4
    assert paper_depth([high, high, low], 0.97) == 3, "3.67, rounded down"
    assert paper_depth([[0.9999, 0.1]], 1.0) == 1


def test_samples_have_the_ratio_and_repeat():
    samples = Samples(lambda text: list(text.encode()), "", [], 200, 32, seed=3)
    for ratio in (1, 5, 50, 90, 99):
        one = samples.sample(ratio, 7)
        assert one.length == 200
        assert len(one.prefix) == min(2 * ratio, 198)
        assert 1 <= one.gen_length <= 32
        assert one == Samples(lambda text: list(text.encode()), "", [], 200, 32, seed=3).sample(ratio, 7)
        assert one.prefix == samples.sample(99, 0).prefix[: len(one.prefix)]
    assert samples.sample(50, 1).prompt != samples.sample(50, 2).prompt
    given = Samples(lambda text: list(text.encode()), "Be brief.", ["Why?"], 200, 32, seed=3).sample(50, 0)
    assert bytes(given.prefix).startswith(b"Be brief.")
    assert set(bytes(given.prompt).split()) <= {b"Why?", b"Why", b"Wh", b"W"}


class Interrupted(Exception):
    pass


def test_an_interrupted_profile_goes_on(deep_dir, tmp_path):
    settings = DepthSettings(ratios=[50, 90], samples=3, length=64, gen_length=8, kl_samples=2, kl_bound=0.01)
    samples = Samples(lambda text: [byte % EOS for byte in text.encode()], "", [], 64, 8, 0)
    probe = make_probe(deep_dir)

    def run(path, fail_after=None):
        count = 0
        similarity = type(probe).similarity

        def counted(sample):
            nonlocal count
            count += 1
            if count == fail_after:
                raise Interrupted
            return similarity(probe, sample)

        probe.similarity = counted
        return Profiler(probe, samples, settings, open_results(path, {"settings": 1}, 0)).run(), count

    whole, count = run(tmp_path / "whole")
    assert count == 6
    with pytest.raises(Interrupted):
        run(tmp_path / "parts", fail_after=5)
    with (tmp_path / "parts").open("a") as file:
        file.write('{"cell": {"ratio": 50}, "repeat": 2, "fig')  # cut off in the middle of a write
    again, count = run(tmp_path / "parts")
    assert count == 2
    assert again == whole
    with pytest.raises(ModelError, match=r"other options.*remove it"):
        open_results(tmp_path / "parts", {"settings": 2}, 0)
    assert all(whole["depths"][r] <= whole["depths_cosine"][r] for r in (0, 50, 90))
    assert whole["by_cosine"]["all tokens"] == {
        "depths": {r: whole["depths_cosine"][r] for r in (50, 90)},
        "similarity": whole["similarity"],
    }
    other = settings.model_copy(update={"per_token": True})
    by_token = Profiler(probe, samples, other, open_results(tmp_path / "parts", {"settings": 1}, 0)).run()
    assert by_token["by_cosine"] == whole["by_cosine"]
    assert by_token["similarity"] == whole["by_cosine"]["token by token"]["similarity"] != whole["similarity"]
    for ratio, by_depth in whole["divergence"].items():
        assert by_depth.get(whole["depths"][ratio], 0) <= 0.01
        assert all(value > 0.01 for depth, value in by_depth.items() if depth > whole["depths"][ratio])


def test_the_command_writes_a_table_that_the_engine_takes(default_model_dir, tmp_path, capsys):
    path = save_tiny("llada", tmp_path / "tiny", tokenizer_from=default_model_dir)
    command = ["profile", "--model", str(path), "--out", str(tmp_path / "t.json"), "--ratios", "40,80"]
    command += ["--plot", str(tmp_path / "t.png")]
    assert main([*command, "--length", "80", "--samples", "2", "--rule", "cosine", "--threshold", "0.5"]) == 0
    assert "cosine of all tokens  token by token  table" in capsys.readouterr().out
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "t.json.partial").exists()
    table = json.loads((tmp_path / "t.json").read_text())
    assert table["settings"]["threshold"] == 0.5
    assert len(table["similarity"]["40"]) == 4
    core = make_core(path, depth_table=tmp_path / "t.json")
    driver = DenoiseDriver(core)
    driver.one(list(range(100, 164)), gen_length=8, prefix_tokens=64)
    assert driver.report(driver.last())["shallow_depth"] == table["depths"]["80"]
    node = next(core.cache.tree.nodes())
    shown = node.meta.describe()
    assert shown["depth_table"] == core.strategies.default.table.version
    assert shown["depths"] == table["depths"]
    last = max(table["depths"]["80"], 1) - 1
    assert shown["similarity"]["80"] == pytest.approx(table["similarity"]["80"][last], abs=1e-4)
    (tmp_path / "t.json").rename(path / "depth_table.json")
    assert make_core(path).strategies.default.table.name == "profiled, cosine", (
        "a table in the model's directory is its own"
    )


def test_what_cannot_be_profiled(default_model_dir, tmp_path, capsys, monkeypatch):
    out = ["--out", str(tmp_path / "t.json")]
    assert main(["profile", "--model", str(default_model_dir), *out]) == 1
    assert "no diffusion model" in capsys.readouterr().err
    path = save_tiny("llada", tmp_path / "tiny", tokenizer_from=default_model_dir)
    assert main(["profile", "--model", str(path), *out, "--length", "1000"]) == 1
    assert main(["profile", "--model", str(path), *out, "--prompts", str(tmp_path / "none")]) == 1
    with pytest.raises(SystemExit):
        main(["profile", "--model", str(path), *out, "--ratios", "5,200"])
    assert "argument --ratios" in capsys.readouterr().err
    monkeypatch.setattr("loadgen.offline.profile.command.find_spec", lambda name: None)
    for kind in ([], ["--answers", str(tmp_path / "none")]):
        assert main(["profile", "--model", str(path), *out, *kind, "--plot", str(tmp_path / "p.png")]) == 1
        assert "make extra-bench" in capsys.readouterr().err
