"""Structural equivalence of reasoning steps: equal code and equal formulas (ReasonCache, section IV-A1)."""

import ast
import re
import textwrap
from collections.abc import Hashable, Iterator
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

# Longer steps are not parsed and match no step.
_MOST_CHARACTERS = 8192
_FENCE = re.compile(r"^[ \t]*(```|~~~)[^\n]*$", re.MULTILINE)
# A formula contains no opening delimiter, so the search takes linear time. As in pandoc, a space after the opening
# dollar or a digit after the closing one rules out a formula, so that two prices are not taken for one.
_MATH = re.compile(
    r"\$\$([^$]+)\$\$|\\\[((?:(?!\\\[).)+?)\\\]|\\\(((?:(?!\\\().)+?)\\\)"
    r"|\\begin\{(\w+\*?)\}((?:(?!\\begin\{).)+?)\\end\{\4\}"
    r"|(?<![\\$])\$(?![\s$])([^$\n]*[^$\s\\])\$(?!\d)",
    re.DOTALL,
)
_REST_OF_LATEX = re.compile(r"\\(?:[\[\]()]|[A-Za-z]{2,})")

# Formulas without delimiters: numbers, single letters, functions and brackets, joined by at least one sign.
_SIGN = r"(?:<=|>=|!=|==|\*\*|->|[-+*/^=<>×·÷−±≤≥≠≈])"
_OPERAND = (
    r"(?:\d+(?:[.,]\d+)*[²³%!]?|(?<=\d)[A-Za-z]{1,2}(?![A-Za-z])[²³]?|[()]"
    r"|(?<![A-Za-z])(?:[A-Za-z]|sin|cos|tan|log|ln|exp|sqrt|max|min|mod|gcd|lcm|abs)(?![A-Za-z])[²³]?)"
)
_BARE = re.compile(rf"[-+−]?{_OPERAND}(?:[ \t$]*(?:{_SIGN}|{_OPERAND}))*")
_HAS_SIGN = re.compile(rf".{_SIGN}[ \t$]*{_OPERAND}")

# Normalisation of formulas: spacing, bracket sizes, thousands separators, powers, and signs with the same meaning.
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
# Tree-sitter grammars by the language name that a fence gives.
_GRAMMARS = {
    **{"c": "c", "h": "c", "cpp": "cpp", "c++": "cpp", "cc": "cpp", "hpp": "cpp", "java": "java"},
    **{"go": "go", "golang": "go", "rust": "rust", "rs": "rust"},
    **{"javascript": "javascript", "js": "javascript", "jsx": "javascript"},
}


def equivalent(a: str, b: str) -> bool:
    """Whether two steps have the same syntax trees of code and the same tokens of formulas, in the same order.

    Two steps without code and formulas are equivalent. A step whose code cannot be parsed is not equivalent to any.
    """
    first = _structure(a)
    return first is not None and first == _structure(b)


def open_fence(text: str) -> str:
    """The first line of the code fence that is open at the end of a text; empty: no fence is open."""
    return _fences(text)[1]


@lru_cache(256)
def _structure(text: str) -> tuple[Hashable, ...] | None:
    """The syntax trees of code and the tokens of formulas in a text; None: the text is too long or not parsable."""
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
    """The parts of a text as (first line of the part's fence or None, content), and the last fence if it is open."""
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
    """The tree-sitter parser of a language; None: it is not installed."""
    try:
        from tree_sitter import Language, Parser

        return Parser(Language(import_module(f"tree_sitter_{grammar}").language()))
    except ImportError:
        return None


def _nodes(root: Any) -> Iterator[str]:
    """A tree in preorder: the types of inner nodes, types and texts of leaves, and ")" at the end of a node."""
    pending = [root]
    while pending:
        node = pending.pop()
        if isinstance(node, str):
            yield node
        elif not node.is_extra:  # comments
            yield node.type if node.child_count else f"{node.type} {node.text.decode()}"
            pending += [")", *reversed(node.children)]
