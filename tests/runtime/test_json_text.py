"""The shape of JSON text is counted as the parser sees it, before it is parsed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import json_text
from runtime.json_text import MAX_DEPTH, MAX_NODES, MAX_VALUES, check_shape, check_texts, parse_json, read_json

TRICKY = st.text(st.sampled_from('"\\[]{}:,.eE a\u2200'))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TRICKY
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TRICKY, inner), max_leaves=20)


def nodes(value) -> int:
    """Lists, objects, names, and the points and exponents of numbers and truth values."""
    if isinstance(value, list):
        return 1 + sum(map(nodes, value))
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(nodes, value.values()))
    if isinstance(value, str) or value is None:
        return 0
    return sum(json.dumps(value).count(mark) for mark in ".eE")


def commas(value) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max(len(inner) - 1, 0) + sum(map(commas, inner))


def depth(value) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@settings(max_examples=60)
@given(value=JSON, ascii_only=st.booleans(), few=st.integers(0, 4))
def test_every_bound_is_met_exactly(value, ascii_only, few):
    """`few`: strings that are left out one by one, and escapes, before the others are all at once."""
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    same_as_python(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "_SHORT", 0)
        patch.setattr(json_text, "_FEW", few)
        patch.setattr(json_text, "_LONG", 0)
        patch.setattr(json_text, "_STRINGS", few)
        for name, count in (("NODES", nodes(value)), ("VALUES", commas(value) + 1), ("DEPTH", depth(value))):
            patch.setattr(json_text, f"MAX_{name}", count)
            check_shape(text)
            if count > (name == "VALUES"):
                patch.setattr(json_text, f"MAX_{name}", count - 1)
                with pytest.raises(ValueError, match="more than"):
                    check_shape(text)
            patch.setattr(json_text, f"MAX_{name}", 1 << 20)


@settings(max_examples=30)
@given(values=st.lists(JSON), broken=TRICKY)
def test_texts_are_counted_together(values, broken):
    """A text that is no JSON hides nothing of the others."""
    texts = [json.dumps(value) for value in values]
    total = sum(map(nodes, values))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "MAX_NODES", total - 1)
        if total:
            with pytest.raises(ValueError, match="more than"):
                check_texts([f'"{broken}', *texts])
        patch.setattr(json_text, "MAX_NODES", total)
        check_texts(texts)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * (MAX_DEPTH + 1), "levels"),
        ('{"":' * (MAX_DEPTH + 1), "levels"),
        ("[" + "[]," * MAX_NODES, "lists"),
        ("[" + "0.1," * MAX_NODES, "fractions"),
        ('{"":0' + ',"":0' * MAX_NODES, "names"),
        ("[0" + ",0" * MAX_VALUES + "]", "values"),
        ("[]" + "]" * 5000 + "[" * 70, "Extra data"),
        ('"' + "[" * 100 + '"x', "Extra data"),
        ('["\\\\\\"' + "[" * 100 + '", NaN]', "NaN is not JSON"),
    ],
)
def test_what_is_refused(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_json(text)


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-le", "utf-32"])
def test_other_encodings_hide_nothing(coding):
    with pytest.raises(ValueError, match="UTF-8"):
        check_shape(('{"\u2200": ' + "[" * 100).encode(coding))


def same_as_python(text):
    found = []
    for read in (read_json, json.loads):
        try:
            found.append(repr(read(text)))
        except ValueError as error:
            found.append((type(error), str(error)))
    assert found[0] == found[1], text[:40]


def test_what_only_pythons_reader_takes_and_what_none_does():
    for text in (
        b"[NaN, -Infinity, 1e999, -0.0]",
        b'\xef\xbb\xbf"x"',
        b'"\\ud800"',
        b'"\xed\xa0\x80"',
        b'{"a":1,"a":2}',
    ):
        same_as_python(text)
    for text in (b"", b"[1,]", b'{"a":1,}', b"1 2", b"01", b"1.", b'"\t"', b'"\\x"', b'"\xff"', b"nul", b"9" * 4301):
        same_as_python(text)
    for number in ("9" * 30, "1e22", "123456789012345678901234567890.5", "2.2250738585072011e-308", "0.1", "5e-324"):
        same_as_python(number.encode())
