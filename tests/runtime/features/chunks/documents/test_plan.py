"""From what a request asks for to the message to the engine; the table of the method auto."""

import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from runtime.errors import InvalidRequest, ModelError
from runtime.features.chunks.ask import (
    ChunksAsk,
    DocumentMethod,
    DocumentsReport,
    ModuleAsk,
    ModulesReport,
    ReuseParams,
)
from runtime.features.chunks.documents import table
from runtime.features.chunks.documents.plan import DocumentPlanner, plan_encoding
from runtime.features.chunks.documents.prompt import LEAD_ID, TokenizedPrompt
from runtime.features.chunks.documents.table import MeasuredMethod, choose, read_table
from runtime.features.chunks.schemas.compile import ModulePrompt
from runtime.models.spec import DecoderSpec

PROMPT = TokenizedPrompt(array("i", range(200)), [(2, 66), (67, 180)], ["a", "b"])
ROWS = [
    {"method": "pie", "kl": 0.5, "cost": 0.02},
    {"method": "a3", "ratio": 0.15, "granularity": "token", "kl": 0.1, "cost": 0.2},
    {"method": "cacheblend", "ratio": 0.3, "kl": 0.1, "cost": 0.3},
    {"method": "legolink", "k": 32, "chunk_tokens": 256, "kl": 0.05, "cost": 0.3},
]

MODULE = ModuleAsk(b"\1\0\0\0", [(0, 4)])
MODULES = ModulePrompt([5], ChunksAsk(modules=[MODULE], anchors=[(0, 9)]), [1], 10)


def plan(planner: DocumentPlanner | None = None, **asked):
    params = ReuseParams(**asked) if asked else None
    if params is not None:
        params.check()
    return (planner or DocumentPlanner()).plan(PROMPT, params)


def report(**said) -> DocumentsReport:
    """The engine's report, with what it says of `said`."""
    options = {"method": "a3", "ratio": 0.15, "granularity": "token", "chunk_tokens": 512}
    names = {"documents": ["a", "b"], "computed_documents": [], "chosen_before": False}
    counts = dict.fromkeys(("recomputed_rows", "row_layers", "reused_tokens", "computed_tokens"), 0)
    return DocumentsReport(**options, **names, **counts, **said)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"method": "a3"}, {"method": "a3", "ratio": 0.15}),
        ({"method": "passages"}, {"method": "passages", "ratio": 0.2}),
        ({"method": "cacheblend", "ratio": 0}, {"method": "cacheblend", "ratio": 0}),
        ({"method": "prophetkv", "ratio": 0.3}, {"method": "prophetkv", "ratio": 0.3}),
        ({"method": "legolink"}, {"method": "legolink", "k": 16}),
        ({"method": "legolink", "k": 0}, {"method": "legolink", "k": 0}),
        ({"method": "legolink", "ratio": 0.1}, {"method": "legolink", "ratio": 0.1}),
        ({"method": "full"}, {"method": "full"}),
        ({"method": "pie", "chunk_tokens": 32, "granularity": "page"},
         {"method": "pie", "chunk_tokens": 32, "granularity": "page", "shortest": 32}),
    ],
)  # fmt: skip
def test_the_message_has_the_options_of_the_method(asked, message):
    planned = plan(**asked)
    given = {"documents": [(2, 66), (67, 180)], "names": ["a", "b"], "shortest": 32}
    message = given | {"granularity": "token", "chunk_tokens": 512} | message
    assert planned.ask == ChunksAsk(**message)
    assert (planned.tokens, planned.length, planned.positions) == (list(range(200)), 200, 200)
    assert planned.report(None, 3) is None
    assert planned.report(report(), 3) == report()


def test_nothing_is_reused_unless_the_request_or_the_server_asks():
    assert plan().ask is plan(method="none").ask is None
    said = {"strategy": "prefix", "exact": True, "method": "none", "documents": ["a", "b"]}
    assert plan().report(None, 3).fields() == {**said, "reused_tokens": 3, "computed_tokens": 197}
    assert plan(DocumentPlanner("pie")).ask.method == "pie"
    assert plan(DocumentPlanner("pie"), method="none").ask is None
    assert plan(DocumentPlanner("pie"), method="a3").ask.method == "a3"


