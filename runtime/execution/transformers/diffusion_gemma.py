"""The text model of DiffusionGemma, whose encoder and decoder share their weights."""

from collections.abc import Sequence

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from runtime.batch import HiddenRows
from runtime.errors import ModelError
from runtime.execution.transfers import upload


class DiffusionGemma(nn.Module):
    """Encoder and decoder as one model, so that a step may have rows of both.

    Canvas rows (of the decoder) differ in three ways: their embeddings include the soft embeddings of the last step,
    the layers have other scalar factors, and the mask is bidirectional, as the attention plan says.

    Attributes:
        canvases: the canvas rows of the running step with their soft embeddings, from the last step's distributions;
            all other rows belong to the encoder.
    """

    def __init__(self, model: transformers.DiffusionGemmaForBlockDiffusion):
        """Raises ModelError if the encoder does not share all its weights with the decoder."""
        super().__init__()
        decoder = model.model.decoder
        self._layers, self._embed = model.model.encoder.language_model, decoder.embed_tokens
        shared = set(decoder.parameters())
        if own := [name for name, each in self._layers.named_parameters() if each not in shared]:
            raise ModelError(f"the encoder has weights of its own, e.g. {own[0]}; supported are those of its decoder")
        self._condition, self._head = decoder.self_conditioning, model.lm_head
        self._cap = model.final_logit_softcapping
        self._factors = [
            (causal.layer_scalar, denoising.layer_scalar)
            for causal, denoising in zip(self._layers.layers, decoder.layers, strict=True)
        ]
        self.canvases: Sequence[HiddenRows] = ()

    def set_attn_implementation(self, name: str) -> None:
        self._layers.set_attn_implementation(name)

    def get_output_embeddings(self) -> nn.Module:
        return self._head

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool, logits_to_keep: torch.Tensor
    ) -> CausalLMOutput:
        """Logits [1, n, vocab] of the rows `logits_to_keep`, int64 [n]; tokens and positions are int64 [1, T]."""
        states = self._embed(input_ids)
        denoised = torch.zeros(len(input_ids[0]), 1, dtype=torch.bool, device=input_ids.device)
        for canvas in self.canvases:
            rows, soft = upload(canvas.rows, states.device), upload(canvas.states, states.device).to(states.dtype)
            states[:, rows] = self._condition(states[:, rows], soft[None])
            denoised.index_fill_(0, rows, True)
        for layer, (causal, denoising) in zip(self._layers.layers, self._factors, strict=True):
            layer.layer_scalar = torch.where(denoised, denoising, causal) if self.canvases else causal
        states = self._layers(inputs_embeds=states, position_ids=position_ids, use_cache=use_cache).last_hidden_state
        logits = self._head(states[:, logits_to_keep]).float()
        return CausalLMOutput(logits=logits.div_(self._cap).tanh_().mul_(self._cap))

    @torch.inference_mode()
    def soften(self, logits: torch.Tensor) -> torch.Tensor:
        """The mean embeddings, [n, hidden], under the distributions of logits [n, vocab]."""
        weight = self._embed.weight
        probs = logits.to(weight.dtype).softmax(-1, dtype=torch.float32).to(weight.dtype)
        return probs @ weight * self._embed.embed_scale.to(weight.dtype)
