"""The plain reading itself: against full prefill, against the papers' own words, and where both must agree."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import rotate_half

from tests.runtime.features.chunks.plain import draw_tokens
from tests.runtime.features.chunks.reference import DENSE, Ask, Reference

KINDS = ("llama", "llama_llama3", "llama_yarn")
OUTPUT = [5, 6, 7]
CLOSE = {"atol": 2e-3, "rtol": 0}


def ask(method: str, documents: tuple[tuple[int, int], ...], length: int, **fields) -> Ask:
    tokens = draw_tokens(random.Random(length), length)
    return Ask(tuple(tokens), documents, method, **fields)


def around(method: str, **fields) -> Ask:
    """A system prompt, two documents of several chunks with text between them, and a question."""
    return ask(method, ((7, 60), (64, 120)), 131, chunk_tokens=20, **fields)


# -- limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_one_document_at_the_beginning_is_a_prefix(references, kind):
    one = ask("pie", ((0, 60),), 71, chunk_tokens=60)
    dense = references[kind].dense(one.prompt, OUTPUT)
    torch.testing.assert_close(references[kind].logits(one, [], OUTPUT), dense, **CLOSE)
    cut = references[kind].logits(replace(one, chunk_tokens=20), [], OUTPUT)
    assert (cut - dense).abs().max() > 0.1, "its chunks do not see each other"


@pytest.mark.parametrize("method", DENSE)
def test_two_layers_are_exact_up_to_the_first_token(rope_dirs, method):
    """Layers 0 and 1 of the prompt's rows are; those of the output read what is stored."""
    shallow = Reference(rope_dirs["llama"])
    shallow.model.model.layers = shallow.model.model.layers[:2]
    few = around(method, ratio=0.1)
    dense = shallow.dense(few.prompt, OUTPUT)
    fused = shallow.logits(few, shallow.select(few, 1), OUTPUT)
    torch.testing.assert_close(fused[0], dense[0], **CLOSE)
    assert (fused[1:] - dense[1:]).abs().max() > 0.1


# -- chunks that were computed at 0, and moved -------------------------------------------------------------------


@torch.inference_mode()
def moved(reference: Reference, one: Ask, output: list[int]):
    """PIE as its paper has it: caches of chunks side by side, keys rotated on by the chunks' starts.

    Returns the last pass of transformers: the question and an output behind all.
    """
    model, tokens = reference.model, [*one.prompt, *output]
    cuts = [0, *(cut for document in one.documents for cut in document), len(tokens)]
    cache = DynamicCache()
    for start, stop in pairwise(cuts):
        if (start, stop) not in one.documents:
            if start < stop:
                found = model(
                    torch.tensor([tokens[start:stop]]), past_key_values=cache,
                    position_ids=torch.arange(start, stop)[None], use_cache=True, output_attentions=True,
                )  # fmt: skip
            continue
        for chunk in [c for c in one.chunks if start <= c.start < stop]:
            alone = model(torch.tensor([tokens[chunk.start : chunk.stop]]), use_cache=True).past_key_values
            cos, sin = model.model.rotary_emb(torch.zeros(1), torch.tensor([[chunk.start]]))
            cos, sin = (x / model.model.rotary_emb.attention_scaling for x in (cos, sin))
            for i, layer in enumerate(alone.layers):
                cache.update(layer.keys * cos + rotate_half(layer.keys) * sin, layer.values, i)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_pie_moves_the_keys(references, kind):
    one = ask("pie", ((7, 60), (64, 120)), 131, chunk_tokens=20)
    expected = moved(references[kind], one, OUTPUT).logits[0, -1 - len(OUTPUT) :]
    torch.testing.assert_close(references[kind].logits(one, [], OUTPUT), expected, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_full_reuse_reads_the_question_as_well(references, kind):
    """As PIE does with the question as one more document, up to its last row."""
    whole = ask("full", ((7, 60),), 80, chunk_tokens=100)
    as_pie = Ask(whole.prompt, ((7, 60), (60, 79)), "pie", chunk_tokens=100)
    assert whole.own == [*range(7), 79]
    expected = moved(references[kind], as_pie, OUTPUT).logits[0, -1 - len(OUTPUT) :]
    torch.testing.assert_close(references[kind].logits(whole, [], OUTPUT), expected, **CLOSE)


# -- which rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({"k": 3, "ratio": None}, [3, 3, 3]),
        ({"k": 3, "ratio": 0.5}, [10, 10, 4]),
        ({"k": 3, "ratio": 0.12}, [3, 3, 1]),
        ({"k": 3, "ratio": None, "granularity": "page"}, [4, 4, 4]),
        ({"k": 30, "ratio": None}, [20, 20, 8]),
        ({"k": 0, "ratio": None}, [0, 0, 0]),
    ],
)
def test_legolink_takes_the_heads_of_chunks(references, fields, heads):
    one = ask("legolink", ((3, 51),), 60, chunk_tokens=20, **fields)
    expected = [row for start, head in zip((3, 23, 43), heads, strict=True) for row in range(start, start + head)]
    assert references["llama"].select(one, 4) == expected
    at_0 = replace(one, documents=((0, 51),))
    assert references["llama"].select(at_0, 4)[:1] == [20][: heads[0]], "what begins at 0 is exact"


