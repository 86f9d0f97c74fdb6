"""Tokens outside of tokenizer.json, against transformers over the same directories; and the ends of turns."""

import json

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from runtime import Engine
from runtime.errors import ModelError
from runtime.models.tokenizer import Tokenizer, ends_of_turns
from tests.tiny import save_tiny

END = "<|endoftext|>"
TEXTS = ["a<A> <B>b", f"<C>{END} <A>", "<D> x<A>y", "plain"]


def token(text: str, special: bool = True, **more) -> dict:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": text, "special": special, **flags, **more}


def write(directory, settings: dict, **files: dict) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast.add_special_tokens([END])
    fast.save(str(directory / "tokenizer.json"))
    files = {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", **settings}, **files}
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"added_tokens_decoder": {"256": token(END), "257": token("<A>"), "258": token("<B>", False)}}, {}),
        ({"added_tokens_decoder": {"260": token("<A>"), "258": token("<B>", False, rstrip=True)}}, {}),
        ({"added_tokens_decoder": {"256": token(END, False), "257": token("<A>", lstrip=True)}}, {}),
        ({}, {"added_tokens": {"<A>": 258, "<B>": 257}}),
        ({"eos_token": "<A>"}, {"added_tokens": {"<A>": 258, "<B>": 257}}),
        ({"additional_special_tokens": ["<A>", {"__type": "AddedToken", **token("<B>", lstrip=True)}]}, {}),
        ({"extra_special_tokens": {"image_token": "<A>", "eot_token": "<B>"}}, {}),
        ({"extra_special_tokens": ["<B>", "<A>"], "additional_special_tokens": ["<C>"]}, {}),
        ({"eos_token": "<A>", "pad_token": "<B>", "image_token": "<C>"}, {}),
        ({"eos_token": END, "unk_token": "a"}, {}),
        ({}, {"special_tokens_map": {"eos_token": token("<A>"), "additional_special_tokens": ["<B>"]}}),
        ({"eos_token": END}, {"special_tokens_map": {"eos_token": "<A>"}}),
        ({"added_tokens_decoder": {"257": token("<B>")}}, {"special_tokens_map": {"eos_token": "<A>"}}),
        (
            {"added_tokens_decoder": {"258": token("<B>")}, "eos_token": "<A>", "additional_special_tokens": ["<C>"]},
            {"added_tokens": {"<D>": 300}},
        ),
        ({}, {}),
    ],
)
def test_equals_transformers(tmp_path, config, files):
    write(tmp_path, config, config={"model_type": "llama", "vocab_size": 1000}, **files)
    mine, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = mine.encode(text)
        assert ids == theirs(text)["input_ids"], text
        for skip in (True, False):
            assert mine.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert mine.special_ids == {i for i, one in theirs.added_tokens_decoder.items() if one.special}
    assert mine.describe()["eos_token"] == theirs.eos_token
    named = [theirs.special_tokens_map.get(name) for name in ("eos_token", "eot_token")]
    assert list(ends_of_turns(tmp_path)) == [theirs.convert_tokens_to_ids(text) for text in named if text]


def test_a_token_for_which_the_model_has_no_row_stays_text(tmp_path):
    config = {"pad_token": "<B>", "added_tokens_decoder": {"257": token("<A>")}}
    write(tmp_path, config, config={"model_type": "llama", "vocab_size": 258})
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("<A>") == [257]
    assert len(tokenizer.encode("<B>")) == 3


@pytest.mark.parametrize("listed", [{"x": token("<A>")}, {"257": 5}, {"257": {}}, ["<A>"]])
def test_a_list_that_is_none_is_refused(tmp_path, listed):
    write(tmp_path, {"added_tokens_decoder": listed})
    with pytest.raises(ModelError, match="added tokens"):
        Tokenizer.load(tmp_path)


def test_an_answer_ends_with_the_end_that_the_tokenizer_names(tmp_path):
    """The configuration names the base model's end alone."""
    save_tiny("llama", tmp_path)
    write(tmp_path, {"eos_token": "<|im_end|>", "added_tokens_decoder": {"257": token("<|im_end|>")}})
    with Engine(str(tmp_path), dtype="float32", pool_tokens=256) as engine:
        assert engine.info.eos_token_ids[-1] == 257
        (output,) = engine.generate("a", {"logit_bias": {257: 100}, "max_new_tokens": 5})
        assert (output.finish.type, output.finish.matched, output.completion_tokens) == ("stop", 257, 1)
