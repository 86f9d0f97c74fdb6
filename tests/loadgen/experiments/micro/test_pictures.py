"""The pictures of HOW.md show what the engine did."""

import re

import pytest

from loadgen.experiments.micro.pictures import Scene, draw_miss, draw_step, draw_tree


@pytest.fixture(scope="module")
def scene(default_model_dir):
    scene = Scene(default_model_dir)
    yield scene
    scene.drive.close()


def read(picture, tmp_path) -> str:
    picture.save(tmp_path / "picture.svg")
    return (tmp_path / "picture.svg").read_text()


def test_the_three_pictures(scene, tmp_path):
    tree = read(draw_tree(scene), tmp_path)
    assert re.findall(r"\d+ tokens, \d hits?", tree) == ["32 tokens, 1 hit", "16 tokens, 0 hits", "16 tokens, 0 hits"]
    step = read(draw_step(scene), tmp_path)
    assert "32 cached rows that both read, once" in step
    own = re.findall(r"(\d+) rows? computed, over (\d+) of its own", step)
    assert own[0][0] == "1"
    assert own[1][0] == own[1][1] != "1"
    miss = read(draw_miss(scene), tmp_path)
    cached, all_tokens = map(int, re.search(r"(\d+) of (\d+) tokens come from the tree", miss).groups())
    assert cached == int(re.search(r"part at token (\d+)", miss)[1])
    assert f"{all_tokens - cached} tokens are computed again" in miss
