"""Mutation testing of a room with the tests nearest to it: `make mutants ROOM=radix`.

mutmut works in `build/mutants/ROOM`, remembers results there, and tries again what has changed. Beside its own mutants
there are dropped statements and forced conditions; texts stay as they are, as most are messages for people.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

# Bytes that a process may allocate: a mutant that never ends must not take the machine's memory.
MEMORY = 4 << 30
# Exit codes: tests failed, pytest itself did, too much time, memory that was not there.
KILLED = {1, 3, 24, 36, 152, 255, -24, -11, -9}
ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Room:
    """Modules that are mutated, and arguments of pytest: tests that take milliseconds each."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


# Long random lives, which find more than they cost a mutant each.
LONG = (
    "test_tree.py::TestTreeMachine::runTest",
    "test_eviction.py::test_hits_are_the_uses_that_ran_through_a_node",
    "test_events.py::test_a_mirror_after_ten_thousand_random_operations",
    "test_inspection.py::test_a_large_tree_is_walked_in_steps_and_may_change_meanwhile",
    "test_namespace.py::test_different_namespaces_never_hash_alike",
    "test_quotas.py::TestTenants::runTest",
    "test_foresight.py::test_foresight_equals_its_plain_model_over_a_long_time",
    "test_watcher.py::test_every_page_that_leaves_was_seen_with_its_tokens",
)

ROOMS = {
    "radix": Room(("radix/*.py",), ("tests/radix", *(f"--deselect=tests/radix/{test}" for test in LONG))),
    "scheduler": Room(
        ("runtime/engine/scheduler.py", "runtime/engine/queue.py", "runtime/engine/blocked.py"),
        (
            *(f"tests/runtime/engine/test_{name}.py" for name in ("scheduler", "scheduler_memory", "queue")),
            *("tests/runtime/engine/test_blocked.py", "tests/runtime/engine/test_credit.py"),
            "-k=not serves_everybody and not cheap_to_compute_again",
        ),
    ),
    "kv": Room(
        ("runtime/kv/*.py",),
        tuple(f"tests/runtime/kv/test_{name}.py" for name in ("allocator", "cache", "pool", "pin_board", "messages")),
    ),
    "limits": Room(
        ("server/auth/*.py", "server/http/limits.py", "runtime/frontend/limits.py"),
        (
            "tests/server/auth/test_guard.py",
            "tests/server/http/test_limits.py",
            "tests/runtime/frontend/test_limits.py",
        ),
    ),
}


def dropped(node: cst.Expr | cst.AugAssign) -> Iterator[cst.Pass]:
    """No statement in the place of a call or of `a += b`."""
    if isinstance(node, cst.AugAssign) or isinstance(node.value, cst.Call):
        yield cst.Pass()


def forced(node: cst.If) -> Iterator[cst.If]:
    """A branch that is always taken, and one that never is."""
    for value in ("True", "False"):
        yield node.with_changes(test=cst.Name(value))


# mutmut reads its configuration from the working directory when it is imported: below, once that is there.


def forget_survivors() -> None:
    """Have them tried again: there may be new tests."""
    for path in Path("mutants").rglob("*.meta"):
        meta = json.loads(path.read_text(encoding="utf-8"))
        codes = meta["exit_code_by_key"]
        meta["exit_code_by_key"] = {name: code if code in KILLED else None for name, code in codes.items()}
        path.write_text(json.dumps(meta), encoding="utf-8")


def run(mutants: Sequence[str], children: int | None) -> None:
    """Make the mutants, and run the tests on those without a result."""
    from mutmut.__main__ import _run
    from mutmut.mutation import mutators

    operators = mutators.mutation_operators
    operators.remove((cst.BaseString, mutators.operator_string))
    operators += [(cst.Expr, dropped), (cst.AugAssign, dropped), (cst.If, forced)]
    forget_survivors()
    _run(mutants, children)


def open_workshop(name: str, room: Room) -> None:
    """Go to a directory that has the repository's rooms and a configuration of mutmut."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a fork has no threads but its own
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # to load them anew takes longer than the tests of a mutant
    workshop = ROOT / "build" / "mutants" / name
    workshop.mkdir(parents=True, exist_ok=True)
    os.chdir(workshop)
    sources = ["radix", "runtime", "server", "loadgen", "tests"]
    for source in sources:
        if not Path(source).exists():
            Path(source).symlink_to(ROOT / source)
    config = {
        "source_paths": sources[:-1],
        "only_mutate": list(room.modules),
        "pytest_add_cli_args": ["-p", "_hypothesis_pytestplugin", "--hypothesis-profile=mutants"],
        "pytest_add_cli_args_test_selection": list(room.tests),
        "timeout_constant": 2.0,
        "timeout_multiplier": 10.0,
        "track_dependencies": False,
        "use_git_change_detection": False,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in config.items()]
    text = "\n".join(["[tool.pytest.ini_options]", "[tool.mutmut]", *lines, ""])
    Path("pyproject.toml").write_text(text, encoding="utf-8")


def changes(diff: str) -> tuple[str, str]:
    """The lines that a mutant takes away and those that it has instead, each joined by spaces."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    was, now = ([line[1:].strip() for line in lines if line.startswith(sign)] for sign in "-+")
    return " ".join(was), " ".join(now)


def results(names: Iterable[str]) -> Iterator[tuple[str, str, str, str]]:
    """The module, name, and state of each mutant, and its diff unless it was killed."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    known = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))["equivalent"]
    equivalent = {(one["file"], one["function"], one["was"], one["now"]) for one in known}
    for name in names:
        found = json.loads(Path("mutants", name + ".meta").read_text(encoding="utf-8"))["exit_code_by_key"]
        for mutant, code in found.items():
            if code in KILLED:
                yield name, mutant, "killed", ""
                continue
            diff = get_diff_for_mutant(mutant, path=name)
            function = mutant.rpartition("__mutmut_")[0].rpartition(".")[2].rpartition("ǁ")[2].removeprefix("x_")
            is_known = (name, function, *changes(diff)) in equivalent
            yield name, mutant, "equivalent" if is_known else "survived", diff


def report() -> None:
    """Print the survivors, and a table of the modules."""
    names = sorted(str(path.relative_to("mutants")).removesuffix(".meta") for path in Path("mutants").rglob("*.meta"))
    table: dict[str, Counter[str]] = {name: Counter() for name in names}
    for name, mutant, state, diff in results(names):
        table[name][state] += 1
        if state == "survived":
            print(f"\n# {mutant}\n{diff.strip()}")
    states = ("killed", "equivalent", "survived")
    print(f"\n{'module':40}{'mutants':>9}", *(f"{state:>11}" for state in states), "  share killed")
    for name, counts in [*table.items(), ("all", sum(table.values(), Counter()))]:
        alive = counts.total() - counts["equivalent"]
        share = f"{counts['killed'] / alive:13.1%}" if alive else ""
        print(f"{name:40}{counts.total():9}", *(f"{counts[state]:11}" for state in states), share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("room", choices=ROOMS)
    parser.add_argument("mutants", nargs="*", help="names or patterns of mutants to try again; default: what changed")
    parser.add_argument("--children", type=int, help="processes at a time; default: one a core")
    parser.add_argument("--report", action="store_true", help="only print what is known")
    asked = parser.parse_args()
    open_workshop(asked.room, ROOMS[asked.room])
    if not asked.report:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        run(asked.mutants, asked.children)
    report()


if __name__ == "__main__":
    sys.exit(main())
