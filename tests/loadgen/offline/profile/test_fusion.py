"""`ramet profile --fusion`: a table that `auto` reads, measured on a small model."""

import json
import shutil

import pytest

from loadgen.offline.document_methods import METHODS
from loadgen.offline.profile.fusion import Quotations
from loadgen.offline.profile.settings import FusionSettings
from runtime.features.chunks.documents.table import choose, read_table
from server.cli import main


def test_auto_reads_what_was_measured(tiny_dir, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(tiny_dir, model)
    small = ["--samples", "3", "--length", "240", "--ratios", "30,99", "--dtype", "float32"]
    assert read_table(model) is None
    assert main(["profile", "--fusion", "--model", str(model), "--out", str(model / "fusion.json"), *small]) == 0
    rows = {(row.method, row.ratio): row for row in read_table(model)}
    assert len(rows) == (len(METHODS) - 3) * 2 + 3, "LegoLink by k, PIE and full reuse have no ratio"
    for method in ("a3", "cacheblend", "prophetkv", "passages"):
        assert rows[method, 0.3].kl > 0
        assert rows["pie", None].cost < rows[method, 0.3].cost < rows[method, 0.99].cost
    assert choose(read_table(model), 100).cost == min(row.cost for row in rows.values())
    assert choose(read_table(model), 0) is None
    assert rows["legolink", None].k == 16
    assert json.loads((model / "fusion.json").read_text())["settings"]["length"] == 240
    assert sum(line.startswith("a3 ") for line in capsys.readouterr().out.splitlines()) == 2


def test_the_answer_stands_in_a_document_behind_what_is_quoted(tokenizer):
    source = Quotations(tokenizer, FusionSettings(length=200))
    drawn = [source.sample(number) for number in range(8)]
    assert drawn == [source.sample(number) for number in range(8)]
    for prompt, answer in drawn:
        assert [stop - start for start, stop in prompt.documents] == [50] * 4
        wanted = [*prompt.tokens[-16:], *answer]
        texts = [prompt.tokens[start:stop].tolist() for start, stop in prompt.documents]
        assert any(text[i : i + len(wanted)] == wanted for text in texts for i in range(50))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ratios", "0,5"], "argument --ratios: ratios are percentages from 1 to 99"),
        (["--kl-steps", "50"], "argument --kl-steps: not with --fusion"),
        (["--length", "9"], "argument --length: "),
        (["--prompts", "x.txt"], "argument --prompts: not with --fusion"),
    ],
)
def test_wrong_options_are_one_line(options, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["profile", "--fusion", "--out", str(tmp_path / "t.json"), *options])
    assert end.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_model_without_room_is_refused(tiny_dir, tmp_path, capsys):
    options = ["--model", str(tiny_dir), "--context-length", "200", "--out", str(tmp_path / "t.json")]
    assert main(["profile", "--fusion", *options]) == 1
    assert "do not fit into 200" in capsys.readouterr().err
