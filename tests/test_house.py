"""The house's arrows: which room may import which, how deep and how large it is, and how its docstrings begin."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("radix", "runtime", "server", "loadgen")
# Rooms that each room may import, besides itself.
MAY_IMPORT = {"radix": set(), "runtime": {"radix"}, "server": {"runtime", "radix"}, "loadgen": {*ROOMS}}
# Folders of runtime/, each of which imports those behind it; the flat files stand below all of them.
FLOORS = ("engine", "frontend", "reuse", "diffusion", "sampling", "execution", "kv", "models")
FLAT = ("__init__", "request", "protocol", "batch", "params", "config", "errors", "logs")
MOST_FOLDERS, MOST_FLAT, MOST_FLOORS, MOST_LINES, MOST_README = 10, 8, 9, 500, 200
PARAPHRASE = re.compile(r"(What|Who|Whose|Whom|Whoever|Which|How)\b")


@dataclass(frozen=True)
class Arrow:
    """An import: the module that imports, the one that is imported, and when Python runs it."""

    source: str
    target: str
    at_import: bool
    for_types: bool


def name_of(path: Path) -> str:
    """The dotted name of a module's file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))}


class Imports(ast.NodeVisitor):
    """Collects a module's arrows."""

    def __init__(self, name: str, path: Path):
        self.name = name
        self.package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        self.in_function = self.for_types = False
        self.arrows: list[Arrow] = []

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self.in_function = self.in_function, True
        self.generic_visit(node)
        self.in_function = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        outer, self.for_types = self.for_types, self.for_types or "TYPE_CHECKING" in ast.unparse(node.test)
        self.generic_visit(node)
        self.for_types = outer

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = ".".join(self.package.split(".")[: len(self.package.split(".")) + 1 - node.level]) if node.level else ""
        module = ".".join(filter(None, (base, node.module)))
        for alias in node.names:
            inner = f"{module}.{alias.name}"
            self._add(inner if inner in FILES else module)

    def _add(self, target: str) -> None:
        lazy = self.in_function or self.for_types
        self.arrows.append(Arrow(self.name, target, not lazy, self.for_types))


def read_arrows(name: str) -> list[Arrow]:
    visitor = Imports(name, FILES[name])
    visitor.visit(ast.parse(FILES[name].read_text(encoding="utf-8")))
    return visitor.arrows


ARROWS = [arrow for name in FILES for arrow in read_arrows(name)]


def text(arrows: list[Arrow]) -> list[str]:
    return sorted({f"{arrow.source} -> {arrow.target}" for arrow in arrows})


def floor_of(module: str) -> str:
    """The folder of runtime/ in which a module lies; empty for a flat file."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (ROOT / "runtime" / parts[1]).is_dir() else ""


# The facade `runtime/__init__.py` stands above all floors. A request may name types of what it carries.
WITHIN = [
    arrow
    for arrow in ARROWS
    if arrow.source.startswith("runtime.")
    and arrow.target.startswith("runtime.")
    and not (arrow.source == "runtime.request" and arrow.for_types)
]


def test_rooms_import_downwards():
    def forbidden(arrow: Arrow) -> bool:
        source, target = arrow.source.split(".")[0], arrow.target.split(".")[0]
        if arrow.source == "server.cli" and target == "loadgen":
            return False
        return target in ROOMS and target != source and target not in MAY_IMPORT[source]

    assert text([arrow for arrow in ARROWS if forbidden(arrow)]) == []


def test_radix_knows_no_torch():
    assert text([a for a in ARROWS if a.source.startswith("radix") and a.target.split(".")[0] == "torch"]) == []


def test_a_load_generator_knows_a_server_by_http_alone():
    clients = [arrow for arrow in ARROWS if arrow.source.startswith("loadgen.http")]
    assert len(clients) > 50
    assert text([arrow for arrow in clients if arrow.target.split(".")[0] in ("runtime", "radix", "server")]) == []


def test_floors_of_the_runtime_import_downwards():
    order = {name: place for place, name in enumerate((*FLOORS, ""))}
    unknown = {floor_of(name) for name in FILES if name.startswith("runtime.")} - order.keys()
    assert unknown == set(), "a new folder of runtime/ needs a place among the floors"
    assert text([a for a in WITHIN if order[floor_of(a.target)] < order[floor_of(a.source)]]) == []


@pytest.mark.parametrize("room", ROOMS)
def test_no_modules_import_each_other_in_a_circle(room):
    graph: dict[str, set[str]] = {}
    for arrow in ARROWS:
        within = arrow.source.split(".")[0] == room and arrow.target in FILES
        if within and not (arrow.source == "runtime.request" and arrow.for_types):
            graph.setdefault(arrow.source, set()).add(arrow.target)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_the_runtime_is_small():
    top = ROOT / "runtime"
    folders = {path.name for path in top.iterdir() if path.is_dir() and path.name != "__pycache__"}
    flat = {path.stem for path in top.glob("*.py")}
    assert len(folders) <= MOST_FOLDERS
    assert len(flat) <= MOST_FLAT
    assert flat <= {*FLAT}


def test_the_runtime_is_no_tower():
    """The longest chain of imports between the folders of runtime/, the flat files counted as one floor."""
    below: dict[str, set[str]] = {}
    for arrow in WITHIN:
        source, target = floor_of(arrow.source), floor_of(arrow.target)
        if source != target:
            below.setdefault(source, set()).add(target)
    height: dict[str, int] = {}
    for floor in TopologicalSorter(below).static_order():
        height[floor] = 1 + max((height[other] for other in below.get(floor, ())), default=0)
    assert max(height.values()) <= MOST_FLOORS


def test_no_module_of_the_front_end_names_torch():
    """Nor does any module that is imported with it."""
    seen, left = set(), [name for name in FILES if name.startswith("runtime.frontend")]
    found = []
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        for arrow in (arrow for arrow in ARROWS if arrow.source == name and arrow.at_import):
            if arrow.target.split(".")[0] == "torch":
                found.append(arrow)
            elif arrow.target in FILES:
                left.append(arrow.target)
    assert len(seen) > 10
    assert text(found) == []


def test_tests_mirror_the_rooms():
    tests = ROOT / "tests"
    folders = {path.parent.relative_to(tests) for path in tests.rglob("*.py")} - {Path(), Path("clients")}
    assert len(folders) > 10
    assert sorted(str(folder) for folder in folders if not (ROOT / folder).is_dir()) == []


def docstrings(path: Path) -> list[tuple[int, str]]:
    """Lines and texts of a file's docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    return [(getattr(node, "lineno", 1), found) for node in nodes if (found := ast.get_docstring(node))]


@pytest.mark.parametrize("room", [*ROOMS, "tests"])
def test_docstrings_name_the_noun(room):
    """`KV events`, and not `What the tree holds, told as it changes`."""
    paths = sorted((ROOT / room).rglob("*.py"))
    found = [(path, line, doc) for path in paths for line, doc in docstrings(path) if PARAPHRASE.match(doc)]
    assert not found, "\n".join(f"{path.relative_to(ROOT)}:{line}: {doc.splitlines()[0]}" for path, line, doc in found)


def test_modules_fit_a_head():
    paths = [*FILES.values(), *(ROOT / "tests").rglob("*.py")]
    sizes = {path.relative_to(ROOT).as_posix(): len(path.read_text("utf-8").splitlines()) for path in paths}
    assert {name: size for name, size in sizes.items() if size > MOST_LINES} == {}


def test_the_readme_is_short():
    length = len((ROOT / "README.md").read_text("utf-8").splitlines())
    assert length <= MOST_README