def test_short_documents_are_computed_in_full_and_the_answer_says_so():
    short, mixed = [(2, 30), (67, 98)], [(2, 33), (67, 99)]
    planned = DocumentPlanner().plan(replace(PROMPT, documents=short), ReuseParams(method="a3"))
    assert planned.ask is None
    said = planned.report(None, 0)
    assert (said.method, said.exact) == ("none", True)
    assert said.note == "documents of fewer than 32 tokens are computed in full"
    planned = DocumentPlanner().plan(replace(PROMPT, documents=mixed), ReuseParams(method="a3"))
    assert planned.ask.shortest == 32
    assert planned.report(report(note="of the engine"), 0) == report(note=said.note)
    assert DocumentPlanner().plan(replace(PROMPT, documents=short), ReuseParams(method="a3", chunk_tokens=28)).ask


def test_prompts_without_documents_reuse_none():
    text = TokenizedPrompt(array("i", [1]), [], [])
    planned = DocumentPlanner("pie").plan(text, None)
    assert (planned.ask, planned.report(None, 0)) == (None, None)
    assert DocumentPlanner().plan(text, ReuseParams(method="none")).ask is None
    with pytest.raises(InvalidRequest, match="this one has none"):
        DocumentPlanner().plan(text, ReuseParams(method="pie"))


@pytest.mark.parametrize("of_schema", [None, ReuseParams(method="a3", granularity="page")])
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"method": "prophetkv", "ratio": 0.3}, {"method": "prophetkv", "ratio": 0.3}),
        ({"method": "legolink"}, {"method": "legolink", "k": 16}),
        ({"method": "none"}, {}),
        ({"method": "full", "granularity": "page"}, {"method": "full", "granularity": "page"}),
    ],
)
def test_modules_are_repaired_as_a_request_asks(asked, message, of_schema):
    """A prompt that is planned again has nothing of the first time."""
    prompt = replace(MODULES, repair=of_schema)
    again = DocumentPlanner().repair(prompt, ReuseParams(method="cacheblend"))
    for one in (prompt, again):
        planned = DocumentPlanner("pie").repair(one, ReuseParams(**asked))
        assert planned == replace(prompt, ask=ChunksAsk(modules=[MODULE], anchors=[(0, 9)], **message))


def test_modules_of_a_request_that_does_not_ask_are_repaired_as_their_schema_says():
    """And not as the server's default for documents."""
    assert DocumentPlanner("pie").repair(MODULES, None) == MODULES
    planned = DocumentPlanner("pie").repair(replace(MODULES, repair=ReuseParams(method="a3", ratio=0.5)), None)
    assert (planned.ask.method, planned.ask.ratio) == ("a3", 0.5)


def test_modules_are_not_cut():
    with pytest.raises(InvalidRequest) as error:
        DocumentPlanner().repair(MODULES, ReuseParams(method="a3", chunk_tokens=512))
    assert error.value.param == "reuse.chunk_tokens"


def test_auto_repairs_modules_by_the_table_and_else_all_rows():
    table = [MeasuredMethod.model_validate(row) for row in ROWS]
    planned = DocumentPlanner(table=table).repair(MODULES, ReuseParams(method="auto", max_kl=0.05))
    assert (planned.ask.method, planned.ask.k, planned.auto) == ("legolink", 32, "measured KL 0.05")
    engine = ModulesReport(modules=[], computed_modules=[], reused_tokens=0, computed_tokens=1)
    assert planned.report(engine, 0).fields()["auto"] == "measured KL 0.05"
    for bound in (None, 0.05):
        planned = DocumentPlanner().repair(MODULES, ReuseParams(method="auto", max_kl=bound))
        assert (planned.ask.method, planned.ask.ratio) == ("legolink", 1)
        assert planned.auto == "no table for this model"
        assert planned.report(None, 0) is None


