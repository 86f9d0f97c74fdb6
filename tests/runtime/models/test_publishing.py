"""Directories that Ramet makes: complete or not at all; killed processes leave nothing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.errors import ModelError
from runtime.models.publishing import provide, scratch
from tests.full_disk import little_room

WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def target(tmp_path):
    return tmp_path / "models/one"


@pytest.fixture
def made(target):
    """`make` of a directory of two files; calls it was called."""

    def make(work: Path) -> None:
        make.calls += 1
        (work.parent / "download").write_bytes(WEIGHTS)
        (work / "config.json").write_text("{}")
        (work / "model.safetensors").write_bytes(WEIGHTS)

    make.calls = 0
    return make


def test_made_once_and_nothing_stays_beside_it(target, made):
    assert provide(target, made) == provide(target, made) == target
    assert made.calls == 1
    assert list(target.parent.iterdir()) == [target]
    assert {path.name for path in target.iterdir()} == {".seal", "config.json", "model.safetensors"}


def test_a_damaged_file_is_made_again(target, made):
    weights = provide(target, made) / "model.safetensors"
    (target / "codes").touch()  # others add files
    weights.write_bytes(bytes(len(WEIGHTS)))
    assert (provide(target, made) / "model.safetensors").read_bytes() == WEIGHTS
    assert list(target.parent.iterdir()) == [target]
    weights.unlink()
    assert (provide(target, made) / "model.safetensors").read_bytes() == WEIGHTS
    assert made.calls == 3


def test_a_file_is_read_again_only_when_it_has_changed(target, made):
    """A copy of the directory is sound, too."""
    before = (provide(target, made) / ".seal").read_bytes()
    copy = target.with_name("copy")
    shutil.copytree(target, copy, copy_function=shutil.copyfile)
    provide(copy, made)
    provide(target, made)
    assert (target / ".seal").read_bytes() == before != (copy / ".seal").read_bytes()
    (copy / ".seal").unlink()  # of a version that made none
    provide(copy, made)
    assert made.calls == 1


def test_a_failure_leaves_nothing(target, made):
    def fail(work: Path) -> None:
        made(work)
        raise ModelError("it does not fit")

    with pytest.raises(ModelError, match="it does not fit"):
        provide(target, fail)
    assert not list(target.parent.iterdir())


@pytest.mark.parametrize("room", [0, 1, 100])
def test_a_disk_that_is_full_at_some_point(target, made, room):
    with little_room(room), pytest.raises(ModelError, match=r"^cannot write .*one: File too large; \$RAMET_CACHE"):
        provide(target, made)
    assert not list(target.parent.iterdir())
    assert provide(target, made) == target


def test_another_process_may_be_first(target, made):
    def make(work: Path) -> None:
        made(work)
        if made.calls == 1:
            (provide(target, made) / "first").touch()

    assert (provide(target, make) / "first").exists()
    assert made.calls == 2


def test_remains_of_a_killed_process_are_removed_and_work_of_a_living_one_is_not(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from runtime.models.publishing import scratch\n"
        "with scratch(Path(sys.argv[1]), '.making-') as work:\n"
        "    (work / 'half').mkdir(); (work / 'half/model.safetensors').write_bytes(bytes(9999))\n"
        "    print(work, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    owners = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        works = [Path(owner.stdout.readline().strip()) for owner in owners]
        with scratch(tmp_path, ".making-") as own:
            assert {*tmp_path.iterdir()} == {*works, own}
        owners[0].kill()
        owners[0].wait()
        assert works[0].exists()
        with scratch(tmp_path, ".making-") as own:
            assert {*tmp_path.iterdir()} == {works[1], own}
        assert (works[1] / "half/model.safetensors").stat().st_size == 9999
    finally:
        for owner in owners:
            owner.kill()
            owner.wait()


def test_directories_of_that_name_without_a_lock_are_nobodys_remains(tmp_path):
    (tmp_path / "ramet-sockets-mine").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/lock").touch()
    (tmp_path / "ramet-sockets-link").symlink_to(tmp_path / "elsewhere")
    with scratch(tmp_path, "ramet-sockets-") as own:
        assert own.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in tmp_path.iterdir()} == {"ramet-sockets-mine", "ramet-sockets-link", "elsewhere"}
    assert (tmp_path / "elsewhere/lock").exists()
