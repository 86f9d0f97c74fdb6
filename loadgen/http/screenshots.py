"""Agents that look at screenshots, and a small model that sees them."""

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import AddedToken, Tokenizer

from loadgen.http.prose import Prose

Body = dict[str, Any]
_SIZE = 640, 400
_TOKENS = ["<fake_token_around_image>", "<image>", "<global-img>"]
_TOKENS += [f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5)]


class ScreenSession:
    """An agent's conversation: each request adds a screenshot, of which parts are those of the one before."""

    def __init__(self, seed: int, system_tokens: int, step_tokens: int):
        self._draw = random.Random(seed)
        self._prose = prose = Prose(self._draw)
        self._step_tokens = step_tokens
        self._messages: list[Body] = [{"role": "system", "content": prose.text(system_tokens)}]
        self._screen = Image.new("RGB", _SIZE, (250, 250, 247))

    def request(self) -> Body:
        """The body of the next request."""
        if len(self._messages) > 1:
            self._messages.append({"role": "assistant", "content": self._prose.text(self._step_tokens / 2)})
        for _ in range(6):
            left, top = (self._draw.randrange(edge) for edge in _SIZE)
            colour = tuple(self._draw.randrange(256) for _ in range(3))
            self._screen.paste(colour, (left, top, left + self._draw.randrange(20, 200), top + 40))
        file = io.BytesIO()
        self._screen.save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        text = {"type": "text", "text": self._prose.text(self._step_tokens / 2)}
        self._messages.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, text]})
        return {"messages": self._messages}


def teach_to_see(model: Path) -> None:
    """Make a model in a directory one that sees: its decoder is what its configuration describes."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in _TOKENS])
    tokenizer.save(str(model / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    decoder = {**json.loads((model / "config.json").read_text()), "vocab_size": size, "pad_token_id": 0}
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 64, "patch_size": 8, "model_type": "idefics3_vision",
    }  # fmt: skip
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "scale_factor": 2,
        "image_token_id": tokenizer.token_to_id("<image>"), "text_config": decoder, "vision_config": vision,
        "vocab_size": size, "pad_token_id": 0, "tie_word_embeddings": decoder["tie_word_embeddings"],
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    processor = {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 64}}
    (model / "preprocessor_config.json").write_text(json.dumps(processor))
