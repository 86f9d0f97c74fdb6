"""Depth tables: lookup, files, published tables."""

import json
import shutil

import pytest

from runtime.errors import ModelError
from runtime.features.diffusion.bicache.depth_table import NO_TABLE, DepthTable, choose_table, read_table
from runtime.models.spec import DecoderSpec
from tests.runtime.features.diffusion.bicache.driver import make_core
from tests.runtime.features.diffusion.bicache.models import save_tiny


def test_look_up_the_largest_ratio_that_is_not_above():
    table = DepthTable("t", {0: 1, 5: 2, 29: 10})
    assert [table.depth(r) for r in (0, 0.049, 0.05, 0.2899, 0.2901, 1)] == [1, 1, 2, 2, 10, 10]
    assert DepthTable("t", {10: 3}).depth(0.05) == 0
    assert 0.29 * 100 < 29
    assert table.depth(0.29) == 10, "rounding is forgiven"


@pytest.mark.parametrize(
    ("kind", "sizes", "ratio", "depth"),
    [
        ("llada", {"d_model": 4096, "n_layers": 32, "vocab_size": 126464, "embedding_size": 126464}, 0.88, 17),
        ("dream", {"hidden_size": 3584, "num_hidden_layers": 28, "vocab_size": 152064}, 0.88, 14),
    ],
)
def test_published_tables_are_used_when_the_model_matches(tmp_path, kind, sizes, ratio, depth):
    path = save_tiny(kind, tmp_path / kind)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | sizes))
    table = choose_table(None, path, DecoderSpec.load(path))
    assert "published" in table.name
    assert table.depth(ratio) == depth
    assert max(table.depths.values()) in (28, 32)


def test_tables_of_other_models_and_broken_ones(deep_dir, tmp_path, caplog):
    spec = DecoderSpec.load(deep_dir)
    assert choose_table(None, deep_dir, spec) is NO_TABLE
    assert "no depth table" in caplog.text
    path = tmp_path / "table.json"
    model = {"model_type": "llada", "num_layers": 6, "hidden_size": 48, "vocab_size": 300}
    for value, what in (
        ({"model": model | {"num_layers": 7}, "depths": {"0": 1}}, "is for"),
        ({"model": model, "depths": {"0": 7}}, "0 to 6"),
        ({"model": model, "depths": {}}, "0 to 6"),
        ({"model": model, "depths": {"a": 1}}, "cannot be read"),
        ({"model": model}, "cannot be read"),
        ({"model": model, "depths": {"0": 1}, "refresh_interval": 0}, "at least 1"),
        ({"model": model, "depths": {"0": 1}, "refresh_interval": "often"}, "cannot be read"),
    ):
        path.write_text(json.dumps(value))
        with pytest.raises(ModelError, match=what):
            read_table(path, spec)
    path.write_text(json.dumps({"model": model, "depths": {"0": 1, "50": 4}}))
    assert make_core(deep_dir, depth_table=path).strategies.default.table.depth(0.6) == 4
    path.write_text("{}")
    without_weights = tmp_path / "model"
    shutil.copytree(deep_dir, without_weights, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ModelError, match="the depth table"):
        make_core(without_weights, depth_table=path)


def test_a_table_may_have_an_interval_of_its_own(deep_dir, tmp_path):
    path = tmp_path / "table.json"
    model = {"model_type": "llada", "num_layers": 6, "hidden_size": 48, "vocab_size": 300}
    for own, interval in ((None, 16), (4, 4)):
        path.write_text(json.dumps({"model": model, "depths": {"0": 1}, "refresh_interval": own}))
        core = make_core(deep_dir, depth_table=path)
        assert core.info.decoding.refresh_interval == interval
    assert make_core(deep_dir).info.decoding.refresh_interval == 1
