"""Weights that stay quantised on a GPU, computed by the CPU's variants of the same products of torch."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from runtime.execution import coded_products
from runtime.execution.attention.torch_attention import TorchAttention
from runtime.execution.coded_products import CodedTensor, Float8Tensor, Int4Tensor, coded_tensor
from runtime.execution.ops import Ops
from runtime.execution.quantized import load_products
from runtime.execution.torch_decoder import TorchDecoder
from runtime.models.coded import CodedWeight
from runtime.models.published import PublishedTensors
from runtime.models.spec import DecoderSpec
from runtime.models.weights import load_weights
from tests.runtime.execution.native.test_decoder import CPU, make_pool, mixed_batch
from tests.runtime.models.published_files import FORMATS, write_published

VOCAB = 320
# Formats whose matrices have a product, and what it may be off by.
PRODUCTS = {
    "awq": 0.02,
    "gptq": 0.02,
    "gptq asymmetric": 0.02,
    "gptq v2": 0.02,
    "packed": 0.02,
    "packed asymmetric": 0.02,
    "fp8": 0.1,
    "float8 tensors": 0.1,
    "float8 channels": 0.1,
}


def int4(group: int = 64, k: int = 256, n: int = 48, zeros: int | None = None) -> CodedWeight:
    draw = torch.Generator().manual_seed(k + group)
    codes = torch.randint(16, (n, k), generator=draw, dtype=torch.uint8)
    scales = (torch.rand(n, k // group, generator=draw) * 0.01 + 0.001).half()
    drawn = torch.randint(16, scales.shape, generator=draw) if zeros is None else torch.full(scales.shape, zeros)
    return CodedWeight(4, codes, scales, (1, group), drawn.short())


def float8(k: int = 256, n: int = 48) -> CodedWeight:
    draw = torch.Generator().manual_seed(k)
    codes = torch.randn(n, k, generator=draw).to(torch.float8_e4m3fn)
    return CodedWeight(8, codes, torch.rand(n, 1, generator=draw) + 0.5, (1, k))


@pytest.mark.parametrize(("group", "k"), [(32, 96), (64, 64), (128, 256), (256, 512), (96, 192), (512, 512)])
@pytest.mark.parametrize("zeros", [None, 8])
def test_products_of_4_bits(group, k, zeros):
    weight = int4(group, k, zeros=zeros)
    made = coded_tensor(weight, CPU, set())
    assert isinstance(made, Int4Tensor)
    x, bias = torch.randn(9, k).bfloat16(), torch.randn(48).bfloat16()
    wanted = F.linear(x.float(), weight.values(), bias.float())
    assert (F.linear(x, made, bias).float() - wanted).norm() / wanted.norm() < 0.01
    assert torch.equal(F.linear(x, made, bias), F.linear(x, made) + bias)
    residual = torch.randn(9, 48).bfloat16()
    assert torch.equal(Ops().add_linear(residual, x, made, bias), F.linear(x, made, bias) + residual)


def test_products_in_float8_round_rows_of_activations_alone():
    weight = float8()
    made = coded_tensor(weight, CPU, set())
    assert isinstance(made, Float8Tensor)
    x = torch.randn(9, 256).bfloat16()
    x[3], x[4] = x[3] * 1000, 0
    wanted = F.linear(x.float(), weight.values())
    found = F.linear(x, made).float()
    errors = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert 0 < errors[[0, 1, 2, 3]].min() < errors[[0, 1, 2, 3]].max() < 0.06
    assert not found[4].any()
    assert torch.equal(F.linear(x[2:3], made).float(), found[2:3])


def test_a_quantised_weight_has_no_other_operations():
    made = coded_tensor(int4(), CPU, set())
    assert (made.shape, made.dtype, made.device, len(made)) == ((48, 256), torch.bfloat16, CPU, 48)
    with pytest.raises(NotImplementedError):
        made + 1


def test_what_has_no_product():
    blocks = CodedWeight(8, float8().codes, torch.ones(48, 2), (1, 128))
    ordered = int4()
    ordered.order = torch.arange(256).flip(0) // 64
    of_8_bits = int4()
    of_8_bits.bits = 8
    for weight in (blocks, ordered, of_8_bits, int4(n=40), int4(group=16), float8(n=40)):
        assert coded_tensor(weight, CPU, set()) is None


@pytest.mark.parametrize("fault", ["wrong", "raises", "nan"])
def test_a_product_that_does_not_work_here_is_not_taken(monkeypatch, caplog, fault):
    real = torch._weight_int4pack_mm_for_cpu

    def broken(x, *rest):
        if fault == "raises":
            raise RuntimeError("no kernel for this GPU")
        return real(x, *rest) * (torch.nan if fault == "nan" else 1.2)

    monkeypatch.setattr(torch, "_weight_int4pack_mm_for_cpu", broken)
    caplog.set_level(logging.WARNING)
    told = set()
    assert coded_tensor(int4(), CPU, told) is coded_tensor(int4(), CPU, told) is None
    assert caplog.text.count("a weight of 48 x 256 is unpacked") == 1
    assert {"raises": "no kernel for this GPU", "wrong": "off by 20 %", "nan": "off by nan %"}[fault] in caplog.text


@pytest.mark.parametrize("kind", [Int4Tensor, Float8Tensor])
def test_shapes_and_types_are_those_that_cuda_asks_for(kind):
    """Torch checks them without a GPU; layouts and numbers, `coded_tensor` checks on the GPU."""
    with FakeTensorMode(), torch.device("cuda"):
        is_float = kind is Float8Tensor
        codes = torch.empty(48, 256, dtype=torch.float8_e4m3fn if is_float else torch.uint8)
        groups = 1 if is_float else 2
        zeros = None if is_float else torch.empty(48, groups, dtype=torch.int16)
        made = kind(CodedWeight(4, codes, torch.empty(48, groups), (1, 256 // groups), zeros))
        out = F.linear(torch.empty(5, 256, dtype=torch.bfloat16), made)
    assert (out.shape, out.dtype, out.device.type) == ((5, 48), torch.bfloat16, "cuda")


@pytest.mark.parametrize("kind", FORMATS)
def test_logits_are_near_those_of_unpacked_weights(tmp_path, kind, caplog):
    published, plain = write_published(FORMATS[kind], tmp_path)
    spec = DecoderSpec.load(plain)
    reference = TorchDecoder(spec, load_weights(plain, spec, torch.float32), CPU)
    caplog.set_level(logging.INFO)
    loaded = load_products(PublishedTensors.open(published, spec), spec, CPU, Ops())
    kept = [isinstance(one, CodedTensor) for layer in loaded.model.layers for one in (layer.mixer.inputs, layer.down)]
    # The output projection of one layer is not quantised.
    assert kept == [kind in PRODUCTS] * 4
    assert f"{7 if kind in PRODUCTS else 0} of 7 quantised matrices" in caplog.text
    assert loaded.quantization.endswith("unpacked") == (kind not in PRODUCTS)
    logits = []
    for model, dtype in ((reference, torch.float32), (loaded.model, torch.bfloat16)):
        batch, pool = mixed_batch(spec.num_layers), make_pool(spec, dtype)
        batch.tokens %= VOCAB
        logits.append(model.forward(batch, pool, TorchAttention(pool, model.rope)))
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 0 < error < PRODUCTS.get(kind, 0.02)


def test_a_lost_device_is_no_reason_to_unpack(monkeypatch):
    def broken(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "_weight_int4pack_mm_for_cpu", broken)
    monkeypatch.setattr(coded_products, "is_lost", lambda device: True)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        coded_tensor(int4(), CPU, set())
