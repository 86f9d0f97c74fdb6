"""Chunk fusion, read plainly from the papers: one pass of transformers over copies of the prompt's rows.

A row of a document may exist three times: as it is *stored* (its chunk alone), *true* (full prefill, as the first
layers of CacheBlend and A3 have it) and *fused* (recomputed, or computed as the prompt's own). All copies stand at the
row's place, and a mask for each layer says which copy sees which. Rotary embeddings are relative, so a chunk that is
computed at its place is one that was computed at 0 and moved there.

CacheBlend: arXiv 2405.16444. LegoLink, in EPIC: 2410.15332. A3: 2511.17560. ProphetKV: 2602.02579.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

# The methods of all tests.
METHODS = ("a3", "cacheblend", "prophetkv", "passages", "legolink", "pie", "full")
UNSCALED = ("pie", "full")  # they take no ratio
DENSE = ("a3", "cacheblend")  # layer 0 of all rows is computed
SCORED = ("a3", "cacheblend", "prophetkv", "passages")
LOOKING = {*DENSE, *SCORED}  # the choice depends on the question
STORED, TRUE, FUSED, OUTPUT = range(4)


@dataclass(frozen=True)
class Ask:
    """A prompt with documents, and how they are fused."""

    prompt: tuple[int, ...] = field(repr=False)
    documents: tuple[tuple[int, int], ...]
    method: str
    ratio: float | None = 0.15
    granularity: str = "token"
    chunk_tokens: int = 32
    k: int = 16
    longest_question: int = 512
    lead: tuple[int, ...] = ()

    @property
    def positions(self) -> Sequence[int]:
        """Of all rows."""
        return range(len(self.prompt))

    @property
    def holes(self) -> list[tuple[int, int, int]]:
        """Rows that are encoded with a chunk and not kept: the chunk's number, position, token."""
        lead = list(enumerate(self.lead, -len(self.lead)))
        return [(number, chunk[0] + i, token) for number, chunk in enumerate(self.chunks) for i, token in lead]

    @property
    def end(self) -> int:
        """Rows up to the end of the last document."""
        return self.documents[-1][1]

    def begins(self, number: int) -> bool:
        """Whether a chunk is the beginning of the prompt."""
        return self.chunks[number][0] == 0 and not self.lead

    @property
    def chunks(self) -> Sequence[Sequence[int]]:
        """Rows of the prompt that are encoded alone."""
        step = self.chunk_tokens
        return [range(at, min(at + step, stop)) for start, stop in self.documents for at in range(start, stop, step)]

    @property
    def last(self) -> int:
        """The prompt's last row is computed, even if it is a document's: its logits are wanted."""
        return len(self.prompt) - 1

    @property
    def document_rows(self) -> list[int]:
        """Rows that may be recomputed."""
        return sorted(row for chunk in self.chunks for row in chunk if row != self.last)

    @property
    def question(self) -> range:
        """The rows behind the last document, or else the last one."""
        return range(min(self.end, self.last), len(self.prompt))

    @property
    def asking(self) -> range:
        """The question, or the end of a long one."""
        return self.question[-self.longest_question :]

    @property
    def stored(self) -> list[Sequence[int]]:
        """Chunks whose KV is read; full reuse reads the question's, too, but for its last row."""
        return [*self.chunks] + ([self.question[:-1]] if self.method == "full" else [])

    @property
    def own(self) -> list[int]:
        """Rows that are computed in any case."""
        stored = {row for chunk in self.stored for row in chunk if row != self.last}
        return [row for row in range(len(self.prompt)) if row not in stored]

    @property
    def count(self) -> int:
        """Most document rows that are recomputed; LegoLink counts otherwise."""
        return int(len(self.document_rows) * (self.ratio or 0.0))

    @property
    def is_dense(self) -> bool:
        return self.method in DENSE and self.count > 0

    def units(self, page_size: int) -> list[Sequence[int]]:
        """Rows that are selected as one: single ones, or runs from the beginnings of the chunks on."""
        step = page_size if self.granularity == "page" else 1
        chunks = [[row for row in chunk if row != self.last] for chunk in self.chunks]
        return [chunk[at : at + step] for chunk in chunks for at in range(0, len(chunk), step)]


