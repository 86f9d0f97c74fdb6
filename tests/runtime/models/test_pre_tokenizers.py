"""Pre-tokenizers of GGUF files: where text is cut, and that llama.cpp makes the same tokens where it is installed."""

import json

import gguf
import httpx
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from runtime.errors import ModelError
from runtime.models.pre_tokenizers import _NAMED, cuts_of

# A vowel sign, a Chinese and a Japanese character, and all kinds of ends of lines.
TEXT = "I'd sAY'LL 12345½ fooBar हि 好か!?\n\n  x\r\ny"
PIECES = {
    "gpt-2": "I|'d| sAY|'|LL| 12345½| fooBar| ह|ि| 好か|!?|\n\n | x|\r|\n|y",
    "smollm": "I|'d| sAY|'|LL| |1|2|3|4|5|½| fooBar| ह|ि| 好か|!?|\n\n | x|\r|\n|y",
    "default": "I|'|d| sAY|'|LL| |123|45½| fooBar| ह|ि| 好か|!?|\n\n | x|\r|\n|y",
    "falcon": "I|'|d| sAY|'|LL| |123|45½| fooBar| ह|ि| 好か|!?|\n\n | x|\r|\n|y",
    "llama-bpe": "I|'d| sAY|'LL| |123|45½| fooBar| ह|ि| 好か|!?\n\n| | x|\r\n|y",
    "glm4": "I|'d| sAY|'LL| |123|45½| fooBar| ह|ि| 好か|!?\n\n| | x|\r\n|y",
    "minicpm5": "I|'d| sAY|'LL| |123|45½| fooBar| ह|ि| 好か|!?\n\n| | x|\r\n|y",
    "qwen2": "I|'d| sAY|'LL| |1|2|3|4|5|½| fooBar| ह|ि| 好か|!?\n\n| | x|\r\n|y",
    "qwen35": "I|'d| sAY|'LL| |1|2|3|4|5|½| fooBar| हि| 好か|!?\n\n| | x|\r\n|y",
    "laguna": "I|'d| sAY|'LL| |1|2|3|4|5|½| fooBar| ह|ि| 好か|!?|\n\n| | x|\r|\n|y",
    "seed-coder": "I|'d| sAY|'LL| |1|2|3|4|5|½| fooBar| ह|ि| 好か|!?|\n\n| | x|\r\n|y",
    "exaone-moe": "I|'d| sAY|'LL| |1|2|3|4|5|½| fooBar हि 好か|!?\n|\n| | x|\r\n|y",
    "gpt-4o": "I'd| s|AY'LL| |123|45½| foo|Bar| हि| 好か|!?\n\n| | x|\r\n|y",
    "tekken": "I|'d| s|AY|'LL| |1|2|3|4|5|½| foo|Bar| हि| 好か|!?\n\n| | x|\r\n|y",
    "kimi-k2": "I'd| s|AY'LL| |123|45½| foo|Bar| हि| |好|か|!?\n\n| | x|\r\n|y",
    "deepseek-llm": "I|'|d| sAY|'|LL| |12345½| fooBar| |हि| |好か|!?|\n|\n| | x|\r|\n|y",
    "deepseek-coder": "I|'|d| sAY|'|LL| |1|2|3|4|5|½| fooBar| |ह|ि| |好か|!?|\n|\n| | x|\r|\n|y",
    "deepseek-v3": "I|'d| sAY|'LL| |123|45½| fooBar| हि| |好か|!?\n\n| | x|\r\n|y",
    "youtu": "I'd| s|AY'LL| |1|2|3|4|5|½| foo|Bar| हि| |好か|!?\n\n| | x|\r\n|y",
    "poro-chat": "I'd| sAY'LL| 12345½| fooBar| हि| 好か|!?\n\n | x|\r\n|y",
    "viking": "I'd| sAY'LL| |1|2|3|4|5|½| fooBar| हि| 好か|!?\n\n | x|\r\n|y",
    "superbpe": "I'd sAY'LL |12|345½| fooBar हि 好か!?\n\n  x\r\ny",
}


def pieces(name, text):
    return [text[first:stop] for _, (first, stop) in cuts_of("m.gguf", name).build().pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PIECES)
def test_text_is_cut_as_the_model_was_published(name):
    assert "|".join(pieces(name, TEXT)) == PIECES[name]


def test_what_only_one_family_does():
    assert pieces("jais-2", "a" + " " * 13 + "b") == ["a", " " * 8, " " * 4, " b"]
    assert pieces("tiny_aya", "1234567 12ab") == ["1", "234", "567", " ", "12", "ab"]
    assert pieces("ufakzeka", "Türkiye'nin") == pieces("qwen2", "Türkiye'nin") == ["Türkiye", "'nin"]
    assert pieces("ufakzeka", "Ali'den") == ["Ali", "'den"] != pieces("qwen2", "Ali'den")
    assert pieces("bailingmoe", "a \n\n b") == ["a", " \n\n", " b"]
    assert pieces("bloom", "a, b。c") == ["a", ",", " b", "。", "c"]


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ModelError, match=r"m\.gguf: pre-tokenizer 'afmoe'; supported in GGUF are gpt-2, .*tekken"):
        cuts_of("m.gguf", "afmoe")


# Where llama.cpp approximates what the models were published with.
OTHERWISE = {"gpt-4o", "llama4", "kanana2", "minimax-m2", "tekken", "tiny_aya", "cohere2moe", "kimi-k2", "youtu"}
ALPHABET = "abcDEF 019 \n\t.,'!$é ßñ中文かなハ한글ก์हिЖж😀ǅ½-_/'sll'\r  "


@pytest.fixture(scope="module")
def vocabulary():
    """Tokens and merges that cross all kinds of cuts, so that a cut elsewhere shows; and texts."""
    random = np.random.default_rng(0)
    texts = [TEXT, *("".join(random.choice([*ALPHABET], random.integers(1, 60))) for _ in range(200))]
    trained = Tokenizer(models.BPE())
    anywhere = pre_tokenizers.Split(Regex(r"[\s\S]{40}"), behavior="isolated")
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.pre_tokenizer = pre_tokenizers.Sequence([anywhere, spelled])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    trained.train_from_iterator(texts, trainer)
    found = json.loads(trained.to_str())["model"]
    return sorted(found["vocab"], key=found["vocab"].get), found["merges"], texts


def write(path, name, tokens, merges):
    """A llama of one layer."""
    writer, random, width = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0), 32
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(width)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {"token_embd": (len(tokens), width), "output_norm": (width,), "blk.0.attn_norm": (width,)}
    shapes |= {"blk.0.ffn_norm": (width,)}
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{part}"] = (width, width)
    for tensor, shape in shapes.items():
        writer.add_tensor(f"{tensor}.weight", random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", sorted(_NAMED.keys() - OTHERWISE))
def test_llama_cpp_makes_the_same_tokens(name, vocabulary, tmp_path):
    peer = pytest.importorskip("xllamacpp", reason="llama.cpp's own tokenizers need the package xllamacpp")
    tokens, merges, texts = vocabulary
    write(tmp_path / "m.gguf", name, tokens, merges)
    params = peer.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(tmp_path / "m.gguf"), 64, 1, False
    server, cuts = peer.Server(params), cuts_of("m.gguf", name)
    ours = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(m) for m in merges],
                                ignore_merges=cuts.whole))  # fmt: skip
    ours.pre_tokenizer = cuts.build()
    with httpx.Client(base_url=server.listening_address) as client:
        for text in texts:
            theirs = client.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"]
            assert [0] * cuts.begins + ours.encode(text).ids == theirs
