"""The READMEs: links lead somewhere, and files and commands exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A file that a how-to tells its reader to write.
EXAMPLES = {"http/workloads/constant_question.py"}
ROOMS = ("*.md", "docker/*.md", "loadgen/**/*.md", "radix/**/*.md", "runtime/**/*.md", "server/**/*.md")
DOCUMENTS = sorted(path for room in ROOMS for path in ROOT.glob(room))


def anchors(path: Path) -> set[str]:
    """The headings of a document, as GitHub links to them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(text: str) -> Iterator[tuple[str, str]]:
    """Every link within the repository: a path and the part after `#`, either of which may be empty."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield path, anchor


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target, anchor in links(path.read_text(encoding="utf-8")):
        found = path.parent / target if target else path
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), f"{target}#{anchor}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(path):
    """In backquotes: `room/file.py`, from the document's folder or from the root."""
    names = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|yml|json|txt|toml))`", path.read_text(encoding="utf-8"))
    for name in set(names) - EXAMPLES:
        assert (path.parent / name).exists() or (ROOT / name).exists(), name


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if path.parent != ROOT], ids=lambda p: str(p.relative_to(ROOT))
)
def test_a_room_that_lists_modules_lists_all(path):
    """A README whose table has two or more of its folder's modules; `feature.py` is the same in each feature."""
    rows = "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|"))
    modules = {one.name for one in path.parent.glob("*.py")} - {"__init__.py", "__main__.py", "feature.py"}
    listed = {name for name in modules if f"`{name}`" in rows}
    assert len(listed) < 2 or listed == modules


def test_every_make_command_is_a_target():
    rules = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    named = {name for path in DOCUMENTS for name in re.findall(r"\bmake ([a-z][\w-]*)`?", code(path))}
    assert {"serve", "test", "docs"} <= named <= targets


def code(path: Path) -> str:
    """The code of a document: blocks, and what stands in backquotes."""
    text = path.read_text(encoding="utf-8")
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
