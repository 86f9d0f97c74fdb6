"""Math, as people and LaTeX write it, to syntax trees."""

from __future__ import annotations

import re
from collections.abc import Iterator

Tree = str | tuple["Tree", ...]

_MOST_DEEP = 64
_SEPARATOR, _RELATION, _SUM, _PRODUCT, _POWER = range(5)
_GAP = "nothing"

# Different signs of one meaning.
_SAME = {
    **dict.fromkeys((r"\cdot", r"\times", r"\ast", "×", "·", "⋅", "∙"), "*"),
    **dict.fromkeys((r"\div", "÷"), "/"),
    **dict.fromkeys(("−", "–"), "-"),
    **dict.fromkeys((r"\pm", "±"), "±"),
    **dict.fromkeys((r"\le", r"\leq", "≤"), "<="),
    **dict.fromkeys((r"\ge", r"\geq", "≥"), ">="),
    **dict.fromkeys((r"\ne", r"\neq", "≠"), "!="),
    **dict.fromkeys((r"\approx", "≈"), "≈"),
    **dict.fromkeys((r"\to", r"\rightarrow", "→"), "->"),
    **dict.fromkeys((r"\implies", r"\Rightarrow", "⇒"), "=>"),
    **{"**": "^", "==": "=", r"\lt": "<", r"\gt": ">", r"\%": "%", r"\\": ";", "π": r"\pi", "√": r"\sqrt"},
}
_BINDS = {
    **dict.fromkeys((",", ";", "&", ":"), _SEPARATOR),
    **dict.fromkeys(("=", "<", ">", "<=", ">=", "!=", "≈", "->", "=>", r"\equiv", r"\in", r"\sim"), _RELATION),
    **dict.fromkeys(("+", "-", "±"), _SUM),
    **dict.fromkeys(("*", "/"), _PRODUCT),
    **dict.fromkeys(("^", "_"), _POWER),
}
_POSTFIX = frozenset("!'%°")
_BRACKETS = {"(": ")", "{": "}", "[": "]", r"\{": r"\}", "|": "|", r"\begin": r"\end"}
_CLOSING = frozenset(_BRACKETS.values()) - {"|"}
_ARGUMENTS = {
    **dict.fromkeys((r"\frac", r"\dfrac", r"\tfrac", r"\binom"), 2),
    **dict.fromkeys((r"\boxed", r"\overline", r"\underline", r"\hat", r"\bar", r"\vec"), 1),
}
_FUNCTIONS = frozenset(["sin", "cos", "tan", "log", "ln", "exp", "sqrt", "max", "min", "mod", "gcd", "lcm", "abs"])

# Spacing and sizes of brackets; environments begin and end with one token.
_DROPPED = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|quad|qquad|displaystyle|limits)(?![A-Za-z])|\\[,;:! ]|~")
_ENVIRONMENT = re.compile(r"\\(begin|end)\{[^{}]*\}(?:\{[lcr|]*\})?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_TOKEN = re.compile(
    r"\s+|(\\text[a-z]*|\\mathrm|\\mathb[bf]|\\operatorname|\\mbox)\s*\{([^{}]*)\}"
    r"|(\d+(?:\.\d+)?|\.\d+|\\[A-Za-z]+|\\.|<=|>=|!=|==|\*\*|->|=>|[A-Za-z]+|.)",
    re.DOTALL,
)
_POWERS = str.maketrans({"²": "^2", "³": "^3"})

# Tokens of a formula without delimiters: numbers, words, signs, brackets.
_BARE = re.compile(
    r"[ \t$]+|(?P<number>\d+(?:[.,]\d+)*[²³%!]?)|(?P<word>[A-Za-z]+[²³]?)|(?P<bracket>[()])"
    r"|(?P<sign><=|>=|!=|==|\*\*|->|[-+*/^=<>×·÷−±≤≥≠≈])|(?P<other>.|\n)"
)


class Unparsable(Exception):
    """A formula that the grammar does not have."""


def bare_formulas(text: str) -> Iterator[str]:
    """The formulas of a text that stand without delimiters: signs between numbers, letters and functions."""
    run: list[tuple[str, int, int]] = []
    after_number = -1
    for token in _BARE.finditer(text + "\n"):
        kind, start, end = token.lastgroup, *token.span()
        if kind is None:
            continue
        word = token[0].rstrip("²³")
        if kind == "other" or (
            kind == "word" and len(word) > 1 and word not in _FUNCTIONS and (start != after_number or len(word) > 2)
        ):
            yield from _trimmed(text, run)
            run = []
            continue
        after_number = end if kind == "number" else -1
        run.append((kind, start, end))


