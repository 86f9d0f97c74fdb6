"""Sizes of modules and functions, and names of classes; `[tool.importlinter]` in pyproject.toml has the imports."""

import ast
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.config import default_cache_dir

ROOT = Path(__file__).parents[1]
ROOMS = ("radix", "runtime", "server", "loadgen")
MOST_BYTES = 8 << 20
# A last resort: one noun a module is the rule.
MOST_LINES, MOST_LINES_OF_TESTS, MOST_LINES_OF_FUNCTION, MOST_LINES_OF_README = 600, 600, 60, 200
# Folders of tests that stand for no room.
NOT_ROOMS = {Path(name) for name in ("", "arm", "clients", "soak", "runtime/reuse/contract", "runtime/execution/sim")}
TREES = {path: ast.parse(path.read_text("utf-8")) for room in (*ROOMS, "tests") for path in (ROOT / room).rglob("*.py")}


def test_modules_and_functions_are_short():
    long = set()
    for path, tree in TREES.items():
        name = path.relative_to(ROOT).as_posix()
        is_test = name.startswith("tests/")
        if len(path.read_text("utf-8").splitlines()) > (MOST_LINES_OF_TESTS if is_test else MOST_LINES):
            long.add(name)
        if is_test:
            continue
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
        long |= {f"{name}: {function}" for function, length in lengths.items() if length > MOST_LINES_OF_FUNCTION}
    assert long == set()


def splats(tree: ast.AST) -> Iterator[int]:
    """Lines with `*(a, b)`, `**{"a": b}`, `*(a if b else c)`, `*(a or [])` or the like, in place of plain items.

    Computed names of a call are fine.
    """
    packed = (ast.List, ast.Tuple, ast.Set, ast.IfExp, ast.BoolOp)
    for node in ast.walk(tree):
        if isinstance(node, ast.Starred) and isinstance(node.value, packed):
            yield node.lineno
        elif isinstance(node, ast.Dict):
            items = zip(node.keys, node.values, strict=True)
            yield from (value.lineno for key, value in items if key is None and isinstance(value, (ast.Dict, *packed)))
        elif isinstance(node, ast.keyword) and node.arg is None:
            keys = node.value.keys if isinstance(node.value, ast.Dict) else []
            if isinstance(node.value, packed) or any(key is None or isinstance(key, ast.Constant) for key in keys):
                yield node.value.lineno


def test_literals_are_not_splatted():
    """The formatter lays out a literal; where a table reads better in rows, `# fmt: skip` says so."""
    cases = (
        "[*(1, 2)]",
        "f(*[1])",
        "{**{1: 2}}",
        "f(**{'a': 1})",
        "{*(a, b)}",
        "f(*{1})",
        "[*([a] if b else [])]",
        "{**({'a': 1} if b else {})}",
        "f(**(a or {}))",
        "f(**{'a': 1, **more})",
        "f(**{'a b': 1})",
    )
    assert [len([*splats(ast.parse(case))]) for case in cases] == [1] * len(cases)
    fine = (
        "[*a]",
        "f(*a, **b)",
        "{**a}",
        "f(**{name: 1})",
        "(*(x for x in y),)",
    )
    assert [case for case in fine if [*splats(ast.parse(case))]] == []
    found = {path.relative_to(ROOT).as_posix() for path, tree in TREES.items() if [*splats(tree)]}
    assert found == set()


@pytest.mark.parametrize("rooms", [("radix", "runtime", "server"), ("loadgen",)])
def test_a_public_class_name_means_one_class(rooms):
    trees = (tree for path, tree in TREES.items() if path.relative_to(ROOT).parts[0] in rooms)
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1 and not name.startswith("_")] == []


def test_tests_mirror_the_rooms():
    tests = ROOT / "tests"
    folders = {path.parent.relative_to(tests) for path in tests.rglob("*.py")} - NOT_ROOMS
    assert len(folders) > 10
    assert sorted(str(folder) for folder in folders if not (ROOT / folder).is_dir()) == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= MOST_LINES_OF_README


def test_the_tree_is_small():
    """It is carried to machines without internet; a picture or a table of weights must earn its place."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert sum(path.lstat().st_size for path in paths if path.exists()) < MOST_BYTES


def test_tests_have_a_cache_of_their_own():
    assert default_cache_dir() != Path(os.environ["RAMET_CACHE_OF_USER"])
    assert default_cache_dir().is_relative_to(tempfile.gettempdir())