def test_values_of_a_first_chunk_do_not_deviate(references):
    one = ask("cacheblend", ((0, 20), (20, 40)), 50, ratio=0.5)
    scores = references["llama"].scores(one)
    assert max(scores[row] for row in range(20)) < 1e-6 < min(scores[row] for row in range(20, 40))
    assert references["llama"].select(one, 1) == list(range(20, 40))


@pytest.mark.parametrize("kind", KINDS)
def test_a3_scores_by_hand(rope_dirs, kind):
    """Equation 3 for a model whose layer 0 adds nothing, with keys rotated as complex numbers."""
    reference = Reference(rope_dirs[kind])
    first, second = reference.model.model.layers[:2]
    one = ask("a3", ((4, 20), (24, 40)), 47, chunk_tokens=9)
    with torch.no_grad():
        first.self_attn.o_proj.weight.zero_()
        first.mlp.down_proj.weight.zero_()
        x = second.input_layernorm(reference.model.model.embed_tokens(torch.tensor(one.prompt)))
        q, k = (p(x).unflatten(-1, (-1, 8)).numpy() for p in (second.self_attn.q_proj, second.self_attn.k_proj))
    rotary = reference.model.model.rotary_emb
    turn = np.exp(1j * np.outer(np.arange(len(one.prompt)), rotary.inv_freq.numpy()))[:, None]
    q, k = (rotary.attention_scaling * (y[..., :4] + 1j * y[..., 4:]) * turn for y in (q, k))
    scores = dict.fromkeys(one.document_rows, 0.0)
    for row in one.question:
        keys = [*one.document_rows, *range(one.question.start, row + 1)]
        products = [sum((q[row, h] * k[key, h // 3].conj()).real.sum() for h in range(6)) for key in keys]
        weights = np.exp(np.array(products) / np.sqrt(48))
        for key, weight in zip(keys, weights / weights.sum(), strict=True):
            if key in scores:
                scores[key] += weight
    sums = [0.0, 0.0, *scores.values(), 0.0, 0.0]
    pooled = [sum(sums[i : i + 5]) / 5 for i in range(len(scores))]
    assert list(reference.scores(one).values()) == pytest.approx(pooled, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_prophetkv_asks_what_the_question_looks_at(references, kind):
    """In the pass of PIE, all layers but the first, all heads alike."""
    one = around("prophetkv")
    seen = moved(references[kind], one, []).attentions  # for each layer [1, heads, question, prompt]
    expected = sum(seen[layer][0, head] for layer in (1, 2) for head in range(6)) / 12
    found = list(references[kind].scores(one).values())
    assert found == pytest.approx(expected.sum(0)[one.document_rows].tolist(), rel=1e-3)


def test_a_wrong_row_is_not_accepted(references):
    for method in ("a3", "cacheblend", "prophetkv"):
        one = around(method, ratio=0.2)
        rows = references["llama"].select(one, 1)
        scores = references["llama"].scores(one)
        other = max(set(one.document_rows) - set(rows), key=scores.__getitem__)
        worst = min(rows, key=scores.__getitem__)
        assert references["llama"].accepts(one, 1, rows)
        assert not references["llama"].accepts(one, 1, rows[1:])
        best = max(rows, key=scores.__getitem__)
        assert not references["llama"].accepts(one, 1, sorted({*rows, other} - {best}))
        assert scores[worst] >= scores[other]
