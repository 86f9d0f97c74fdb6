"""Digits and letters in expressions are those of ASCII, wherever an expression stands."""

import pytest

from runtime.features.grammars.compiler import GrammarCompiler
from runtime.features.grammars.expressions import ascii_classes_in_lark
from runtime.params import SamplingParams


@pytest.fixture(scope="module")
def follows(tokenizer):
    compiler = GrammarCompiler(tokenizer.to_json, tokenizer.vocab_size, [2], timeout_s=300)

    def follow(text: str, **params) -> bool:
        """Whether a text follows a grammar up to its end."""
        compiler.start("a", SamplingParams(**params))
        (grammar,) = _taken(compiler)
        for token in tokenizer.encode(text, add_special_tokens=False):
            if not grammar.allowed()[token // 8] >> token % 8 & 1:
                return False
            grammar.accept(token)
        return True

    return follow


def _taken(compiler: GrammarCompiler) -> list:
    while not (found := compiler.take()):
        pass
    return [grammar for _, grammar in found]


@pytest.mark.parametrize(
    ("expression", "yes", "no"),
    [
        (r"\d{3}-\d{4}", "555-1234", "٣٣٣-٣٣٣٣"),
        (r"[\d.]+", "3.5", "３.５"),
        (r"\w+", "a_9", "für"),
        (r"[^\w]", "é", "a"),
        (r"\D", "٣", "3"),
        (r"[\W_]", "é", "a"),
        (r"[]\d]", "]", "٣"),
        (r"\\d", r"\d", "3"),
        (r"[a-z]+\[\w", "ab[c", "ab[é"),
    ],
)
def test_digits_and_letters(follows, expression, yes, no):
    lark = f"start: A\nA: /{expression}/ // \\d\n"
    for params in ({"regex": expression}, {"grammar": lark}):
        assert follows(yes, **params), params
        assert not follows(no, **params), params


def test_texts_and_comments_of_a_grammar_stay():
    grammar = r"""start: "/\d/" A // /\d/
A: /\//"""
    assert ascii_classes_in_lark(grammar) == grammar
