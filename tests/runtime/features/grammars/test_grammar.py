"""Output that follows a schema or an expression, on the real model and its real tokenizer."""

import json
import re
import threading
import time

import pytest

from runtime import Engine
from runtime.errors import InvalidRequest, RametError
from runtime.features.grammars.compiler import GrammarCompiler
from runtime.features.grammars.grammar import Grammar, check_grammar
from runtime.features.grammars.part import Grammars
from runtime.models.tokenizer import Tokenizer
from runtime.params import SamplingParams
from tests.runtime.engine.driver import Driver, make_core

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "tame": {"type": "boolean"},
    },
    "required": ["name", "age", "tame"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(default_model_dir):
    with Engine(str(default_model_dir), dtype="float32", pool_tokens=4096, debug_invariants=True) as engine:
        yield engine


def test_output_follows_a_schema(engine):
    prompts = [f"Describe animal number {i} as JSON: " for i in range(4)]
    params = {"seed": 5, "max_new_tokens": 120, "json_schema": json.dumps(SCHEMA)}
    for output in engine.generate(prompts, [{**params, "temperature": heat} for heat in (0, 0, 1.5, 1.5)]):
        found = json.loads(output.text)
        assert (type(found["name"]), type(found["age"]), type(found["tame"])) == (str, int, bool)
        assert found.keys() == SCHEMA["properties"].keys()
        assert output.finish.type == "stop"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_output_matches_an_expression(engine, ignore_eos):
    pattern = r"(yes|no), [0-9]{2,4} (äpfel|Bäume)\."
    params = {"temperature": 1, "seed": 1, "max_new_tokens": 60, "regex": pattern, "ignore_eos": ignore_eos, "n": 3}
    for output in engine.generate("Answer: ", params):
        assert re.fullmatch(pattern, output.text)
        assert output.finish.type == "stop"


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [('root ::= item ("," item)*\nitem ::= [0-9] [0-9]', r"\d\d(,\d\d)*"), ('start: "oak" | /el+m/', "oak|el+m")],
)
def test_output_follows_a_grammar(engine, grammar, pattern):
    (output,) = engine.generate("List: ", {"temperature": 1, "seed": 3, "max_new_tokens": 12, "grammar": grammar})
    assert output.finish.type == "length" or re.fullmatch(pattern, output.text)
    assert set(output.text) <= set("0123456789,oakelm")


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": r"<\|im_start\|>[0-9]{2}<\|im_end\|>"}, r"<\|im_start\|>\d\d<\|im_end\|>"),
        ({"grammar": 'start: "<|im_start|>" /[a-z]{3}/'}, r"<\|im_start\|>[a-z]{3}"),
        ({"json_schema": '{"const": "<|im_end|>"}'}, r'"<\|im_end\|>"'),
    ],
)
def test_texts_of_special_tokens_are_spelled(engine, constraint, pattern):
    (output,) = engine.generate("Say: ", {"temperature": 1, "seed": 2, "max_new_tokens": 40, **constraint})
    assert re.fullmatch(pattern, output.text)
    assert output.finish.type == "stop"


def test_a_special_token_may_be_a_trigger(engine):
    lazy = {"regex": r"<\|im_start\|>[0-9]{3}", "lazy": {"triggers": ["<|im_start|>"]}, "logit_bias": {1: 100}}
    (output,) = engine.generate("Say: ", {"temperature": 1, "seed": 2, "max_new_tokens": 12, **lazy})
    assert output.token_ids[::4] == [1] * 3
    assert re.fullmatch(r"\d{9}", output.text)


@pytest.mark.parametrize("format", ["password", "int32", "uri-reference"])
def test_unknown_formats_are_annotations(engine, format):
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": format, "maxLength": 3}}}
    params = {
        "json_schema": json.dumps({**schema, "required": ["format"], "additionalProperties": False}),
        "max_new_tokens": 30,
        "seed": 1,
    }
    (output,) = engine.generate("JSON: ", params)
    assert list(json.loads(output.text)) == ["format"]


def test_neighbours_of_a_grammar_are_left_alone(engine):
    plain = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    (alone,) = engine.generate("The capital of France is", plain)
    prompts = ["The capital of France is", "Number: "]
    together = engine.generate(prompts, [plain, {**plain, "regex": "[0-9]{30}"}])
    assert together[0].token_ids == alone.token_ids
    assert set(together[1].text) <= set("0123456789")


COUNT = "Count: 1, 2, 3, 4, 5, 6,"


def test_a_lazy_grammar_holds_from_each_trigger_to_its_end(engine):
    plain = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    lazy = {**plain, "grammar": 'start: " 8" /[a-c]{3}/ "!"', "lazy": {"triggers": [" 8"]}}
    never = {**plain, "regex": "x", "lazy": {"triggers": ["x"]}}
    free, found, untouched = engine.generate([COUNT] * 3, [plain, lazy, never])
    before = free.text[: free.text.index(" 8")]
    assert untouched.token_ids == free.token_ids
    assert re.match(re.escape(before) + " 8[abc]{3}!", found.text)
    assert len(found.token_ids) == 24, "what follows is free"
    assert all(re.match(" 8[abc]{0,3}(!|$)", found.text[place.start() :]) for place in re.finditer(" 8", found.text))


def test_a_lazy_grammar_may_be_that_of_the_whole_output_or_of_none(engine):
    plain = {"temperature": 0, "max_new_tokens": 12}
    lazy = {"lazy": {"starts": ["7"]}}
    free, whole, none = engine.generate(
        [COUNT, COUNT, "The capital of France is"],
        [plain, {**plain, **lazy, "regex": " 7, [x-z]{3}"}, {**plain, **lazy, "regex": "7"}],
    )
    assert re.fullmatch(" 7, [xyz]{3}", whole.text)
    assert whole.finish.type == "stop"
    assert "7" in free.text
    assert none.token_ids == engine.generate("The capital of France is", plain)[0].token_ids


