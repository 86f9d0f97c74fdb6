"""Formal language in a step, code and math, and whether two steps say the same in it (ReasonCache, section IV-A1)."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Hashable, Iterator
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

from runtime.reuse.reasoning.expression import Unparsable, bare_formulas, parse_math

# A longer step is not parsed.
_MOST_CHARACTERS = 8192
_FENCE = re.compile(r"^[ \t]*(```|~~~)[^\n]*$", re.MULTILINE)
# No part crosses another opening, so that the search is linear. As pandoc has it, no space stands within single
# dollars, and no digit behind: two prices are no formula.
_MATH = re.compile(
    r"\$\$([^$]+)\$\$|\\\[((?:(?!\\\[).)+?)\\\]|\\\(((?:(?!\\\().)+?)\\\)"
    r"|\\begin\{(\w+\*?)\}((?:(?!\\begin\{).)+?)\\end\{\4\}"
    r"|(?<![\\$])\$(?![\s$])([^$\n]*[^$\s\\])\$(?!\d)",
    re.DOTALL,
)
_REST_OF_LATEX = re.compile(r"\\(?:[\[\]()]|[A-Za-z]{2,})")
_PYTHON = frozenset({"", "python", "python3", "py"})
# Grammars by the names that languages have in fences.
_GRAMMARS = {
    **{"c": "c", "h": "c", "cpp": "cpp", "c++": "cpp", "cc": "cpp", "hpp": "cpp", "java": "java"},
    **{"go": "go", "golang": "go", "rust": "rust", "rs": "rust"},
    **{"javascript": "javascript", "js": "javascript", "jsx": "javascript"},
}


def agree(a: str, b: str) -> bool:
    """Whether all code and math of two steps, in order, have equal syntax trees.

    Two steps without any agree. A step of which a part cannot be parsed agrees with none.
    """
    first = _trees(a)
    return first is not None and first == _trees(b)


def open_fence(text: str) -> str:
    """The first line of a code fence that a text leaves open; empty: it leaves none."""
    return _fences(text)[1]


@lru_cache(256)
def _trees(text: str) -> tuple[Hashable, ...] | None:
    """The trees of a text's code and math; None: a part cannot be parsed."""
    if len(text) > _MOST_CHARACTERS:
        return None
    try:
        return tuple(_parse(text))
    except (Unparsable, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _parse(text: str) -> Iterator[Hashable]:
    for line, content in _fences(text)[0]:
        if line is not None:
            yield _parse_code(line.strip().strip("`~").strip().split(" ")[0].lower(), content)
            continue
        at = 0
        for math in _MATH.finditer(content):
            yield from _parse_prose(content[at : math.start()])
            yield parse_math(math[math.lastindex or 0])
            at = math.end()
        yield from _parse_prose(content[at:])


def _fences(text: str) -> tuple[list[tuple[str | None, str]], str]:
    """The parts of a text, each with the first line of its fence, if it has one; and that of a last one left open."""
    parts: list[tuple[str | None, str]] = []
    at, opening = 0, ""
    for fence in _FENCE.finditer(text):
        if opening and fence[0].strip() != opening[:3]:
            continue
        parts.append((opening or None, text[at : fence.start()]))
        opening, at = "" if opening else fence[0].strip(), fence.end()
    return [*parts, (opening or None, text[at:])], opening


def _parse_prose(text: str) -> Iterator[Hashable]:
    if _REST_OF_LATEX.search(text):
        raise Unparsable("LaTeX outside of a closed formula")
    return map(parse_math, bare_formulas(text))


def _parse_code(language: str, code: str) -> Hashable:
    """The tree of a program without its comments. Raises SyntaxError."""
    code = textwrap.dedent(code)
    if language in _PYTHON:
        return "python", ast.dump(ast.parse(code))
    grammar = _GRAMMARS.get(language, "")
    parser = _parser(grammar)
    if parser is None:
        raise SyntaxError(f"no grammar of {language!r}")
    root = parser.parse(code.encode()).root_node
    if root.has_error:
        raise SyntaxError(language)
    return grammar, tuple(_nodes(root))


@cache
def _parser(grammar: str) -> Any:
    """A parser of tree-sitter; None: there is none of that name."""
    try:
        from tree_sitter import Language, Parser

        return Parser(Language(import_module(f"tree_sitter_{grammar}").language()))
    except ImportError:
        return None


def _nodes(root: Any) -> Iterator[str]:
    """A tree in preorder: kinds of inner nodes, texts of leaves, and ends."""
    pending = [root]
    while pending:
        node = pending.pop()
        if isinstance(node, str):
            yield node
        elif not node.is_extra:  # comments
            yield node.type if node.child_count else f"{node.type} {node.text.decode()}"
            pending += [")", *reversed(node.children)]
