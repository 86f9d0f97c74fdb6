"""Steps with equal code and formulas, and steps that differ in them."""

import pytest

from runtime.features.reasoning.steps import Splitter
from runtime.features.reasoning.structure import equivalent, open_fence

EQUAL = [
    ("Let us see.", "We see now."),
    ("2x+5", "2x + 5"),
    ("(3+4)*2 = 14", "so (3 + 4) · 2 = 14, then"),
    ("- 3 + 4 = 7", "We add 3 + 4 = 7."),
    ("It is 1,000 + 2", "that is 1000+2"),
    ("x² + 1 = 0", "x^2+1 = 0"),
    ("We get $2x+5$.", r"Hence \( 2 x + 5 \)!"),
    (r"\[ \frac{a}{b} \]", r"$$\dfrac{a}{b}$$"),
    (r"$2 \times \left( a \right) \le 1$", r"$2 \cdot (a) ≤ 1$"),
    (r"\begin{align} x &= 3 \\ y &= 4 \end{align}", r"\begin{align} x & = 3 \\ y & = 4 \end{align}"),
    ("It costs $5 and $10.", "It cost $6 and $11."),
    ("The well-known x-axis, and/or the e-mail", "The little-known y-axis"),
    ("1. First, 3 - which", "2. Then, 4 - which"),
    ("```python\nx = 1\n```", "First:\n```py\nx = 1  # one\n```"),
    ("```\nx = f(1,2)\n```", "```\nx = f(1, 2)\n```"),
    ("    x = 1\n    y = 2", "    x = 1\n    y=2"),
    ("```js\nlet a = 1;\n```", "```javascript\nlet a = 1; // one\n```"),
    ("```c\nint f() { return 0; }\n```", "```c\nint f()\n{\n  return 0;\n}\n```"),
]
DIFFERENT = [
    ("2x+5", "2x-5"),
    ("2x+5=10", "2y+5=10"),
    ("2xy + 3", "2xz + 3"),
    ("We get $2x+5$.", "We get $2x-5$."),
    ("We get $2x+5$.", "We get it."),
    ("The sum is 3 + 4 = 7.", "The sum is seven."),
    ("(3 + 4) * 2", "3 + 4 * 2"),
    ("a - b - c", "a - (b - c)"),
    ("x = 3", "x = -3"),
    ("5 > 3", "5 < 3"),
    ("$5 + $3 = $8", "$5 - $3 = $2"),
    ("sin(x) = 1", "cos(x) = 1"),
    ("-3 + 4", "3 + 4"),
    (r"$x_1$", "$x^1$"),
    (r"$\sqrt{2}$", r"$\sqrt[3]{2}$"),
    (r"\[ \frac{a}{b} \]", r"\[ \frac{b}{a} \]"),
    (r"$\text{area} = 3$", r"$\text{volume} = 3$"),
    (r"$(0, 1)$", r"$[0, 1]$"),
    ("```python\nx = 1\n```", "```python\nx = 2\n```"),
    ("```python\nif a:\n    b()\nc()\n```", "```python\nif a:\n    b()\n    c()\n```"),
    ("```python\nx = 1\n```", "```js\nx = 1\n```"),
    ("```python\nx = a + 1\n```", "x = a + 1"),
    ("```js\nlet a = 1;\n```", "```js\nlet a = 2;\n```"),
    ("```rust\nlet a = 1 - b;\n```", "```rust\nlet a = 1 + b;\n```"),
]
# Equal texts, of which a part cannot be parsed.
BROKEN = [
    "```python\nx = (1\n```",
    "```js\nlet = = 1;\n```",
    "```brainfuck\n+++\n```",
    r"\[ x + 1",
    "```python\n" + "not " * 1500 + "x\n```",
    "So 1 + 1 = 2. " * 1000,
]


@pytest.mark.parametrize(("a", "b"), EQUAL)
def test_equal_structures_are_equivalent(a, b):
    assert equivalent(a, b)
    assert equivalent(b, a)


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_different_structures_are_not_equivalent(a, b):
    assert not equivalent(a, b)
    assert not equivalent(b, a)
    assert equivalent(a, a)
    assert equivalent(b, b)


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_text_that_cannot_be_parsed_is_equivalent_to_none(text):
    assert not equivalent(text, text)


def test_a_fence_that_stays_open_is_known():
    assert open_fence("Look:\n```python\nx = 1\n") == "```python"
    assert open_fence("```\nx\n```\nand\n~~~c\n```\n") == "~~~c"
    assert open_fence("```\nx\n```") == ""


def test_code_behind_a_blank_line_is_known_as_code():
    splitter, texts = Splitter(), ("See:\n", "```py\n", "x = 1\n\n", "y = 2\n", "```\n\n", "So.\n\n")
    first, second, third = filter(None, (splitter.push(token, text) for token, text in enumerate(texts)))
    assert (first.fence, second.fence, third.fence) == ("", "```py", "")
    assert second.formal_text == "```py\ny = 2\n```\n\n"
