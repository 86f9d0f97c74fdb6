"""A small random model that sees, and what transformers makes of it."""

import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from runtime.config import make_config
from runtime.features.images.feature import ImagesFeature
from runtime.frontend.pictures import Sight
from runtime.frontend.preparer import ServedModel
from runtime.models.tokenizer import Tokenizer
from tests.tiny import vary

ROWS = 16  # of a tile
_TOKENS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
_TOKENS += [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]
_TOKENS += ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
_OF_GEMMA = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]
_OF_QWEN = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", *_OF_GEMMA]
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'] is string %}{{': ' + message['content']}}{% else %}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{% endif %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


KINDS = {
    "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration),
    "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration),
    "llava_onevision": (LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration),
    "mistral3": (Mistral3Config, Mistral3ForConditionalGeneration),
    "gemma3": (Gemma3Config, Gemma3ForConditionalGeneration),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
}
# A hybrid of Qwen3.5; 4 pairs of dimensions are rotated.
_DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
# Lines of an image of Mistral 3 have rows of 8 x 8 pixels.
_LINES = {"size": {"longest_edge": 48}, "patch_size": {"height": 8, "width": 8}}


def sight_of(path: Path) -> Sight:
    """How the server's process sees with the model in a directory."""
    preparer = ImagesFeature.preparer(ServedModel(make_config(), path, Tokenizer.load(path), None))
    assert preparer is not None
    assert preparer.sight is not None
    return preparer.sight


def save_seeing(directory: Path, tokenizer_from: Path, kind: str = "idefics3", **more: Any) -> Path:
    """Write a random model: tiles of 32 x 32 pixels and 16 rows, at most 2 x 2 of them and the whole image.

    `more`: fields of its decoder.
    """
    torch.manual_seed(3)
    fast = FastTokenizer.from_file(str(tokenizer_from / "tokenizer.json"))
    own_tokens = {"gemma3": _OF_GEMMA, "qwen2_5_vl": _OF_QWEN, "qwen3_vl": _OF_QWEN, "qwen3_5": _OF_QWEN}.get(kind, [])
    fast.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in _TOKENS + own_tokens])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|im_end|>")
    text = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "vocab_size": len(tokenizer),
        "pad_token_id": 0,
    }
    vision = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    config_of, model_of = KINDS[kind]
    if kind == "mistral3":
        decoder = MistralConfig(**text, head_dim=16, sliding_window=None, tie_word_embeddings=False)
        own = {"image_token_index": tokenizer.convert_tokens_to_ids("[IMG]"), "tie_word_embeddings": False}
        vision |= {"model_type": "pixtral", "image_size": 64, "patch_size": 4, "head_dim": 16}
        processor: Any = PixtralImageProcessorPil(**_LINES)
    elif kind == "llava_onevision":
        grids = [[16 * i, 16 * j] for i in (1, 2, 3) for j in (1, 2, 3)]
        decoder = {**text, "model_type": "qwen2", "num_attention_heads": 3, "num_key_value_heads": 1}
        own = {"image_token_index": tokenizer.convert_tokens_to_ids("<image>"), "image_grid_pinpoints": grids}
        own["vision_aspect_ratio"] = "anyres_max_2"
        vision |= {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, "vision_use_head": False}
        size = {"height": 16, "width": 16}
        processor = LlavaOnevisionImageProcessorPil(size=size, image_grid_pinpoints=grids)
    elif kind == "gemma3":
        layers = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 12}
        decoder = Gemma3TextConfig(**text, **layers, head_dim=16, query_pre_attn_scalar=24)
        own = {"image_token_index": tokenizer.convert_tokens_to_ids("<image_soft_token>"), "mm_tokens_per_image": ROWS}
        vision |= {"image_size": 32, "patch_size": 4, "vision_use_head": False}
        processor = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    elif kind.startswith("qwen"):
        own = {"image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"), "tie_word_embeddings": False}
        vision = {"hidden_size": 32, "intermediate_size": 40, "depth": 2, "num_heads": 2, "patch_size": 4}
        vision |= {"out_hidden_size": more.get("hidden_size", 48), "spatial_merge_size": 2}
        if kind == "qwen3_5":
            decoder = {**text, **_DELTA}
            vision |= {"num_position_embeddings": 36}
        elif kind == "qwen3_vl":
            rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
            decoder = {**text, "head_dim": 16, "rope_parameters": rope}
            vision |= {"num_position_embeddings": 36, "depth": 3, "deepstack_visual_indexes": [0, 2]}
        else:
            rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
            decoder = {**text, "num_attention_heads": 3, "num_key_value_heads": 1, "rope_parameters": rope}
            vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
        processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=16 * 16, max_pixels=56 * 48)
    else:
        decoder = LlamaConfig(**text)
        own = {"image_token_id": tokenizer.convert_tokens_to_ids("<image>"), "scale_factor": 2, "pad_token_id": 0}
        vision |= {"image_size": 32, "patch_size": 4}
        processor = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    decoder = decoder if isinstance(decoder, dict) else decoder.to_dict()
    config = config_of(text_config={**decoder, **more}, vision_config=vision, **own)
    model = model_of(config)
    vary(model)
    if kind == "gemma3":  # zeros at first
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.2)
    if kind == "llava_onevision":  # with most seeds, all images look alike
        torch.manual_seed(2)
        for linear in (model.model.multi_modal_projector.linear_1, model.model.multi_modal_projector.linear_2):
            torch.nn.init.normal_(linear.weight, std=0.2)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    processor.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


