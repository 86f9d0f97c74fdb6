"""Two processes compute what one does, and end together."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from runtime.batch import AttentionPlan, ForwardBatch, HiddenRows, LayerGroup, Span
from runtime.config import make_config
from runtime.errors import EngineDead, InvalidRequest, ModelError
from runtime.execution.parallel.orders import CopyRows, decode_order, encode_order
from runtime.frontend.async_engine import AsyncEngine
from runtime.models.shards import Shard, split_spec
from runtime.models.spec import DecoderSpec
from runtime.offline import Engine
from tests.lora import save_lora
from tests.processes import wait_for_end
from tests.runtime.features.diffusion.bicache.driver import DenoiseDriver, make_core
from tests.runtime.features.diffusion.bicache.models import save_tiny as save_tiny_diffusion
from tests.tiny import save_tiny

OPTIONS = {"dtype": "float32", "kernels": "torch", "pool_tokens": 1024, "device": "cpu", "threads": 1}
KILLED = "rank 1 of the model ended with code -9"
PROMPTS = ["Once upon a time", "Once upon a time there was", "The capital of France is", "1, 2, 3,"]


@pytest.fixture(scope="module", params=["llama_tied_biases", "qwen3"])
def model_dir(request, tmp_path_factory, default_model_dir):
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param), default_model_dir)


def greedy(engine: Engine) -> list[list[int]]:
    """Alone, together, and once more with everything cached, so that partial pages are copied."""
    sampling = {"temperature": 0, "max_new_tokens": 12}
    first = [engine.generate(prompt, sampling)[0].token_ids for prompt in PROMPTS]
    return first + [output.token_ids for _ in range(2) for output in engine.generate(PROMPTS, sampling)]


def test_two_processes_give_the_tokens_of_one(model_dir, tmp_path):
    with Engine(str(model_dir), **OPTIONS) as engine:
        wanted = greedy(engine)
    with Engine(str(model_dir), tensor_parallel=2, **OPTIONS) as engine:
        workers = engine.core.executor.workers
        assert greedy(engine) == wanted
        assert engine.state()["cached_tokens"] > 0
        with pytest.raises(InvalidRequest, match="adapters are not served with several ranks"):
            engine.load_adapter("poems", str(save_lora(tmp_path, nn.ModuleDict({"q_proj": nn.Linear(8, 8)}), seed=0)))
        assert greedy(engine)[:1] == wanted[:1]
    assert [process.returncode for process in workers.processes] == [0]


def test_a_killed_rank_ends_an_idle_engine(tiny_dir):
    with Engine(str(tiny_dir), tensor_parallel=2, **OPTIONS) as engine:
        (process,) = engine.core.executor.workers.processes
        engine.generate("Once upon a time", {"temperature": 0, "max_new_tokens": 4})
        os.kill(process.pid, signal.SIGKILL)
        engine._wait(engine._client.wait_dead())
        with pytest.raises(EngineDead, match=KILLED):
            engine.generate("Hello")


def test_a_killed_rank_ends_a_step(tiny_dir):
    with Engine(str(tiny_dir), tensor_parallel=2, **OPTIONS) as engine:
        (process,) = engine.core.executor.workers.processes
        os.kill(process.pid, signal.SIGSTOP)  # so that the step cannot end before the rank is killed
        stream = engine.stream("Once upon a time", {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True})
        threading.Timer(0.5, os.kill, (process.pid, signal.SIGKILL)).start()
        with pytest.raises(EngineDead, match=KILLED):
            list(stream)
        engine._wait(engine._client.wait_dead())
        with pytest.raises(EngineDead, match=KILLED):
            engine.generate("Hello")


async def _serve_until_a_rank_dies(path) -> None:
    engine = AsyncEngine(make_config(model=str(path), tensor_parallel=2, **OPTIONS))
    await engine.start()
    try:
        pid = engine._host.process.pid
        (worker,) = (int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        os.kill(worker, signal.SIGKILL)
        await asyncio.wait_for(engine.wait_dead(), 120)
        assert not engine.alive
    finally:
        await engine.stop()


def test_a_killed_rank_ends_the_engine_process(tiny_dir):
    asyncio.run(_serve_until_a_rank_dies(tiny_dir))


def test_a_killed_driver_ends_the_other_ranks(tiny_dir):
    code = "import sys, runtime; e = runtime.Engine(sys.argv[1], tensor_parallel=2, dtype='float32', pool_tokens=1024);"
    code += "print(e.core.executor.workers.processes[0].pid, flush=True); input()"
    driver = subprocess.Popen(
        [sys.executable, "-c", code, str(tiny_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    worker = int(driver.stdout.readline())
    driver.kill()
    driver.communicate()
    wait_for_end(worker)


def test_diffusion_with_reused_prefixes_gives_the_tokens_of_one_process(tmp_path):
    """States with which prefixes enter a refresh are kept by the driver and brought to all ranks."""
    path = save_tiny_diffusion("llada", tmp_path / "llada", layers=6)
    prompt = list(range(40))
    wanted = {"prefix_tokens": 32, "gen_length": 16, "steps": 8, "depth": 3, "refresh_interval": 4}
    found = []
    for size in (1, 2):
        driver = DenoiseDriver(make_core(path, tensor_parallel=size, kernels="torch", threads=1))
        try:
            driver.denoise("a", prompt, **wanted)
            driver.run()
            driver.denoise("b", [*prompt[:32], 7, 8], **wanted)
            driver.run()
            assert driver.report("b")["cached_tokens"] == 32
            found.append(driver.tokens)
        finally:
            driver.core.close()
    assert found[0] == found[1]


def test_heads_that_do_not_divide_are_an_error(tiny_dir):
    with pytest.raises(ModelError, match="is 4, which does not divide the model's 6 query heads and 2 key-value heads"):
        Engine(str(tiny_dir), tensor_parallel=4, **OPTIONS)


def test_a_rank_that_cannot_load_is_an_error(tiny_dir, tmp_path):
    """The driver's own error ends the ranks that it has started, and their group."""
    for file in tiny_dir.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ModelError, match="no safetensors file"):
        Engine(str(tmp_path), tensor_parallel=2, **OPTIONS)
    assert not dist.is_initialized()