@pytest.mark.parametrize("method", get_args(DocumentMethod))
def test_a_document_is_encoded_as_its_readers_expect_it(method):
    """Alone, or behind the lead of a method that has one."""
    prompt = TokenizedPrompt(array("i", range(70)), [(0, 70)], ["a"], array("i", [7, 8]))
    planned = plan_encoding(prompt, method, 128)
    assert (planned.length, planned.ask.documents, planned.ask.chunk_tokens) == (70, [(0, 70)], 128)
    lead = prompt.lead.tobytes() if method == "passages" else b""
    assert planned.ask.lead == lead
    read = DocumentPlanner().plan(prompt, ReuseParams(method=method)).ask
    assert read is None if method == "none" else read.lead == lead


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"method": "pie", "ratio": 0.1}, "ratio"),
        ({"method": "full", "ratio": 0}, "ratio"),
        ({"method": "none", "ratio": 0.1}, "ratio"),
        ({"method": "auto", "max_kl": 1, "ratio": 0.1}, "ratio"),
        ({"method": "a3", "k": 16}, "k"),
        ({"method": "legolink", "k": 16, "ratio": 0.1}, "k"),
        ({"method": "a3", "max_kl": 1}, "max_kl"),
        ({"method": "auto", "granularity": "page"}, "granularity"),
        ({"method": "auto", "chunk_tokens": 256}, "chunk_tokens"),
    ],
)
def test_an_option_of_another_method_is_refused(asked, param):
    with pytest.raises(InvalidRequest) as error:
        ReuseParams(**asked).check()
    assert error.value.param == f"reuse.{param}"


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("ratio", 0, 1), ("chunk_tokens", 16, 4096), ("k", 0, 512)],
)
def test_options_have_ranges(name, least, most):
    for value in (least, most):
        assert getattr(ReuseParams(method="a3", **{name: value}), name) == value
    for value in (least - 1, most + 1):
        with pytest.raises(ValidationError):
            ReuseParams(method="a3", **{name: value})


# -- auto


def write(directory: Path, identity: dict, rows: object = ROWS) -> None:
    (directory / "fusion.json").write_text(json.dumps({"model": identity, "measured": rows}))


@pytest.fixture
def directory(tiny_dir, tmp_path) -> Path:
    (tmp_path / "config.json").write_text((tiny_dir / "config.json").read_text())
    return tmp_path


def test_what_was_measured_of_another_encoding_does_not_count(directory, tiny_dir):
    row = {"method": "passages", "lost": 0.0, "lost_interval": [0, 0], "questions": 200, "cost": 0.3}
    rows = [row, row | {"lead": "of old"}, row | {"lead": LEAD_ID, "cost": 0.4}, ROWS[0]]
    write(directory, DecoderSpec.load(tiny_dir).identity, rows)
    assert [(one.method, one.cost) for one in read_table(directory)] == [("passages", 0.4), ("pie", ROWS[0]["cost"])]


@pytest.mark.parametrize(("max_kl", "method"), [(1, "pie"), (0.5, "pie"), (0.2, "a3"), (0.05, "legolink"), (0, None)])
def test_the_cheapest_method_within_the_bound_is_chosen(max_kl, method):
    found = choose([MeasuredMethod(**row) for row in ROWS], max_kl)
    assert (found.method if found else None) == method


def test_the_choice_is_served_as_it_was_measured_and_explained(directory):
    write(directory, DecoderSpec.load(directory).identity)
    planner = DocumentPlanner.load("none", directory)
    planned = plan(planner, method="auto", max_kl=0.05)
    assert (planned.ask.method, planned.ask.k, planned.ask.chunk_tokens) == ("legolink", 32, 256)
    assert planned.report(report(), 0) == report(auto="measured KL 0.05")
    assert planned.report(report(note="of the engine"), 0).note == "of the engine"
    assert plan(planner, method="auto", max_kl=0.1).ask.method == "a3"
    short = planner.plan(replace(PROMPT, documents=[(2, 30), (67, 98)]), ReuseParams(method="auto", max_kl=0.1))
    assert "auto" not in short.report(None, 0).fields(), "a measurement of what was not reused"
    none = plan(planner, method="auto", max_kl=0.01)
    assert none.ask is None
    assert none.report(None, 0).auto == "no method was shown to lose so little"


def counted(lost: float, questions: int = 200, margin: float = 0.06) -> dict:
    return {"lost": lost, "lost_interval": (lost - margin, lost + margin), "questions": questions}


