"""Small random models with recurrent layers, and steps that run them."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from runtime.batch import AttentionPlan, ForwardBatch, LayerGroup, Span, StateRows, causal_visible
from runtime.execution.attention.torch_attention import Scores, TorchAttention
from runtime.execution.native.decoder import NativeDecoder
from runtime.execution.native.library import Library
from runtime.execution.torch_decoder import TorchDecoder
from runtime.kv.pool import KVPool
from runtime.kv.states import StatePool
from runtime.models.gguf_tensors import GGUFTensors
from runtime.models.spec import DecoderSpec
from runtime.models.stored import load_vectors
from runtime.models.weights import load_weights
from tests.tiny import vary

VOCAB, PAGE, PAGES, SLOTS = 320, 4, 240, 6
CPU = torch.device("cpu")

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "decoder_sparse_step": 2,
}
_LFM2_LAYERS = {"layer_types": ["conv", "conv", "full_attention", "conv"]}

HYBRID_MODELS: dict[str, dict[str, Any]] = {
    "Lfm2": {**_LFM2_LAYERS, "tie_word_embeddings": True, "block_multiple_of": 16},
    "Qwen3_5": _DELTA,
    "Qwen3Next": {**_DELTA, **_EXPERTS},
}


def save_hybrid(kind: str, directory: Path, **more: Any) -> Path:
    """Write a random model as a Hugging Face directory without a tokenizer."""
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    torch.manual_seed(1)
    more = _SIZES | HYBRID_MODELS.get(kind, {}) | more
    model = model_class(model_class.config_class(**more))
    vary(model)
    model.save_pretrained(directory)
    return directory


def oracle(path: Path) -> Any:
    """transformers' model."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def make_pools(spec: DecoderSpec, dtype: torch.dtype = torch.float32) -> tuple[KVPool, StatePool]:
    """The states begin with noise, because slots are not cleared before they are used."""
    states = StatePool(spec.states, SLOTS, CPU, spec.records)
    for tensor in states.tensors:
        tensor.normal_()
    return KVPool(spec.kv_layers, PAGES, PAGE, spec.num_kv_heads, spec.head_dim, dtype, CPU), states


@dataclass
class Sequence:
    """A sequence that is computed piece by piece."""

    slot: int
    first_page: int
    tokens: list[int] = field(default_factory=list)
    accepted: int = 0


class Runner:
    """Runs steps of several sequences."""

    def __init__(
        self, path: Path, library: Library | None = None, threads: int = 2, dtype: torch.dtype = torch.float32
    ):
        """`library`: kernels, which compute a GGUF file's matrices as stored; None: torch."""
        linked = None if library is None else GGUFTensors.open(path)
        spec = DecoderSpec.load(path)
        weights = load_weights(path, spec, dtype) if linked is None else load_vectors(linked, spec, dtype)
        self.model = model = TorchDecoder(spec, weights, CPU)
        self.spec = model.spec
        self.pool, self.states = make_pools(self.spec, dtype)
        model.states = self.states
        if library is None:
            scores = [Scores(sinks=sinks) for sinks in model.sinks()]
            self.forward = partial(model.forward, pool=self.pool, backend=TorchAttention(self.pool, scores=scores))
        else:
            stored = None if linked is None else (linked, path)
            self.forward = NativeDecoder(library, model, self.pool, threads, stored=stored).forward

    def start(self, slot: int) -> Sequence:
        self.states.clear(slot)
        return Sequence(slot, slot * (PAGES // SLOTS))

    def step(
        self,
        *pieces: tuple[Sequence, list[int]],
        draft: int = 0,
        saves: list[tuple[int, int]] | None = None,
        target: int | None = None,
    ) -> torch.Tensor:
        """Logits of all rows. The last `draft` rows of each piece are guesses, which its sequence does not get.

        `target`: the slot for the state after the step, which the sequence uses from then on; None: the same slot.
        """
        rows = sum(len(tokens) for _, tokens in pieces)
        plan, row, positions, slots, states = AttentionPlan(rows), 0, [], [], []
        for sequence, tokens in pieces:
            start, stop = len(sequence.tokens), len(sequence.tokens) + len(tokens)
            pages = np.arange(sequence.first_page, sequence.first_page + -(-stop // PAGE), dtype=np.int32)
            plan.add(slice(row, row + len(tokens)), Span(pages, stop), causal_visible(stop, len(tokens)))
            positions += range(start, stop)
            slots += range(sequence.first_page * PAGE + start, sequence.first_page * PAGE + stop)
            to = sequence.slot if target is None else target
            states.append(StateRows(row, row + len(tokens), sequence.slot, to, saves or [], draft, sequence.accepted))
            sequence.slot = to
            sequence.tokens += tokens[: len(tokens) - draft]
            sequence.accepted = 0
            row += len(tokens)
        group = LayerGroup(range(self.spec.num_layers), None, torch.tensor(slots), plan)
        every = torch.tensor([token for _, tokens in pieces for token in tokens])
        batch = ForwardBatch(every, torch.tensor(positions), [group], torch.arange(rows), states=states)
        return self.forward(batch).clone()
