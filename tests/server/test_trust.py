"""No module unpickles, runs remote code, or listens where others can reach it."""

from __future__ import annotations

import ast
import stat
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("radix", "runtime", "server")
FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def modules():
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def test_nothing_is_unpickled():
    seen = 0
    for path, tree in modules():
        seen += 1
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not FORBIDDEN & {name.name.split(".")[0] for name in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in FORBIDDEN, path
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("torch", "load"), ("np", "load"), ("numpy", "load")}, path
                assert not node.attr.endswith("_pyobj"), path  # ZeroMQ's own pickling
    assert seen > 50


def test_no_remote_code_is_run():
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path


def test_sockets_between_processes_are_their_owners_alone(server):
    directories = {
        Path(line.split()[-1]).parent for line in Path("/proc/net/unix").read_text().splitlines() if "/ramet-" in line
    }
    assert directories
    for directory in directories:
        with suppress(FileNotFoundError):  # another test's server may end meanwhile
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700, directory


# Modules that report the time of day, or note it for another process; all others measure durations, which a clock that
# jumps must not change.
TELLS_THE_TIME = {
    *(
        "runtime/kv/publisher.py",
        "runtime/models/tokenizer.py",
        "runtime/engine/resume.py",
        "runtime/engine/tiering.py",
    ),
    *("runtime/kv/tiers/disk.py", "runtime/kv/tiers/files.py", "runtime/kv/tiers/host.py", "server/tiers/command.py"),
    *("server/admin/control.py", "server/admin/dashboard.py", "server/admin/history.py", "server/admin/journal.py"),
    *("server/openai/common.py", "server/openai/models.py"),
    "server/responses/writer.py",
}


def test_no_duration_is_measured_by_the_wall_clock():
    found = set()
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                wall = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
                if (node.value.id, node.attr) in wall:
                    found.add(path.relative_to(ROOT).as_posix())
            elif isinstance(node, ast.ImportFrom) and node.module == "time":
                assert not {"time", "time_ns"} & {name.name for name in node.names}, path
    assert found == TELLS_THE_TIME