@pytest.mark.parametrize(
    ("lost", "asked", "select", "reason"),
    [
        ([0.3, 0.02], {}, "a3", "lost 2 points of right answers in 200 questions"),
        ([0.02, -0.01], {}, "pie", "lost 2 points of right answers in 200 questions"),
        ([0.3, 0.021], {}, None, "no method was shown to lose so little"),
        ([0.3, 0.0], {"max_kl": 0.5}, "legolink", "measured KL 0.05"),  # the others' KL is not known
    ],
)
def test_right_answers_decide_unless_a_kl_is_asked_for(lost, asked, select, reason, directory):
    rows = [{**row, **counted(lost[i]), "kl": None} if i < len(lost) else row for i, row in enumerate(ROWS)]
    write(directory, DecoderSpec.load(directory).identity, rows)
    planned = plan(DocumentPlanner.load("none", directory), method="auto", **asked)
    assert (planned.ask.method if planned.ask else None) == select
    assert planned.auto == reason


@pytest.mark.parametrize(
    ("rows", "chosen", "lacking"),
    [
        ({"legolink": counted(0.0, 8, 0.5)}, None, 192),
        ({"legolink": counted(0.0, 8, 0.0)}, None, 22),  # eight equal answers have an empty interval
        ({"legolink": counted(0.0, 100, 0.12)}, None, 44),
        ({"legolink": counted(0.0, 144, 0.1)}, "legolink", 0),
        ({"legolink": {"lost": 0.0}}, None, 30),  # a table of an earlier version
        ({"legolink": counted(0.0, 8, 0.5), "passages": counted(0.0, 8, 0.5)}, None, 192),
        ({"legolink": counted(0.2, 8, 0.5)}, None, 22),
        ({"legolink": counted(0.2, 100)}, None, 0),
        ({"legolink": counted(0.0, 100, 0.12), "passages": counted(0.2, 100)}, None, 44),
        ({"legolink": counted(0.0, 100, 0.12), "a3": counted(0.02)}, "a3", 44),
    ],
)
def test_auto_believes_a_table_by_the_number_of_its_questions(rows, chosen, lacking, directory):
    """A few questions always have some cheap method that lost nothing by chance."""
    ratios = {"passages": 0.3, "a3": 0.15}
    table = [{"method": name, "ratio": ratios.get(name), "cost": 0.2, **row} for name, row in rows.items()]
    write(directory, DecoderSpec.load(directory).identity, table)
    planner = DocumentPlanner.load("none", directory)
    planned = plan(planner, method="auto")
    assert (planned.ask.method if planned.ask else None) == chosen
    assert planner.table[0].lacking == lacking


def test_without_right_answers_auto_is_exact(directory):
    """No method kept them on every real model that was measured."""
    planner = DocumentPlanner.load("none", directory)
    write(directory, DecoderSpec.load(directory).identity)
    measured = plan(DocumentPlanner.load("none", directory), method="auto")
    assert (measured.ask, measured.auto) == (None, "no method was shown to lose so little")
    bounded = plan(planner, method="auto", max_kl=5)
    assert bounded.ask is None, "no KL is known"
    assert bounded.report(None, 0).fields().items() >= {"method": "none", "auto": "no table for this model"}.items()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"method": "pie", "kl": 1}], "cost: Field required"),
        ([{"method": "pie", "cost": 1}], "kl or lost is missing"),
        ([{"method": "best", "kl": 1, "cost": 1}], "method: "),
        ([{"method": "auto", "kl": 1, "cost": 1}], "method: "),
        ([{"method": "pie", "kl": -1, "cost": 1}], "kl: "),
        ([], "it has no rows"),
        ({}, "it has no rows"),
    ],
)
def test_a_broken_table_is_an_error_at_the_start(rows, words, directory):
    write(directory, DecoderSpec.load(directory).identity, rows)
    with pytest.raises(ModelError, match=words):
        DocumentPlanner.load("none", directory)


def test_a_published_table_serves_the_models_that_it_is_for(directory, tmp_path_factory, monkeypatch):
    published = tmp_path_factory.mktemp("tables")
    monkeypatch.setattr(table, "_PUBLISHED", published)
    identity = DecoderSpec.load(directory).identity
    write(published, {**identity, "num_layers": 99})
    assert read_table(directory) is None
    (published / "another.json").write_text(json.dumps({"model": identity, "measured": ROWS[:1]}))
    assert [one.method for one in read_table(directory)] == ["pie"]
    write(directory, identity)
    assert len(read_table(directory)) == len(ROWS)


def test_a_table_of_another_model_is_an_error(directory):
    write(directory, {**DecoderSpec.load(directory).identity, "num_layers": 99})
    with pytest.raises(ModelError, match=r"is for .*99"):
        read_table(directory)
