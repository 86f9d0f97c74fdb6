"""Regular expressions with the digits and letters of ASCII alone in `\\d` and `\\w`, as in JSON Schema's `pattern`."""

import re

# A character behind a backslash, or a bracket.
_PART = re.compile(r"\\(.)|([\[\]])", re.DOTALL)
_NAMES = {"d": "digit", "D": "^digit", "w": "word", "W": "^word"}
# In a Lark grammar: a text, a comment, or an expression, which is the group.
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|(/(?:\\.|[^/\\\n])+/)')


def ascii_classes(expression: str) -> str:
    """The expression with `\\d`, `\\D`, `\\w` and `\\W` as classes of ASCII."""
    depth = 0

    def plain(found: re.Match[str]) -> str:
        nonlocal depth
        if found[2]:
            depth = max(depth + (1 if found[2] == "[" else -1), 0)
        if found[1] not in _NAMES:
            return found[0]
        return f"[:{_NAMES[found[1]]}:]" if depth else f"[[:{_NAMES[found[1]]}:]]"

    return _PART.sub(plain, expression)


def ascii_classes_in_lark(grammar: str) -> str:
    """The Lark grammar with `ascii_classes` of its expressions."""
    return _TOKEN.sub(lambda found: ascii_classes(found[1]) if found[1] else found[0], grammar)