@pytest.mark.parametrize(
    "params",
    [
        {"lazy": {"triggers": ["a"]}},
        {"regex": "(unclosed"},
        {"regex": "(?=look)ahead"},
        {"regex": "((" * 4000},
        {"json_schema": '{"type"'},
        {"json_schema": "[1]"},
        {"json_schema": '{"type": "colour"}'},
        {"json_schema": '{"a":' * 12_000},
        {"json_schema": json.dumps({"$ref": "https://example.org/schema.json"})},
        {"json_schema": "{}", "regex": "a"},
        {"regex": "a", "grammar": 'root ::= "a"'},
        {"grammar": "no grammar"},
        {"grammar": "root ::= " + "(" * 3000},
        {"grammar": "start: missing"},
    ],
)
def test_what_cannot_be_followed_is_refused(engine, params):
    with pytest.raises(InvalidRequest) as error:
        engine.generate("x", {"max_new_tokens": 2, **params})
    assert error.value.param in params
    assert len(error.value.message) < 500
    assert engine.generate("x", {"max_new_tokens": 2})


BOMBS = ["((a{0,1000}){0,1000}){0,1000}b", "(a|aa|aaa|b?)*" * 200, ".*x.{4000}.*y.{4000}", "(a*)*(a*)*(a*)*c"]


@pytest.mark.parametrize("bomb", BOMBS)
def test_an_expression_that_explodes_ends_its_request_or_none(engine, bomb):
    """Within the limits or with one clear error, and nothing hangs."""
    try:
        (output,) = engine.generate("aaaa", {"max_new_tokens": 8, "regex": bomb})
        assert output.completion_tokens > 0
    except RametError as error:
        refused = error.message
        assert "grammar" in refused or "regex" in refused
    assert engine.generate("x", {"max_new_tokens": 2})


def test_a_grammar_that_takes_too_long_is_given_up():
    given_up = threading.Event()

    def slow():
        assert given_up.wait(60)
        raise OSError

    compiler = GrammarCompiler(slow, 10, [0], timeout_s=0.01)
    compiler.start("a", SamplingParams(regex="a"))
    while not (done := compiler.take()):
        time.sleep(0.01)
    given_up.set()
    ((rid, error),) = done
    assert (rid, type(error)) == ("a", InvalidRequest)
    assert len(compiler) == 0


def test_a_tenants_grammars_keep_no_other_waiting_and_waiting_is_not_compiling(tiny_dir):
    go_on = threading.Event()

    class Slow(GrammarCompiler):
        def _compile(self, params, tenant):
            assert params.regex == "quick" or go_on.wait(60)
            return super()._compile(params, tenant)

    def take(rid):
        while not (done := dict(compiler.take())):
            time.sleep(0.01)
        assert done.keys() == {rid}
        return done[rid]

    compiler = Slow(lambda: Tokenizer.load(tiny_dir).to_json(), 49152, [2], timeout_s=300)
    for rid in ("a1", "a2"):
        compiler.start(rid, SamplingParams(regex="slow"), "a")
    compiler.start("b", SamplingParams(regex="quick"), "b")
    assert isinstance(take("b"), Grammar)
    while compiler.open["a1"].began_s is None:
        time.sleep(0.01)
    compiler.open["a1"].began_s -= 301
    assert isinstance(take("a1"), InvalidRequest)
    assert compiler.open["a2"].began_s is None, "its tenant's other grammar is still compiled"
    go_on.set()
    assert isinstance(take("a2"), Grammar)


def test_what_is_compiled_for_one_tenant_saves_no_other_any_time(tiny_dir):
    compiler = GrammarCompiler(lambda: Tokenizer.load(tiny_dir).to_json(), 49152, [2], timeout_s=300)
    kept = []
    for rid, tenant in enumerate(["alice", "alice", "bob"]):
        compiler.start(str(rid), SamplingParams(regex="[a-z]+"), tenant)
        while not compiler.take():
            time.sleep(0.01)
        kept.append(len(compiler._kept))
    assert kept == [1, 1, 2]


@pytest.mark.parametrize(
    "params", [{"regex": r"[a&&\d]"}, {"regex": "x[a&&b]"}, {"grammar": "start: /[a&&b]/"}, {"regex": "x|[a&&b]"}]
)
def test_an_expression_without_any_text_is_refused(params):
    name, expression = next(iter(params.items()))
    if "|" in expression:
        check_grammar(SamplingParams(**params))
        return
    with pytest.raises(InvalidRequest, match=f"{name} cannot be followed: no text matches it") as error:
        check_grammar(SamplingParams(**params))
    assert error.value.param == name


def test_a_call_that_may_be_made_goes_on_without_its_grammar(ids_dir, monkeypatch):
    """It cannot be compiled: an answer that must follow it fails, one that only may call a tool goes on."""

    def broken(*_):
        raise OSError

    driver = Driver(make_core(ids_dir))
    monkeypatch.setattr(driver.core.part(Grammars).compiler, "_compile", broken)
    plain = {"max_new_tokens": 3, "temperature": 0}
    driver.add("free", [5, 6, 7], **plain)
    driver.add("may", [5, 6, 7], **plain, grammar='start: "x"', lazy={"triggers": ["x"]})
    driver.add("must", [5, 6, 7], **plain, grammar='start: "x"')
    driver.run()
    assert driver.finish["must"].type == "error"
    assert driver.tokens["may"] == driver.tokens["free"]
