"""The example of documents with LangChain, unchanged, on the real model."""

import re

import pytest


def test_langchain(server, client, capsys):
    pytest.importorskip("langchain_openai")
    from server.features.chunks.examples import with_langchain

    answers = with_langchain.main(server.url, "smollm2", "legolink")
    assert len(answers) == 3
    assert all(answers)
    found = [list(map(int, re.findall(r"\d+", line)[:2])) for line in capsys.readouterr().out.splitlines()]
    assert len({prompt for _, prompt in found}) == 1
    assert all(prompt / 2 < cached < prompt for cached, prompt in found[1:]), "documents in a new order"
