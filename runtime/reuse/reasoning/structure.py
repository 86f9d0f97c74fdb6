"""Structural equivalence of reasoning steps: equal code and equal formulas (ReasonCache, section IV-A1)."""

import ast
import re
import textwrap
from collections.abc import Hashable, Iterator
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

# A longer step is not parsed.
_MOST_CHARACTERS = 8192
_FENCE = re.compile(r"^[ \t]*(```|~~~)[^\n]*$", re.MULTILINE)
# No part crosses another opening delimiter, so that the search is linear. As in pandoc, no space stands within single
# dollars, and no digit behind them: two prices are no formula.
_MATH = re.compile(
    r"\$\$([^$]+)\$\$|\\\[((?:(?!\\\[).)+?)\\\]|\\\(((?:(?!\\\().)+?)\\\)"
    r"|\\begin\{(\w+\*?)\}((?:(?!\\begin\{).)+?)\\end\{\4\}"
    r"|(?<![\\$])\$(?![\s$])([^$\n]*[^$\s\\])\$(?!\d)",
    re.DOTALL,
)
_REST_OF_LATEX = re.compile(r"\\(?:[\[\]()]|[A-Za-z]{2,})")

# Formulas without delimiters: numbers, single letters, functions and brackets, with a sign before one of them.
_SIGN = r"(?:<=|>=|!=|==|\*\*|->|[-+*/^=<>×·÷−±≤≥≠≈])"
_OPERAND = (
    r"(?:\d+(?:[.,]\d+)*[²³%!]?|(?<=\d)[A-Za-z]{1,2}(?![A-Za-z])[²³]?|[()]"
    r"|(?<![A-Za-z])(?:[A-Za-z]|sin|cos|tan|log|ln|exp|sqrt|max|min|mod|gcd|lcm|abs)(?![A-Za-z])[²³]?)"
)
_BARE = re.compile(rf"[-+−]?{_OPERAND}(?:[ \t$]*(?:{_SIGN}|{_OPERAND}))*")
_HAS_SIGN = re.compile(rf".{_SIGN}[ \t$]*{_OPERAND}")

# Normalisation of formulas: spacing and sizes of brackets, thousands, powers, and different signs of one meaning.
_SPACING = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|quad|qquad|displaystyle|limits)(?![A-Za-z])|\\[,;:! ]|~")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_POWERS = str.maketrans({"²": "^2", "³": "^3"})
_TOKEN = re.compile(r"\d+(?:\.\d+)?|\\[A-Za-z]+|\\.|<=|>=|!=|==|\*\*|->|=>|\S", re.DOTALL)
_SAME = {
    **dict.fromkeys((r"\cdot", r"\times", r"\ast", "×", "·", "⋅", "∙"), "*"),
    **dict.fromkeys((r"\div", "÷"), "/"),
    **dict.fromkeys(("−", "–"), "-"),
    **dict.fromkeys((r"\le", r"\leq", "≤"), "<="),
    **dict.fromkeys((r"\ge", r"\geq", "≥"), ">="),
    **dict.fromkeys((r"\ne", r"\neq", "≠"), "!="),
    **dict.fromkeys((r"\to", r"\rightarrow", "→"), "->"),
    **dict.fromkeys((r"\implies", r"\Rightarrow", "⇒"), "=>"),
    **{r"\pm": "±", r"\approx": "≈", "**": "^", "==": "=", r"\lt": "<", r"\gt": ">", r"\%": "%"},
    **{r"\dfrac": r"\frac", r"\tfrac": r"\frac", "π": r"\pi", "√": r"\sqrt"},
}

_PYTHON = frozenset({"", "python", "python3", "py"})
# Grammars by the names that languages have in fences.
_GRAMMARS = {
    **{"c": "c", "h": "c", "cpp": "cpp", "c++": "cpp", "cc": "cpp", "hpp": "cpp", "java": "java"},
    **{"go": "go", "golang": "go", "rust": "rust", "rs": "rust"},
    **{"javascript": "javascript", "js": "javascript", "jsx": "javascript"},
}


def equivalent(a: str, b: str) -> bool:
    """Whether all code of two steps has equal syntax trees, and all formulas have equal tokens, in order.

    Two steps without code or formulas are equivalent. A step with code that cannot be parsed is equivalent to none.
    """
    first = _structure(a)
    return first is not None and first == _structure(b)


def open_fence(text: str) -> str:
    """The first line of a code fence that a text leaves open; empty: it leaves none."""
    return _fences(text)[1]


@lru_cache(256)
def _structure(text: str) -> tuple[Hashable, ...] | None:
    """The syntax trees of a text's code and the tokens of its formulas; None: a part cannot be parsed."""
    if len(text) > _MOST_CHARACTERS:
        return None
    try:
        return tuple(_parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _parse(text: str) -> Iterator[Hashable]:
    for line, content in _fences(text)[0]:
        if line is not None:
            yield _parse_code(line.strip().strip("`~").strip().split(" ")[0].lower(), content)
            continue
        at = 0
        for math in _MATH.finditer(content):
            yield from _bare_formulas(content[at : math.start()])
            yield _tokens(math[math.lastindex or 0])
            at = math.end()
        yield from _bare_formulas(content[at:])


def _fences(text: str) -> tuple[list[tuple[str | None, str]], str]:
    """The parts of a text, each with the first line of its fence or None; and the first line of a fence left open."""
    parts: list[tuple[str | None, str]] = []
    at, opening = 0, ""
    for fence in _FENCE.finditer(text):
        if opening and fence[0].strip() != opening[:3]:
            continue
        parts.append((opening or None, text[at : fence.start()]))
        opening, at = "" if opening else fence[0].strip(), fence.end()
    return [*parts, (opening or None, text[at:])], opening


def _bare_formulas(text: str) -> Iterator[Hashable]:
    if _REST_OF_LATEX.search(text):
        raise ValueError("LaTeX outside of a closed formula")
    return (_tokens(found[0].replace("$", " ")) for found in _BARE.finditer(text) if _HAS_SIGN.search(found[0]))


def _tokens(formula: str) -> tuple[str, ...]:
    """The normalised tokens of a formula."""
    formula = _SPACING.sub(" ", _THOUSANDS.sub("", formula)).translate(_POWERS).strip(" \n.,;")
    return tuple(_SAME.get(token, token) for token in _TOKEN.findall(formula))


def _parse_code(language: str, code: str) -> Hashable:
    """The syntax tree of a program without its comments. Raises SyntaxError."""
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
