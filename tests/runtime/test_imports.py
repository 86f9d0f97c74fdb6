"""A plain chat imports the code of no feature, family or format that it does without."""

import subprocess
import sys
from pathlib import Path

import pytest

# Answers a prompt of token ids with the model in a directory, and prints the names of Ramet's modules.
ENGINE = """
import sys
from array import array
from pathlib import Path
import runtime.process
from runtime.config import make_config
from runtime.opening import open_engine
from runtime.params import SamplingParams
from runtime.protocol import AddRequest

path = Path(sys.argv[1])
core = open_engine(make_config(model=str(path), pool_tokens=512), path)
core.handle(AddRequest("a", array("i", [1, 2, 3, 4, 5]).tobytes(), SamplingParams(max_new_tokens=4)))
while core.requests:
    core.step()
core.close()
"""
SERVER = "import server.serve, server.cli"
OTHERS = {
    "radix": {"check", "inspection"},
    "runtime.models": {"bidirectional", "experts", "latent", "recurrence", "seeing", "shards", "mxfp4"}
    | {"coded", "ggml", "gguf_tensors", "published", "quantization", "stored", "adapters.lora"},
    "runtime.execution": {"coded_products", "experts", "quantized", "flashinfer_package", "parallel", "transformers"},
    "runtime.execution.attention": {"flashinfer", "windows"},
    "runtime.execution.mixers": {"delta_net", "latent", "recurrent", "short_conv", "state_plan"},
    "runtime.execution.native": {"codes", "experts", "latent", "recurrence", "stored"},
    "runtime.kv": {"near", "side_stream", "states"},
    "runtime.features": {"chunks.strategy", "hybrid.strategy", "images.part", "images.rules", "kv_events.part"}
    | {"diffusion.decoding", "reasoning.strategy", "tiers.tiering", "windows.strategy"},
    "server.explain": {"compare", "conversation", "report"},
    "server.generation": {"receipts"},
    "server.http": {"image_hosts", "traces"},
    "server.openai": {"call_grammars", "harmony"},
    "server.openai.dialects": {"deepseek", "gemma", "lfm2", "mistral", "xml"},
}


@pytest.mark.parametrize("code", [ENGINE, SERVER], ids=["engine", "server"])
def test_what_a_plain_chat_needs(code, ids_dir):
    code += "\nimport sys\nprint(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code, str(ids_dir)], capture_output=True, text=True, check=True)
    others = {f"{room}.{name}" for room, names in OTHERS.items() for name in names}
    root = Path(__file__).parents[2]
    gone = [
        one
        for one in others
        if not (path := root / one.replace(".", "/")).is_dir() and not path.with_suffix(".py").exists()
    ]
    assert gone == []
    assert others.intersection(found.stdout.split()) == set()