class Reference:
    """transformers' model of a directory, and its processor: that of Idefics 3, whose images are SmolVLM's, too."""

    def __init__(self, directory: Path, kind: str = "idefics3"):
        self.model = KINDS[kind][1].from_pretrained(directory, dtype=torch.float32).eval()
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
        images = Idefics3ImageProcessorPil.from_pretrained(directory)
        self.processor = Idefics3Processor(images, tokenizer, image_seq_len=ROWS)

    def inputs(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        return self.processor(text=[text], images=[images] if images else None, return_tensors="pt")

    def greedy(self, text: str, images: list[Image.Image], new: int) -> list[int]:
        """The tokens of `new` steps, whatever they are."""
        inputs = self.inputs(text, images)
        self.model.generation_config.eos_token_id = None
        out = self.model.generate(**inputs, max_new_tokens=new, do_sample=False)
        return out[0, inputs["input_ids"].shape[1] :].tolist()


class LinesReference(Reference):
    """transformers' Mistral 3 of a directory. Its processor needs torchvision; texts are expanded as it does."""

    def __init__(self, directory: Path):
        self.model = Mistral3ForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
        self.images = PixtralImageProcessorPil.from_pretrained(directory)

    def inputs(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        pixels = dict(self.images(images, **_LINES, return_tensors="pt")) if images else {}
        for height, width in pixels.get("image_sizes", []):
            rows = ["[IMG]" * (int(width) // 8)] * (int(height) // 8)
            text = text.replace("<image>", "[IMG_BREAK]".join(rows) + "[IMG_END]", 1)
        return {**self.tokenizer(text, add_special_tokens=False, return_tensors="pt"), **pixels}


class CropsReference(LinesReference):
    """transformers' LLaVA-OneVision of a directory; see `LinesReference`."""

    def __init__(self, directory: Path):
        self.model = LlavaOnevisionForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
        self.images = LlavaOnevisionImageProcessorPil.from_pretrained(directory)

    def inputs(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        pixels = dict(self.images(images, return_tensors="pt")) if images else {}
        pixels.pop("batch_num_images", None)
        first, *rest = text.split("<image>")
        seen = self.model.get_image_features(**pixels).pooler_output if images else []
        text = first + "".join("<image>" * len(one) + part for one, part in zip(seen, rest, strict=True))
        return {**self.tokenizer(text, add_special_tokens=False, return_tensors="pt"), **pixels}


class WholeReference(LinesReference):
    """transformers' Gemma 3 of a directory; see `LinesReference`."""

    def __init__(self, directory: Path):
        self.model = Gemma3ForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
        self.images = Gemma3ImageProcessorPil.from_pretrained(directory)

    def inputs(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        one = f"\n\n<start_of_image>{'<image_soft_token>' * ROWS}<end_of_image>\n\n"
        found = dict(self.tokenizer(text.replace("<image>", one), add_special_tokens=False, return_tensors="pt"))
        found["token_type_ids"] = (found["input_ids"] == self.model.config.image_token_id).long()
        if images:
            found["pixel_values"] = self.images(images, return_tensors="pt")["pixel_values"]
        return found


class GridReference(LinesReference):
    """transformers' Qwen2.5-VL or Qwen3.5 of a directory; see `LinesReference`."""

    def __init__(self, directory: Path, kind: str):
        self.model = KINDS[kind][1].from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
        self.images = Qwen2VLImageProcessorPil.from_pretrained(directory)

    def inputs(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        pixels = dict(self.images(images, return_tensors="pt")) if images else {}
        for grid in pixels.get("image_grid_thw", []):
            text = text.replace("<image>", "<|image_pad|>" * (int(grid.prod()) // 4), 1)
        found = {**self.tokenizer(text, add_special_tokens=False, return_tensors="pt"), **pixels}
        found["mm_token_type_ids"] = (found["input_ids"] == self.model.config.image_token_id).int()
        return found


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Random blocks of colour, which differ from picture to picture."""
    torch.manual_seed(seed)
    pixels = torch.randint(256, (6, 6, 3), dtype=torch.uint8).numpy()
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()
