"""Models that transformers' code cannot serve here are refused by name, and the options that it has not."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from runtime.config import make_config
from runtime.errors import ModelError
from runtime.execution.transformers.model import TransformersModel
from runtime.opening import open_engine
from tests.runtime.engine.driver import Driver, make_core
from tests.runtime.execution.transformers.architectures import save_small

FOREIGN = {"model_impl": "transformers"}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return save_small("Gemma2", tmp_path_factory.mktemp("gemma2"))


@pytest.fixture
def copy(gemma, tmp_path):
    """Changes fields of the configuration of a copy, and returns its directory."""

    def edit(**fields):
        for path in gemma.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        config = json.loads((gemma / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | fields))
        return tmp_path

    return edit


def open_small(directory, **options):
    options = {"dtype": "float32", "device": "cpu", "pool_tokens": 256, "random_weights": True, **options}
    return open_engine(make_config(model=str(directory), **options), directory)


SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED = {
    "T5": (transformers.T5Config(architectures=["T5ForConditionalGeneration"]), ["encoder-decoder"]),
    "Llava": (
        transformers.LlavaConfig(architectures=["LlavaForConditionalGeneration"]),
        ["images", "text"],
    ),
    "Bloom": (transformers.BloomConfig(hidden_size=32, n_head=4, vocab_size=99, n_layer=2), ["attention interface"]),
    "Mamba": (transformers.MambaConfig(hidden_size=32, vocab_size=99, num_hidden_layers=2), ["recurrent state"]),
    "Lfm2": (transformers.Lfm2Config(**SIZES, layer_types=["conv", "conv"]), ["layer_types"]),
    "Bert": (transformers.BertConfig(**SIZES, architectures=["BertLMHeadModel"]), ["not causal"]),
    "Bart": (
        transformers.BartConfig(vocab_size=99, d_model=32, decoder_layers=2, is_encoder_decoder=False),
        ["not those of its own attention"],
    ),
    "remote code": (
        transformers.LlamaConfig(**SIZES, architectures=["OddForCausalLM"], auto_map={"AutoModel": "odd.Odd"}),
        ["OddForCausalLM", "never run"],
    ),
    "dynamic": (
        transformers.LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        ["'dynamic'"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_are_refused_by_name(name, tmp_path):
    config, words = REFUSED[name]
    config.architectures = config.architectures or [f"{name}ForCausalLM" if name != "dynamic" else "LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError) as error:
        open_small(tmp_path)
    assert all(word in error.value.message for word in words), error.value.message


def test_pickles_and_quantised_and_incomplete_weights_are_refused(copy):
    directory = copy()
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    kept = {key: tensor for key, tensor in tensors.items() if key != name}
    for stored, words in (
        (kept, name),
        ({**kept, name: tensors[name].to(torch.float8_e4m3fn)}, "F8_E4M3"),
        ({**kept, name: tensors[name][:-1].contiguous()}, name),
    ):
        save_file(stored, directory / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=words.replace(".", r"\.")):
            open_small(directory, random_weights=False)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickle, which Ramet never loads"):
        open_small(directory, random_weights=False)
    with pytest.raises(ModelError, match="quantised with 'gptq'"):
        open_small(copy(quantization_config={"quant_method": "gptq"}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model_impl": "ramet"}, "architecture is Gemma2ForCausalLM; supported are"),
        ({"tensor_parallel": 2}, "--tensor-parallel is 2"),
        ({"reuse": "cacheblend"}, "--reuse cacheblend"),
        ({"reuse": "reasoncache"}, "--reuse reasoncache"),
        ({"quantization": "int8"}, "--quantization int4 or int8"),
        ({"context_length": 300}, "at most 256"),
    ],
)
def test_options_that_it_has_not_are_refused(gemma, options, words):
    with pytest.raises(ModelError, match=words):
        open_small(gemma, **options)


def test_the_model_says_whose_code_computes_it(gemma, tmp_path, caplog):
    caplog.set_level("INFO", "ramet.engine")
    assert open_small(gemma).info.model_impl == "transformers"
    assert "transformers' code, at its speed, computes Gemma2ForCausalLM" in caplog.text
    llama = save_small("Llama", tmp_path)
    assert open_small(llama, random_weights=False).info.model_impl == "ramet"
    core = open_small(llama, random_weights=False, **FOREIGN)
    assert core.info.model_impl == "transformers"
    assert {*core.strategies} == {"prefix", "chunks"}
    assert {*open_small(gemma).strategies} == {"prefix"}, (
        "modules lie at positions with gaps, which windows do not know"
    )


def test_longrope_ends_the_context_where_its_frequencies_change(tmp_path):
    factors = {"short_factor": [1.0, 1.0, 1.1, 1.2], "long_factor": [2.0, 2.0, 3.0, 4.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    path = save_small("Phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=64)
    core = make_core(path, **FOREIGN)
    assert core.executor.context_length == 64


def test_random_weights_are_the_same_in_every_call(gemma):
    config = make_config(random_weights=True).model
    one, other = (TransformersModel(gemma, config, torch.float32, torch.device("cpu")) for _ in range(2))
    pairs = zip(one._model.parameters(), other._model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_half_precision_and_fp8_pages(gemma):
    prompt = [7, 8, 9] * 9
    exact = Driver(make_core(gemma)).together([prompt], max_new_tokens=4)
    assert Driver(make_core(gemma, dtype="bfloat16")).together([prompt], max_new_tokens=4)[0][:1] == exact[0][:1]
    assert len(Driver(make_core(gemma, kv_dtype="fp8")).together([prompt], max_new_tokens=4)[0]) == 4