def _trimmed(text: str, run: list[tuple[str, int, int]]) -> Iterator[str]:
    """A run of tokens without signs and single brackets at its ends, if a sign stands between two others."""
    while run and (run[-1][0] == "sign" or _is_stray(text, run, -1)):
        run.pop()
    while run and (_is_bullet(run) or _is_stray(text, run, 0)):
        run.pop(0)
    operands = [i for i, (kind, _, _) in enumerate(run) if kind in ("number", "word")]
    if operands and any(kind == "sign" for kind, _, _ in run[operands[0] : operands[-1]]):
        yield text[run[0][1] : run[-1][2]].replace("$", " ")


def _is_bullet(run: list[tuple[str, int, int]]) -> bool:
    """Whether a run begins with a sign that is not its first operand's."""
    return run[0][0] == "sign" and (len(run) == 1 or run[0][2] != run[1][1])


def _is_stray(text: str, run: list[tuple[str, int, int]], end: int) -> bool:
    """Whether a run begins (`end` 0) or ends (-1) with a bracket that has no other in it."""
    signs = [text[start:stop] for kind, start, stop in run if kind == "bracket"]
    if run[end][0] != "bracket":
        return False
    return signs[end] != "()"[end] or signs.count("(") != signs.count(")")


def parse_math(source: str) -> Tree:
    """The syntax tree of a formula. Raises Unparsable."""
    parser = _Parser(source)
    tree = parser.expression()
    if parser.peek() is not None:
        raise Unparsable(source)
    return tree


class _Parser:
    """Operators by their binding; what stands side by side is multiplied; brackets only group."""

    def __init__(self, source: str):
        source = _DROPPED.sub(" ", _THOUSANDS.sub("", source)).translate(_POWERS).strip(" \n.,;")
        source = _ENVIRONMENT.sub(r"\\\1 ", source)
        self._tokens = [token for found in _TOKEN.finditer(source) for token in _read(found)]
        self._at = self._depth = 0
        self._closers: list[str] = []

    def peek(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _next(self) -> str:
        if (token := self.peek()) is None:
            raise Unparsable("a formula ends too early")
        self._at += 1
        return token

    def _ends(self) -> bool:
        """Whether the innermost bracket, or all, ends here."""
        token = self.peek()
        return token is None or token in _CLOSING or [token] == self._closers[-1:]

    def expression(self, least: int = _SEPARATOR) -> Tree:
        """Operands and operators that bind at least so much."""
        self._depth += 1
        if self._depth > _MOST_DEEP:
            raise Unparsable("too deep")
        left = self._operand(least)
        while not self._ends():
            token = self.peek() or ""
            binds = _BINDS.get(token, _POWER if token in _POSTFIX else _PRODUCT)
            if binds < least:
                break
            if token in _BINDS:
                self._next()
                left = (token, left, self._operand_of(binds))
            elif token in _POSTFIX:
                left = (self._next(), left)
            else:
                left = ("*", left, self.expression(_PRODUCT + 1))
        self._depth -= 1
        return left

    def _operand_of(self, binds: int) -> Tree:
        return self._power() if binds == _POWER else self.expression(binds + 1)

    def _power(self) -> Tree:
        """An exponent or index: one token or group, with its sign."""
        return (self._next(), self._power()) if self.peek() in ("+", "-") else self._atom()

    def _operand(self, least: int) -> Tree:
        """A signed atom; beside separators and relations there may be none."""
        token = self.peek()
        if least <= _SUM and (self._ends() or _BINDS.get(token or "", _PRODUCT) <= _RELATION):
            return _GAP
        if token in ("+", "-", "±"):
            return (self._next(), self.expression(_PRODUCT))
        return self._atom()

    def _atom(self) -> Tree:
        token = self._next()
        if token in _BRACKETS:
            return self._group(token)
        if token == r"\sqrt":
            root = self._group(self._next()) if self.peek() == "[" else "2"
            return (token, root, self._power())
        if token in _ARGUMENTS:
            arguments = tuple(self._power() for _ in range(_ARGUMENTS[token]))
            return ("/" if token.endswith("frac") else token, *arguments)
        if token in _BINDS or token in _CLOSING or not re.match(r"[\d.\\A-Za-z\u0370-\u03ff∞°\"]", token):
            raise Unparsable(token)
        return token

    def _group(self, opening: str) -> Tree:
        self._closers.append(_BRACKETS[opening])
        inner = self.expression()
        if self._next() != self._closers.pop():
            raise Unparsable("brackets do not match")
        return inner if opening in "({" else (opening, inner)


def _read(found: re.Match[str]) -> Iterator[str]:
    """The tokens of a match: a text as one, letters one by one."""
    if found[1] is not None:
        yield f'"{found[2].strip()}"'
    elif (token := found[3]) is None:
        return
    elif token.isalpha() and token.isascii() and token not in _FUNCTIONS:
        yield from token
    else:
        yield _SAME.get(token, f"\\{token}" if token in _FUNCTIONS else token)