class Reference:
    """transformers in float32, with a mask for each layer."""

    def __init__(self, path: Path):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        self._masks: list[torch.Tensor] = []  # for each layer; empty: that of transformers
        for i, layer in enumerate(self.model.model.layers):
            layer.register_forward_pre_hook(partial(self._mask, i), with_kwargs=True)

    def _mask(self, layer: int, module, args, kwargs):
        return args, kwargs | ({"attention_mask": self._masks[layer]} if self._masks else {})

    # -- which rows ------------------------------------------------------------------------------------------

    def select(self, ask: Ask, page_size: int) -> list[int]:
        """The document rows that are recomputed, ascending."""
        units = ask.units(page_size)
        if ask.method in SCORED and ask.count:
            return best_units(units, self.scores(ask), ask.count, self.ranks(ask))
        if ask.method == "legolink":
            chunks = [chunk for number, chunk in enumerate(ask.chunks) if not ask.begins(number)]
            heads = [chunk[: head_of(ask, chunk, page_size)] for chunk in chunks]
            return sorted(row for head in heads for row in head if row != ask.last)
        return []

    def accepts(self, ask: Ask, page_size: int, rows: list[int]) -> bool:
        """Whether rows are selected rightly, but for scores that float32 cannot tell apart."""
        if rows == self.select(ask, page_size):
            return True
        if ask.method not in SCORED or not ask.count:
            return False
        scores = self.scores(ask)
        slack = 1e-4 * max(scores.values()) + 1e-7  # what need not deviate deviates by float32
        nudged = {row: score + (slack if row in rows else -slack) for row, score in scores.items()}
        return rows == best_units(ask.units(page_size), nudged, ask.count, self.ranks(ask))

    def scores(self, ask: Ask) -> dict[int, float]:
        """The worth of recomputing each document row."""
        found = {"cacheblend": self._deviations, "a3": self._attended}.get(ask.method, self._looked_up)(ask)
        return dict(zip(ask.document_rows, found.double().tolist(), strict=True))

    def _deviations(self, ask: Ask) -> torch.Tensor:
        """CacheBlend: how far the values of layer 1 are from those stored."""
        rows = ask.document_rows
        stored, true = self._project(ask, "v_proj")
        return (true[rows] - stored[: len(rows)]).square().sum(-1)

    def _attended(self, ask: Ask) -> torch.Tensor:
        """A3, equation 3: the attention of the question to the documents at layer 1, all heads as one."""
        config, rows = self.model.config, ask.document_rows
        size = config.hidden_size // config.num_attention_heads
        heads = [self._project(ask, name)[1].unflatten(-1, (-1, size)) for name in ("q_proj", "k_proj")]
        q, k = (x.transpose(0, 1)[None] for x in heads)  # [1, heads, rows, size]
        q, k = apply_rotary_pos_emb(q, k, *self.model.model.rotary_emb(q, torch.tensor([[*ask.positions]])))
        k = repeat_kv(k, config.num_attention_heads // config.num_key_value_heads)
        keys = [*rows, *ask.asking]
        products = torch.einsum("hqd,hkd->qk", q[0][:, ask.asking], k[0][:, keys]) / math.sqrt(config.hidden_size)
        later = torch.tensor(keys)[None] > torch.tensor(ask.asking)[:, None]
        attention = products.masked_fill(later, -torch.inf).softmax(-1)[:, : len(rows)].sum(0)
        return torch.nn.functional.avg_pool1d(attention[None], 5, stride=1, padding=2)[0]

    def _looked_up(self, ask: Ask) -> torch.Tensor:
        """After ProphetKV: the attention of the question to the stored documents, in all layers but the first."""
        copies = Copies(ask)
        seen = self._run(copies, output_attentions=True).attentions[1:]
        weights = torch.stack([layer[0].mean(0) for layer in seen]).mean(0)
        asking = [i for i in range(len(copies.kinds)) if copies.kinds[i] == FUSED and copies.places[i] in ask.asking]
        return weights[asking, : len(ask.document_rows)].sum(0)

    def ranks(self, ask: Ask) -> dict[int, int]:
        """For each document row, how many chunks have rows that the question attends to more sharply; else 0.

        The first four rows of a moved chunk that is encoded alone come before all.
        """
        if ask.method != "passages":
            return dict.fromkeys(ask.document_rows, 0)
        copies = Copies(ask)
        seen = torch.stack([layer[0] for layer in self._run(copies, output_attentions=True).attentions[1:]])
        asking = [i for i in range(len(copies.kinds)) if copies.kinds[i] == FUSED and copies.places[i] in ask.asking]
        places, peaks = copies.places[: copies.kinds.count(STORED)], []
        for chunk in ask.chunks:
            inner = [places.index(row) for row in chunk if row != ask.last][4:-2]
            peaks.append(float(seen[:, :, asking][..., inner].amax(-1).square().mean()) if inner else 0.0)
        order = sorted(range(len(peaks)), key=lambda i: -peaks[i])
        return {
            row: -1 if number < 4 and not ask.begins(i) and not ask.lead else order.index(i)
            for i, chunk in enumerate(ask.chunks)
            for number, row in enumerate(chunk)
            if row != ask.last
        }

    def _project(self, ask: Ask, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A projection of layer 1, float32: of the stored rows, and of all true rows."""
        found: list[torch.Tensor] = []
        module = getattr(self.model.model.layers[1].self_attn, name)
        hook = module.register_forward_hook(lambda module, args, output: found.append(output[0]))
        self._run(copies := Copies(ask, kinds=(STORED, TRUE)))
        hook.remove()
        return found[0].tensor_split([copies.kinds.count(STORED)])

    # -- what is answered ------------------------------------------------------------------------------------

    def logits(self, ask: Ask, rows: Iterable[int], output=(), until: int | None = None) -> torch.Tensor:
        """float32 [1 + len(output), vocab]: after the prompt, and after each token of an output.

        `until`: the tokens of the prompt for which rows were chosen; those behind are an answer, and a later turn.
        """
        output = list(output)
        return self._run(Copies(ask, rows, output, until=until), 1 + len(output)).logits[0]

    def dense(self, prompt: Iterable[int], output: Iterable[int] = ()) -> torch.Tensor:
        """`logits` of full prefill."""
        output = list(output)
        with torch.inference_mode():
            return self.model(torch.tensor([[*prompt, *output]]), logits_to_keep=1 + len(output)).logits[0]

    @torch.inference_mode()
    def _run(self, copies: Copies, keep: int = 1, **options):
        self._masks = [as_mask(copies.sees(i)) for i in range(len(self.model.model.layers))]
        ids, positions = torch.tensor([copies.tokens]), torch.tensor([copies.positions])
        try:
            return self.model(ids, position_ids=positions, logits_to_keep=keep, **options)
        finally:
            self._masks = []


class Copies:
    """The rows of one pass: which copy of which place each of them is."""

    def __init__(self, ask: Ask, rows: Iterable[int] = (), output=(), kinds=(), until: int | None = None):
        computed, output = sorted({*ask.own, *rows}), list(output)
        until = len(ask.prompt) if until is None else until
        self.is_dense = ask.is_dense
        places = {
            STORED: sorted(row for chunk in ask.stored for row in chunk),
            TRUE: list(range(len(ask.prompt))) if self.is_dense else [],
            FUSED: [row for row in computed if row < until],
            OUTPUT: [row for row in computed if row >= until] + [len(ask.prompt) + i for i in range(len(output))],
        }
        kinds = kinds or tuple(places)
        text = [*ask.prompt, *output]
        self.places = [place for kind in kinds for place in places[kind]]
        self.kinds = [kind for kind in kinds for _ in places[kind]]
        self.tokens = [text[place] for place in self.places]
        after = ask.positions[-1] + 1 - len(ask.prompt)
        self.positions = [ask.positions[p] if p < len(ask.prompt) else p + after for p in self.places]
        self._chunks = {row: number for number, chunk in enumerate(ask.stored) for row in chunk}
        self._computed = set(computed)
        if STORED in kinds:
            at = self.kinds.count(STORED)
            for i, (number, position, token) in enumerate(ask.holes):
                hole = -1 - i  # a row of no prompt, which only its chunk sees
                self.places.insert(at, hole)
                self.kinds.insert(at, STORED)
                self.tokens.insert(at, token)
                self.positions.insert(at, position)
                self._chunks[hole] = number

    def sees(self, layer: int) -> torch.Tensor:
        """bool [rows, rows]: who sees whom in a layer."""
        kind, place = torch.tensor(self.kinds), torch.tensor(self.positions)
        chunk = torch.tensor([self._chunks.get(p, -1) for p in self.places])
        kept = (kind == STORED) & torch.tensor([p >= 0 and p not in self._computed for p in self.places])
        stored, true, fused, output = (kind == one for one in range(4))
        alone = (stored[:, None] & stored) & (chunk[:, None] == chunk)
        mixture = (fused | output)[:, None] & (kept | fused | output)
        if layer == 1 and self.is_dense:
            mixture = (output[:, None] & (kept | fused | output)) | (fused[:, None] & true)
        return (alone | (true[:, None] & true) | mixture) & (place[:, None] >= place)


def head_of(ask: Ask, chunk: Sequence[int], page_size: int) -> int:
    """Number of a chunk's first rows that LegoLink recomputes."""
    count = ask.k if ask.ratio is None else math.ceil(ask.ratio * len(chunk))
    return math.ceil(count / page_size) * page_size if ask.granularity == "page" else count


def best_units(units: list[Sequence[int]], scores: dict[int, float], count: int, ranks: dict[int, int]) -> list[int]:
    """The units of the lowest ranks with the largest sums of scores; of equal ones the earlier."""
    sums = [sum(scores[row] for row in unit) for unit in units]
    order = sorted((i for i in range(len(units)) if units[i]), key=lambda i: (ranks[units[i][-1]], -sums[i]))
    return fill(units, order, count)


def fill(units: list[Sequence[int]], order: Iterable[int], count: int) -> list[int]:
    """Rows of units in an order, as many as `count` allows; a unit that does not fit is passed over."""
    rows: list[int] = []
    for i in order:
        if len(rows) + len(units[i]) <= count:
            rows += units[i]
    return sorted(rows)


def as_mask(sees: torch.Tensor) -> torch.Tensor:
    return torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[None, None]
