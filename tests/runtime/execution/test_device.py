"""Choice of the device."""

import logging

from runtime.config import ModelConfig
from runtime.execution import device


def test_a_driver_that_torch_cannot_use_is_named_once(monkeypatch, tmp_path, caplog):
    device._warn_of_driver.cache_clear()
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "_DRIVER", tmp_path / "none")
    assert device.choose_device(ModelConfig()).type == "cpu"
    assert caplog.text == ""
    monkeypatch.setattr(device, "_DRIVER", tmp_path)
    assert [device.choose_device(ModelConfig()).type for _ in "12"] == ["cpu", "cpu"]
    assert caplog.text.count("the CPU computes; there is an NVIDIA driver, but torch cannot use it: ") == 1
