"""A Ramet server for the time of a benchmark."""

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

# The configuration of a random model whose answers cost little, and which counts as real ones do.
SMALL_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 49152,
    "max_position_embeddings": 1 << 15, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True,
    "eos_token_id": 0, "bos_token_id": 0,
}  # fmt: skip

START_SECONDS = 300


@contextmanager
def small_model() -> Iterator[Path]:
    """A directory with SMALL_MODEL and the default model's tokenizer, for `--random-weights`."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(SMALL_MODEL))
        fetch = [sys.executable, "-m", "server.cli", "fetch-model"]
        default = subprocess.run(fetch, check=True, capture_output=True, text=True).stdout.strip()
        for path in Path(default).glob("tokenizer*.json"):
            shutil.copy(path, model)
        yield model


@contextmanager
def local_server(options: Sequence[str]) -> Iterator[str]:
    """Start `ramet serve` with options on a free port of 127.0.0.1; yields its URL.

    Raises:
        RuntimeError: if it ends early or is not ready in time.
    """
    process, url = start_server(options)
    try:
        yield url
    finally:
        end_server(process)


def end_server(process: subprocess.Popen[bytes]) -> None:
    """End a server, by force if it takes more than 30 seconds."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def start_server(options: Sequence[str]) -> tuple[subprocess.Popen[bytes], str]:
    """The process and the URL of a ready server. Raises RuntimeError as `local_server`."""
    port = free_port()
    process = subprocess.Popen([*serve_command(port), "--log-level", "warning", *options])
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(url, process)
    except BaseException:
        process.kill()
        raise
    return process, url


def serve_command(port: int) -> list[str]:
    """The command of a server on a port, to which options may be added."""
    return [sys.executable, "-m", "server.cli", "serve", "--port", str(port)]


def free_port() -> int:
    """A port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until `/health` answers with 200. Raises RuntimeError if the process ends or that takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode} before it was ready")
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise RuntimeError(f"the server was not ready within {START_SECONDS} s")
