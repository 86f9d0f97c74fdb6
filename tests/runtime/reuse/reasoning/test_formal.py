"""Steps that say the same in code and math, and steps that do not."""

from __future__ import annotations

import pytest

from runtime.reuse.reasoning.expression import bare_formulas, parse_math
from runtime.reuse.reasoning.formal import agree, open_fence

EQUAL = [
    ("Let us see.", "We see now."),
    ("2x+5", "2x + 5"),
    ("2x+5", "2*x + (5)"),
    ("((3+4))*2 = 14", "so (3 + 4) · 2 = 14, then"),
    ("- 3 + 4 = 7", "We add 3 + 4 = 7."),
    ("It is 1,000 + 2", "that is 1000+2"),
    ("x² + 1 = 0", "x^2+1 = 0"),
    ("We get $2x+5$.", r"Hence \( 2 x + 5 \)!"),
    (r"\[ \frac{a}{b} \]", r"$$\dfrac{a}{b}$$"),
    (r"$\sin x + 1$", r"$\sin(x) + 1$"),
    (r"\begin{align} x &= 3 \\ y &= 4 \end{align}", r"\begin{align} x & = 3 \\ y & = 4 \end{align}"),
    ("It costs $5 and $10.", "It cost $6 and $11."),
    ("The well-known x-axis, and/or the e-mail", "The little-known y-axis"),
    ("```python\nx = 1\n```", "First:\n```py\nx = 1  # one\n```"),
    ("```\nx = f(1,2)\n```", "```\nx = f(1, 2)\n```"),
    ("    x = 1\n    y = 2", "    x = 1\n    y=2"),
    ("```js\nlet a = 1;\n```", "```javascript\nlet a = 1; // one\n```"),
    ("```c\nint f() { return 0; }\n```", "```c\nint f()\n{\n  return 0;\n}\n```"),
]
DIFFERENT = [
    ("2x+5", "2x-5"),
    ("2x+5=10", "2x-5=10"),
    ("We get $2x+5$.", "We get $2x-5$."),
    ("We get $2x+5$.", "We get it."),
    ("The sum is 3 + 4 = 7.", "The sum is seven."),
    ("(3 + 4) * 2", "3 + 4 * 2"),
    ("a - b - c", "a - (b - c)"),
    ("x = 3", "x = -3"),
    ("5 > 3", "5 < 3"),
    ("$5 + $3 = $8", "$5 - $3 = $2"),
    ("sin(x) = 1", "cos(x) = 1"),
    (r"$x_1$", "$x^1$"),
    (r"$\sqrt{2}$", r"$\sqrt[3]{2}$"),
    (r"\[ \frac{a}{b} \]", r"\[ \frac{b}{a} \]"),
    (r"$\text{area} = 3$", r"$\text{volume} = 3$"),
    (r"$(0, 1)$", r"$[0, 1]$"),
    ("```python\nx = 1\n```", "```python\nx = 2\n```"),
    ("```python\nif a:\n    b()\nc()\n```", "```python\nif a:\n    b()\n    c()\n```"),
    ("```python\nx = 1\n```", "```js\nx = 1\n```"),
    ("```js\nlet a = 1;\n```", "```js\nlet a = 2;\n```"),
    ("```rust\nlet a = 1 - b;\n```", "```rust\nlet a = 1 + b;\n```"),
]
# Equal texts, of which a part cannot be parsed.
BROKEN = [
    "```python\nx = (1\n```",
    "```js\nlet = = 1;\n```",
    "```brainfuck\n+++\n```",
    r"\[ x + \frac{1 \]",
    r"\[ x + 1",
    "It is $x + )$.",
    "Is 3 + * 4 = 7?",
    "```python\n" + "not " * 1500 + "x\n```",
    "$" + "(" * 300 + "x" + ")" * 300 + "$",
    "So 1 + 1 = 2. " * 1000,
]


@pytest.mark.parametrize(("a", "b"), EQUAL)
def test_equal_trees_agree(a, b):
    assert agree(a, b)
    assert agree(b, a)


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_different_trees_do_not_agree(a, b):
    assert not agree(a, b)
    assert not agree(b, a)
    assert agree(a, a)
    assert agree(b, b)


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_text_that_cannot_be_parsed_agrees_with_none(text):
    assert not agree(text, text)


def test_operators_bind_as_in_math():
    assert parse_math("2x+5=10") == ("=", ("+", ("*", "2", "x"), "5"), "10")
    assert parse_math("-2^-1x") == ("-", ("*", ("^", "2", ("-", "1")), "x"))
    assert parse_math("a-b/c-d") == ("-", ("-", "a", ("/", "b", "c")), "d")
    assert parse_math("|x|y'") == ("*", ("|", "x"), ("'", "y"))


def test_formulas_are_found_in_prose():
    text = "The sum is 3 + 4 = 7 and x/y (see a - b).\n1. First, 3 - which (5 + 6 is I/O of a T-shirt"
    assert list(bare_formulas(text)) == ["3 + 4 = 7", "x/y", "a - b", "5 + 6", "I/O"]


def test_a_fence_that_stays_open_is_known():
    assert open_fence("Look:\n```python\nx = 1\n") == "```python"
    assert open_fence("```\nx\n```\nand\n~~~c\n```\n") == "~~~c"
    assert open_fence("```\nx\n```") == ""
