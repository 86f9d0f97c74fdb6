"""What macOS lacks: the calls are made to fail as they do there, and its programs are scripts with its words."""

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from runtime.config import SchedulerConfig
from runtime.execution.parallel.group import loopback
from runtime.models import template_program
from runtime.models.publishing import reserve
from runtime.models.tensor_files import find_files
from server import doctor
from server.commands.models import found_models, free_memory
from server.http.listener import most_connections

VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            292871.
Pages inactive:                           20000.
Pages speculative:                          900.
Pages wired down:                        102030.
Pages purgeable:                            100.
"""
SYSCTL = """machdep.cpu.brand_string: Apple M1
hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_BF16: 0
"""


@pytest.fixture
def macos(tmp_path, monkeypatch):
    """No /proc, and macOS's programs."""
    read = Path.read_text

    def read_text(path, *arguments, **options):
        if path.is_relative_to("/proc"):
            raise FileNotFoundError(path)
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    for name, words in ("vm_stat", VM_STAT), ("sysctl", SYSCTL):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\ncat << 'END'\n{words}END\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


def test_memory_and_processor(macos):
    assert free_memory() == 16384 * 31000
    assert doctor._processor() == ("Apple M1", frozenset({"asimddp"}))


def test_without_its_programs(macos, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert free_memory() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert doctor._processor()[1] == frozenset()


@pytest.mark.parametrize("size", [1000, (2 << 20) + 1])
def test_the_place_of_a_file_on_the_disk(tmp_path, monkeypatch, size):
    monkeypatch.delattr(os, "posix_fallocate")
    path = tmp_path / "file"
    with path.open("wb") as file:
        reserve(file, size)
        assert path.read_bytes() == bytes(size)
        assert path.stat().st_blocks * 512 >= size


def test_the_limit_on_descriptors_that_is_not_named(monkeypatch):
    taken = []

    def setrlimit(_, pair):
        if pair[0] > 10_240:
            raise ValueError("current limit exceeds maximum limit")
        taken.append(pair)

    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    assert most_connections(SchedulerConfig(max_running=1000, max_waiting=9000)) == 10_240 - 128
    assert taken == [(10_240, resource.RLIM_INFINITY)]


def test_the_interface_that_joins_ranks(monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo0"), (2, "gif0"), (11, "en0")])
    assert loopback() == "lo0"


def test_notes_about_files_on_the_volumes_of_others(tmp_path, monkeypatch):
    (tmp_path / "m" / "config.json").parent.mkdir()
    for name in "config.json", "a-1.safetensors", "a-2.safetensors", "b.gguf":
        for each in name, f"._{name}":
            (tmp_path / "m" / each).write_bytes(bytes(8))
    (tmp_path / "._m").write_bytes(bytes(8))
    assert find_files(tmp_path / "m") == [tmp_path / "m" / "a-1.safetensors", tmp_path / "m" / "a-2.safetensors"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    assert list(found_models()) == [("./m", 16)]
    monkeypatch.chdir("m")
    assert list(found_models()) == [("./b.gguf", 8)]


def test_the_python_of_its_developer_tools(tmp_path):
    """Is 3.9: the set-up says so before it fetches anything."""
    old = tmp_path / "old"
    as_old = "import sys; sys.version_info = (3, 9, 6); exec(sys.argv[2])"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{as_old}" "$@"\n')
    old.chmod(0o755)
    made = ["make", "--no-print-directory", f"VENV={tmp_path}/venv", f"PYTHON={old}", f"{tmp_path}/venv/.torch"]
    told = subprocess.run(made, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert told.returncode == 2
    assert f"ERROR: Ramet needs Python 3.11 or later, and {old} is 3.9: PYTHON=python3.12 names another" in told.stderr
    assert not told.stdout


GROWING = (
    "{% set all = namespace(text='x' * 1000000) %}{% for _ in range(12) %}{% set all.text = all.text ~ all.text %}"
)
REFUSING = """
import resource
from runtime.models import template_program as program
def refuse(*_):
    raise ValueError("current limit exceeds maximum limit")
resource.setrlimit = refuse
program._MEMORY = 200 << 20
program.main()
"""


def test_a_template_that_grows_where_no_limit_is_taken():
    def answer(template):
        process = subprocess.Popen([sys.executable, "-c", REFUSING], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert template_program.read_frame(process.stdout) == template_program.TEXT
        template_program.write_frame(process.stdin, msgspec.json.encode((template, {})))
        found = template_program.read_frame(process.stdout)
        process.communicate()
        return found

    assert answer("small") == template_program.TEXT + b"small"
    assert answer(GROWING + "{% endfor %}{{ all.text | length }}") == b"", "its process ended"
