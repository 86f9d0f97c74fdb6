"""`ramet explain A.json B.json`."""

import json
import re
from pathlib import Path

import pytest

from runtime.errors import RametError
from server.cli import main
from server.commands.explain import explain_files

HELP = "You help with trips. Be short."


def tool(name: str) -> dict:
    return {"type": "function", "function": {"name": name, "description": "Gives."}}


def chat(said: str, *tools: dict, question: str = "Where is Rome?", **more) -> dict:
    messages = [{"role": "system", "content": f"{said} {HELP}"}, {"role": "user", "content": question}]
    given = {"tools": [*tools]} if tools else {}
    return {"messages": messages, **given, **more}


def plain(told: str) -> str:
    """A table's text on one line, without its frame."""
    return " ".join(told.translate(str.maketrans("│┃━─╇╈┏┓┡┩├┤└┴┘┼┬┳", " " * 18)).split())


@pytest.fixture
def explain(tokenizer, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")

    def run(first, second) -> str:
        texts = tuple(body if isinstance(body, str) else json.dumps(body) for body in (first, second))
        explain_files(texts, ("a.json", "b.json"), tokenizer)
        return plain(capsys.readouterr().out)

    return run


def test_the_command(tiny_dir, tmp_path, capsys):
    names = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for name, day in zip(names, ("Monday", "Tuesday"), strict=True):
        Path(name).write_text(json.dumps(chat(f"It is {day}.")), encoding="utf-8")
    assert main(["explain", *names, "--model", str(tiny_dir)]) == 0
    assert "characters of the system prompt" in capsys.readouterr().out
    Path(names[1]).write_text("{", encoding="utf-8")
    assert main(["explain", *names, "--model", str(tiny_dir)]) == 1
    assert capsys.readouterr().err.startswith(f"ramet: {names[1]} is no request: ")


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (chat("It is 2026-11-22, 15:03."), chat("It is 2026-11-23, 08:41."),
         ["characters of the system prompt", "2, 15:03. You help", "3, 08:41. You help"]),
        (chat("It is Monday."), chat("It is Saturday."), ["behind 6 characters of the system prompt"]),
        (chat("Hi.", tool("get"), tool("put")), chat("Hi.", tool("put"), tool("get")), ["characters of the tools"]),
        (chat("Hi."), chat("Hi.", tool("get"), tool("put")), ["behind 0 characters of the tools"]),
        (chat("Hi.", question="Where?"), chat("Hi.", question="When?"), ["behind 3 characters of message 2", "re?<"]),
        (chat("Hi."), chat("Hi.", tool_choice="none", tools=[tool("get")], temperature=7, unknown=1), ["the same"]),
        (chat("Hi."), chat("Hi.", cache_salt="x"), ["Both prompts are the same", "cache_salt or cache_scope differ"]),
        ({"text": "Once upon a time there"}, {"prompt": ["Once upon a day there", "x"], "model": "m"},
         ["They part at token 3, behind 12 characters of the prompt", "2 of 5 tokens are not reused"]),
        ({"input_ids": [504, 3575]}, {"input_ids": [[504, 3575, 282]]}, ["The first prompt begins the other one"]),
        ({"input_ids": [504, 3575]}, {"prompt": [504]}, ["The second prompt begins the other one"]),
    ],
)  # fmt: skip
def test_the_place_and_both_texts(explain, first, second, said):
    told = explain(first, second)
    for words in said:
        assert words in told, told


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is no request: "),
        ("[1]", "is no request: not a JSON object"),
        ('{"messages": [{"role": "king", "content": "x"}]}', "is no request: messages.0.role: "),
        ('{"model": "m"}', "has neither messages nor a prompt, text or input_ids"),
        ('{"prompt": []}', "has neither messages nor a prompt"),
        ('{"input_ids": [99999999]}', "token id 99999999 is out of range"),
        ('{"messages": [{"role": "user", "content": [{"type": "document", "document": {"id": "doc-1"}}]}]}', "doc-1"),
    ],
)
def test_what_is_no_request_is_refused(explain, text, problem):
    with pytest.raises(RametError, match=re.escape(problem)):
        explain(chat("Hi."), text)
