"""The tower in a process of its own: it computes what the tower does, and its end is no end of the engine."""

import gc
import shutil
import signal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.errors import ModelError, RametError
from runtime.features.images.rules import load_rules
from runtime.features.images.tower import Tower
from runtime.features.images.tower_process import TowerProcess, open_tower

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def process(seeing_dir):
    tower = open_tower(seeing_dir, load_rules(seeing_dir), torch.float32, CPU, False, None)
    assert isinstance(tower, TowerProcess)
    return tower


def tile(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, (32, 32, 3), np.uint8).tobytes()


def test_it_computes_what_the_tower_does(seeing_dir, process):
    plain = Tower(seeing_dir, load_rules(seeing_dir), torch.float32, CPU, False)
    for seed in range(3):
        torch.testing.assert_close(process.states(tile(seed), (32, 32)), plain.states(tile(seed), (32, 32)))


def test_states_are_kept_in_the_type_of_the_model_until_the_last_engine_that_has_it_ends(seeing_dir):
    rules = load_rules(seeing_dir)
    plain = Tower(seeing_dir, rules, torch.bfloat16, CPU, False).states(tile(1), (32, 32))
    process = open_tower(seeing_dir, rules, torch.bfloat16, CPU, False, None)
    kept = process.states(tile(1), (32, 32))
    assert (kept.dtype, kept.nbytes) == (torch.bfloat16, 2 * 16 * 48)
    torch.testing.assert_close(kept, plain)
    assert isinstance(process, TowerProcess)
    (child,) = process._pool._all
    del process
    gc.collect()
    assert child.wait(10) == -signal.SIGKILL


def test_all_engines_of_a_process_share_it(seeing_dir, process):
    assert open_tower(seeing_dir, load_rules(seeing_dir), torch.float32, CPU, False, None) is process


def test_an_error_and_an_end_concern_one_tile(process):
    before = process.states(tile(1), (32, 32))
    with pytest.raises(RametError, match="the vision tower failed"):
        process.states(tile(1)[:-3], (32, 32))
    (child,) = process._pool._all
    child.kill()
    child.wait()
    assert torch.equal(process.states(tile(1), (32, 32)), before)


def test_a_tower_that_cannot_be_loaded_is_told_at_the_start(seeing_dir, tmp_path):
    path = tmp_path / "blind"
    shutil.copytree(seeing_dir, path)
    tensors = load_file(path / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if "connector" not in name}, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"the vision tower of .* cannot be loaded"):
        open_tower(path, load_rules(path), torch.float32, CPU, False, None)