@pytest.mark.parametrize("size", [2, 3])
def test_shards_add_up(tiny_dir, size):
    """Products of the cut matrices, summed or laid side by side, are those of the whole ones."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 12), torch.randn(18, 12)
    shards = [Shard(rank, size) for rank in range(size)]
    rows = [s.cut("model.layers.0.mlp.up_proj.weight", weight) for s in shards]
    torch.testing.assert_close(torch.cat([x @ w.t() for w in rows], dim=-1), x @ weight.t())
    columns = [s.cut("model.layers.0.self_attn.o_proj.weight", weight) for s in shards]
    parts = [p @ w.t() for p, w in zip(x.chunk(size, dim=-1), columns, strict=True)]
    torch.testing.assert_close(sum(parts), x @ weight.t())
    bias = torch.randn(18)
    assert torch.equal(sum(s.cut("model.layers.0.mlp.down_proj.bias", bias) for s in shards), bias)
    head = torch.randn(17, 12)
    parts = [x @ s.cut("lm_head.weight", head).t() for s in shards]
    assert len({part.shape for part in parts}) == 1
    torch.testing.assert_close(torch.cat(parts, dim=-1)[:, :17], x @ head.t())
    if size == 2:
        assert split_spec(DecoderSpec.load(tiny_dir), size).num_heads == 3


def plain(value: Any) -> Any:
    """An order whose arrays are their types and values, to be compared."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, list):
        return [plain(one) for one in value]
    if is_dataclass(value):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    return value


def test_orders_survive_the_way():
    plan = AttentionPlan(3)
    pages = torch.arange(4, dtype=torch.int32).numpy()
    plan.add(slice(0, 3), Span(pages, 13, shift=-2, keep=torch.arange(13) % 2 == 0))
    plan.add(torch.tensor([2, 0]), Span(pages[:1], 2), np.array([1, 2], dtype=np.int32))
    rows = torch.tensor([0, 2])
    load, save = HiddenRows(rows, torch.randn(2, 5)), HiddenRows(rows, torch.empty(2, 5))
    group = LayerGroup(range(1, 3), rows, torch.tensor([7, -1]), plan, [load], [save])
    batch = ForwardBatch(torch.tensor([5, 6, 7]), torch.arange(3), [group], torch.tensor([2]))
    assert plain(decode_order(encode_order(batch))) == plain(replace(batch, groups=[replace(group, save=[])]))
    assert decode_order(encode_order(CopyRows(3, 4, 5))) == CopyRows(3, 4, 5)
