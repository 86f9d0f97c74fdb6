"""The architectures that Ramet's own code computes, and the families whose keys and layers they share.

What makes them differ from Llama is in modules that are imported for them: `bidirectional.py`, `recurrence.py`,
`latent.py`, `experts.py` and `seeing.py`.
"""

from typing import NamedTuple


class _Names(NamedTuple):
    """Prefixes that the decoder's tensors have in the checkpoint, and whether its head is the embedding.

    `tied`: by default; `tied_by_text`: also where only the text's section of config.json says so.
    """

    model: str
    head: str = ""
    tied: bool = False
    tied_by_text: bool = False


_CAUSAL = {
    "LlamaForCausalLM": "Llama",
    "MistralForCausalLM": "Mistral",
    "Qwen2ForCausalLM": "Qwen2",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen3MoeForCausalLM": "Qwen3",
    "Gemma3ForCausalLM": "Gemma3",
    "GptOssForCausalLM": "GptOss",
}
# Rows also see later rows.
BIDIRECTIONAL = {
    "LLaDAModelLM": "Llama",
    "DreamModel": "Qwen2",
    "LlamaDiffusionModel": "Llama",
    "SDARForCausalLM": "Qwen3",
    "SDARMoeForCausalLM": "Qwen3",
    "LLaDA2MoeModelLM": "Qwen3",
    "Fast_dLLM_QwenForCausalLM": "Qwen2",
}
# Some layers are recurrent.
HYBRIDS = {
    "Lfm2ForCausalLM": "Lfm2",
    "Qwen3_5ForCausalLM": "Qwen3_5",
    "Qwen3NextForCausalLM": "Qwen3Next",
}
LATENT = {"DeepseekV2ForCausalLM": "Deepseek", "DeepseekV3ForCausalLM": "Deepseek"}
# Experts replace the MLP in some layers.
WITH_EXPERTS = (
    "GptOssForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "SDARMoeForCausalLM",
    "LLaDA2MoeModelLM",
    *LATENT,
)
# A vision tower stands beside the decoder.
SEEING = {
    "Idefics3ForConditionalGeneration": _Names("model.text_model."),
    "SmolVLMForConditionalGeneration": _Names("model.text_model."),
    "Gemma3ForConditionalGeneration": _Names("language_model.model.", "language_model.", tied=True),
    "LlavaOnevisionForConditionalGeneration": _Names("language_model.model.", "language_model.", tied_by_text=True),
    "Mistral3ForConditionalGeneration": _Names("language_model.model.", "language_model.", tied=True),
    "Qwen2_5_VLForConditionalGeneration": _Names("model.", tied_by_text=True),
    "Qwen3VLForConditionalGeneration": _Names("model.language_model."),
    "Qwen3_5ForConditionalGeneration": _Names("model.language_model."),
}
_DECODERS = _CAUSAL | LATENT | HYBRIDS | BIDIRECTIONAL
SUPPORTED = (*_DECODERS, *SEEING)


def family_of(architecture: str) -> str:
    """The family of a decoder's architecture, whose keys and layers it has."""
    return _DECODERS[architecture]
