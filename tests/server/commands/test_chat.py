"""`ramet chat`: its conversation with a small model, and its commands."""

import io
import sys

import pytest

from runtime import Engine
from runtime.params import SamplingParams
from server.cli import main
from server.commands.chat import TerminalChat, harmless
from tests.runtime.features.images.conftest import seeing_dir
from tests.runtime.features.images.seeing import Reference, file_of, picture

__all__ = ["seeing_dir"]

GREEDY = SamplingParams(max_new_tokens=6, temperature=0)


@pytest.fixture(scope="module")
def engine(tiny_dir):
    with Engine(model=str(tiny_dir), dtype="float32", pool_tokens=4096) as engine:
        yield engine


def test_each_turn_says_how_much_came_from_the_tree(engine):
    shown = []
    one = TerminalChat(engine, GREEDY, "You are the keeper of a lighthouse, and you answer in few words.", shown.append)
    first, second = one.say("Is the lamp lit?"), one.say("And the sea?")
    assert first.startswith("0 of ")
    assert int(second.split()[0]) >= 32
    assert [turn["role"] for turn in one.turns] == ["user", "assistant"] * 2
    assert "".join(shown) == one.turns[1]["content"] + one.turns[3]["content"]


def test_commands_change_the_conversation(engine):
    one = TerminalChat(engine, GREEDY, "", lambda piece: None)
    one.say("A?")
    one.say("B?")
    assert one.command("/back") == "1 turns are left"
    assert one.turns[0]["content"] == "A?"
    assert one.command("/system You are a fox.") == "the system prompt is set"
    assert one.command("/new") == "a new conversation"
    assert (one.turns, one.system) == ([], "You are a fox.")
    assert "Ctrl + D ends" in one.command("/what")
    assert one.command("What?") is None


def test_lines_of_standard_input_are_turns(tiny_dir, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is a fox?\n\n/back\n"))
    options = ["--model", str(tiny_dir), "--max-new-tokens", "3", "--temperature", "0", "--pool-memory", "0.2"]
    assert main(["chat", *options]) == 0
    out = capsys.readouterr().out
    assert "prompt tokens came from the tree" in out
    assert out.endswith("0 turns are left\n")


def test_a_model_sends_a_terminal_no_commands():
    assert harmless("a\x1b[2Jb\tc\n\x07\x9b1m\x7f é") == "a␛[2Jb\tc\n␇\ufffd1m\ufffd é"


def test_a_picture_goes_with_what_is_said_next(seeing_dir, tmp_path):
    path = tmp_path / "a cat.png"
    path.write_bytes(file_of(picture(1, 100, 80)))
    (tmp_path / "none.png").write_text("<svg/>")
    with Engine(model=str(seeing_dir), dtype="float32", pool_tokens=4096) as sees:
        one = TerminalChat(sees, GREEDY, "", lambda piece: None)
        assert "No such file" in one.command(f"/image {tmp_path}/no.png")
        assert "none of the served formats" in one.command(f"/image {tmp_path}/none.png")
        assert one.command(f"/image '{path}'") == "the model sees it with what you say next"
        first, second = one.say("What is it?"), one.say("And now?")
        assert first.startswith("0 of ")
        assert int(second.split()[0]) >= 80, "its rows are in the tree"
        text = "<|im_start|>User:<image>What is it?<end_of_utterance>\nAssistant:"
        expected = Reference(seeing_dir).greedy(text, [picture(1, 100, 80)], 6)
        assert one.turns[1]["content"] == sees.tokenizer.decode(expected)
        assert one.command("/new") == "a new conversation"
        assert int(one.say("What is it?").split()[2]) < 40


def test_a_model_that_reads_text_alone_is_shown_no_picture(engine):
    one = TerminalChat(engine, GREEDY, "", lambda piece: None)
    assert "reads text alone" in one.command("/image cat.png")
