"""The simulated device for each test."""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.runtime.execution.sim.cuda import Cuda
from tests.runtime.execution.sim.engines import save
from tests.runtime.execution.sim.kernels import flashinfer_on
from tests.runtime.execution.sim.package import Package
from tests.runtime.execution.sim.tensors import Device, Dispatch


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a random model of a family. Ask for it before `device`, which would simulate its making."""
    return cache(lambda kind: save(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A machine with a GPU and FlashInfer, both simulated."""
    made = Device()
    Cuda(made).install(monkeypatch)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_on(made))
    Package().install(monkeypatch)
    lifted = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(values, device=...) is a copy from the host
    try:
        # Outside of inference mode, torch's own code looks for the device before it dispatches.
        with torch.inference_mode(), Dispatch(made):
            yield made
    finally:
        torch._C._set_only_lift_cpu_tensors(lifted)
