"""Quantised checkpoints that the kernels compute as they are stored."""

import re

import pytest

from runtime.execution.native.library import load_best
from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.execution.native.stored_models import check_near_unpacked, logits_with_an_adapter
from tests.runtime.models.published_files import FORMATS, write_published

VOCAB = 320
EXACT = [kind for kind, one in FORMATS.items() if one.exact]


@pytest.mark.parametrize("kind", EXACT)
def test_logits_are_near_those_of_unpacked_weights(library, tmp_path, kind):
    published, plain = write_published(FORMATS[kind], tmp_path)
    check_near_unpacked(library, published, plain, VOCAB, 0.05, 0.02)


def test_rows_with_an_adapter(library, tmp_path):
    published, plain = write_published(FORMATS["awq"], tmp_path)
    _, got, wanted = logits_with_an_adapter(library, published, plain, VOCAB)
    assert (got - wanted).norm() / wanted.norm() < 0.05


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAMET_CACHE", str(tmp_path / "cache"))
    if load_best() is None:
        pytest.skip("the kernels were not built, or this processor cannot run them")
    return tmp_path / "cache" / "codes"


@pytest.mark.parametrize("kind", ["packed", "awq", "gptq in another order", "fp8 blocks"])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen3Moe", "DeepseekV3"])
def test_an_engine_says_how_weights_are_computed(cache, tmp_path, caplog, architecture, kind):
    """Cold, warm and in chunks, the tokens are the same."""
    published, _ = write_published(FORMATS[kind], tmp_path, architecture)
    prompt, found = [5, 9, 200, 31, 8, 77, 140, 3, 17, 90, 4], []
    caplog.set_level("INFO")
    for chunk in (4, 64):
        driver = Driver(make_core(published, dtype="auto", page_size=4, chunk_tokens=chunk))
        for _ in range(2):
            found += driver.together([prompt], max_new_tokens=8)
    assert found == [found[0]] * 4
    info, is_exact = driver.core.info, FORMATS[kind].exact and architecture != "DeepseekV3"
    name = {"packed": "pack-quantized", "awq": "awq", "fp8 blocks": "fp8"}.get(kind, "gptq")
    assert info.quantization == (name if is_exact else f"{name}, unpacked")
    assert info.attention_backend.endswith(f"-{name}") == is_exact
    counts = re.search(rf"{name}: (\d+) of (\d+) quantised matrices", caplog.text)
    assert counts is not None
    assert int(counts[1]) == (int(counts[2]) if is_exact else 0)
    assert len(list(cache.glob(f"{published.name}-*/codes-*.bin"))) == is_exact
    assert not list(published.glob("codes-*"))


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"quantization": "none"}, {"kernels": "torch"}])
def test_options_unpack(cache, tmp_path, options):
    published, _ = write_published(FORMATS["awq"], tmp_path)
    options = {"dtype": "auto"} | options
    core = make_core(published, **options)
    assert core.info.quantization == "awq, unpacked"


def test_weights_are_rounded_again_if_asked(cache, tmp_path):
    published, _ = write_published(FORMATS["fp8 blocks"], tmp_path)
    core = make_core(published, dtype="auto", quantization="int8")
    assert core.info.quantization == "int8"
    assert core.info.attention_backend.endswith("-int8")


def test_other_files_have_other_codes(cache, tmp_path):
    published, _ = write_published(FORMATS["awq"], tmp_path)
    make_core(published, dtype="auto")
    (published / "model.safetensors").touch()
    make_core(published, dtype="auto")
    assert len(list(cache.iterdir())) == 2
