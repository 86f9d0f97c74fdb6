"""Models that the tests share: the default one, and small random ones of every supported architecture."""

import gc
import logging
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Small matrices gain nothing from a second thread, and threads of two workers that wait for each other on two cores
# take ten times as long. Read when torch is imported, by this process and by those that it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each of the many processes that tests start would compile every module again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import torch

from runtime.config import default_cache_dir
from runtime.errors import ModelError
from runtime.execution.attention import flashinfer
from runtime.models.default_model import fetch_default
from runtime.models.tokenizer import Tokenizer
from tests.resident import resident_bytes
from tests.tiny import TINY_MODELS, save_tiny

_MUCH = 50_000_000  # bytes

# For `make test`: the same examples each time, so that a change alone makes a test fail. Plain pytest draws new ones.
# No limit of time: a busy machine takes the time from an example.
settings.register_profile("repeat", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# For mutmut: the same examples each time, and no search for a smaller one once a test has failed.
settings.register_profile("mutants", derandomize=True, phases=(Phase.explicit, Phase.generate))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-model", action="store_true", help="skip what needs the default model (most tests)")


def pytest_configure(config: pytest.Config) -> None:
    """Servers inherit what this process ignores, as `nohup` and `command &` in a script have it."""
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if not hasattr(config, "workerinput"):  # the workers inherit it
        _begin_cache(config)


def pytest_collection_finish() -> None:
    """Exclude what was imported from garbage collection: each walk over it takes half a second."""
    gc.collect()
    gc.freeze()


def _begin_cache(config: pytest.Config) -> None:
    """Give the tests a cache of their own, which has the user's models that ship with Ramet, and goes with them."""
    own, of_user = Path(tempfile.mkdtemp(prefix="ramet-tests-")), default_cache_dir()
    config.add_cleanup(partial(shutil.rmtree, own))
    (own / "models").mkdir()
    for model in of_user.glob("models/smollm2-135m-*"):
        (own / "models" / model.name).symlink_to(model)
    os.environ |= {"RAMET_CACHE": str(own), "RAMET_CACHE_OF_USER": str(of_user)}


@pytest.fixture(autouse=True)
def _chance_begins_anew() -> None:
    """A test draws the same numbers whatever ran before it in its process."""
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture(autouse=True, scope="session")
def _small_workspaces() -> None:
    """Stand-ins for FlashInfer compute without a workspace, and each engine would fill one of 128 MiB with zeros."""
    if not torch.cuda.is_available():
        flashinfer._WORKSPACE_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def _engines_go_with_their_test() -> Iterator[None]:
    """An engine, with its tensors of hundreds of megabytes, is in cycles that Python would collect much later."""
    before = resident_bytes()
    yield
    if resident_bytes() - before > _MUCH:
        gc.collect()


@pytest.fixture(autouse=True)
def _logs_end_with_their_test() -> Iterator[None]:
    """A command that a test runs in this process logs to a stream that is closed behind the test."""
    root = logging.getLogger()
    before, level = [*root.handlers], root.level
    yield
    for handler in [*root.handlers]:
        if type(handler) is logging.StreamHandler and handler not in before:
            root.removeHandler(handler)
            root.setLevel(level)


@pytest.fixture
def logged_here(caplog: pytest.LogCaptureFixture) -> Callable[[], list[logging.LogRecord]]:
    """Ramet's own records; libraries may log what earlier tests left open."""
    return lambda: [record for record in caplog.records if record.name.startswith(("ramet", "runtime"))]


@pytest.fixture(scope="session")
def default_model_dir(pytestconfig: pytest.Config) -> Path:
    """SmolLM2-135M-Instruct, fetched and converted if it is not there yet; without it, nearly all tests fail."""
    try:
        fetched = fetch_default(Path(os.environ["RAMET_CACHE_OF_USER"]))  # where the next run finds it, too
        with suppress(FileExistsError):
            (default_cache_dir() / "models" / fetched.name).symlink_to(fetched)
        return fetched
    except ModelError as error:
        reason = f"the default model is not to be had: {error}"
        if pytestconfig.getoption("--without-model"):
            pytest.skip(reason)
        pytest.fail(f"{reason} (--without-model skips the tests that need it)", pytrace=False)


@pytest.fixture(scope="session")
def tokenizer(default_model_dir) -> Tokenizer:
    """The default model's, which small models have, too."""
    return Tokenizer.load(default_model_dir)


@pytest.fixture(scope="session")
def reference(default_model_dir):
    """The default model in transformers, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="session", params=sorted(TINY_MODELS))
def any_tiny_dir(request, tmp_path_factory) -> Path:
    """A small random model of each architecture and rope scaling, without a tokenizer."""
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory, default_model_dir) -> Path:
    """One small random Llama with the default model's tokenizer."""
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"), default_model_dir)


@pytest.fixture(scope="session")
def ids_dir(tmp_path_factory) -> Path:
    """One small random Llama without a tokenizer, for tests that ask by token ids: it takes half of the time."""
    return save_tiny("llama", tmp_path_factory.mktemp("ids"))
