"""Adapters over HTTP: by the names of every API, loaded and unloaded by admins alone."""

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.lora import merged, save_lora
from tests.runtime.engine.driver import greedy
from tests.server.conftest import start, stop

PROMPT = "The moon over the sea"
NEW = 8


@pytest.fixture(scope="module")
def base(tiny_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def paths(base, tmp_path_factory):
    directory = tmp_path_factory.mktemp("root") / "adapters"
    return [save_lora(directory / name, base, seed) for seed, name in enumerate(("poems", "prose"))]


@pytest.fixture(scope="module")
def texts(tokenizer, base, paths):
    """The answers of transformers: the model's, and those of each adapter."""
    prompt = tokenizer.encode(PROMPT)
    answers = [greedy(model, prompt, NEW) for model in (base, *(merged(base, path) for path in paths))]
    assert len({*map(tuple, answers)}) == 3
    return [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]


@pytest.fixture(scope="module")
def server(tiny_dir, paths, tmp_path_factory):
    directory = tmp_path_factory.mktemp("served")
    (directory / "keys").write_text("boss boss-secret-key admin\nalice alice-secret-key\n")
    options = ["--model", str(tiny_dir), "--served-model-name", "tiny", "--pool-tokens", "4096"]
    options += ["--api-keys", str(directory / "keys"), "--reuse", "a3", "--admin-root", str(paths[0].parents[1])]
    server = start(directory / "log", *options, "--lora", f"poems={paths[0]}")
    yield server
    assert stop(server) == 0
    assert "Traceback" not in (directory / "log").read_text()


@pytest.fixture
def alice(server):
    with httpx.Client(base_url=server.url, timeout=120, headers={"Authorization": "Bearer alice-secret-key"}) as client:
        yield client


@pytest.fixture
def boss(server):
    with httpx.Client(base_url=server.url, timeout=120, headers={"Authorization": "Bearer boss-secret-key"}) as client:
        yield client
        client.post("/v1/unload_lora_adapter", json={"lora_name": "prose"})


def complete(client, model, **fields):
    body = {"model": model, "prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, **fields}
    return client.post("/v1/completions", json=body)


def load(client, name, path, **fields):
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **fields})


def test_an_adapter_of_the_start_by_both_names(alice, texts):
    for model, name, text in (
        ("tiny", "tiny", texts[0]),
        ("poems", "poems", texts[1]),
        ("tiny:poems", "poems", texts[1]),
    ):
        answer = complete(alice, model).json()
        assert (answer["choices"][0]["text"], answer["model"]) == (text, name)
        lines = [line for line in complete(alice, model, stream=True).text.splitlines() if line.startswith("data: {")]
        assert lines
        assert all(f'"model":"{name}"' in line for line in lines)


def test_every_api_takes_it(alice, texts):
    """As the model of a chat, a response, a message and SGLang's request; each answer names it."""
    turns = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    for path, body in (
        ("/v1/chat/completions", turns),
        ("/v1/messages", turns),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 16, "temperature": 0, "store": False}),
    ):
        answers = [alice.post(path, json=body | {"model": model}).json() for model in ("tiny", "tiny:poems")]
        assert [answer["model"] for answer in answers] == ["tiny", "poems"]
        shown = [
            str(answer.get("choices") or answer.get("content") or answer["output"][0]["content"]) for answer in answers
        ]
        assert shown[0] != shown[1]
    sampling = {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}
    answer = alice.post("/generate", json={"text": PROMPT, "model": "poems", "sampling_params": sampling}).json()
    assert answer["text"] == texts[1]


def test_models_lists_it_with_its_parent(alice, boss, paths):
    models = {model["id"]: model for model in alice.get("/v1/models").json()["data"]}
    assert list(models) == ["tiny", "poems"]
    assert (models["poems"]["parent"], models["tiny"]["parent"]) == ("tiny", None)
    assert models["poems"]["root"] == "poems", "paths are for admins"
    assert boss.get("/v1/models/tiny:poems").json()["root"] == "poems"


def test_loaded_replaced_and_unloaded_while_serving(alice, boss, paths, texts):
    assert complete(alice, "prose").status_code == 404
    loaded = load(boss, "prose", paths[1])
    assert loaded.status_code == 200, loaded.text
    assert loaded.json()["rank"] == 4
    assert complete(alice, "prose").json()["choices"][0]["text"] == texts[2]
    twice = load(boss, "prose", paths[0])
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, "lora_name")
    assert load(boss, "prose", paths[0], load_inplace=True).status_code == 200
    assert complete(alice, "prose").json()["choices"][0]["text"] == texts[1]
    gone = boss.post("/v1/unload_lora_adapter", json={"lora_name": "prose"})
    assert gone.json() == {"success": True, "running": 0}
    assert boss.post("/v1/unload_lora_adapter", json={"lora_name": "prose"}).status_code == 404
    assert complete(alice, "tiny:prose").status_code == 404
    assert complete(alice, "poems").json()["choices"][0]["text"] == texts[1], "equal content under another name stays"


def test_unknown_ones_are_not_found_with_the_nearest_name(alice):
    answer = complete(alice, "tiny:poem")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "did you mean 'tiny:poems'?" in error["message"]
    assert complete(alice, "other:poems").status_code == 404


@pytest.mark.parametrize("name", ["tiny", "a:b", "a b", "x" * 129, ""])
def test_names_that_cannot_be(boss, paths, name):
    assert load(boss, name, paths[0]).status_code in (400, 422)


def test_nothing_is_said_of_what_lies_elsewhere(boss, paths, tmp_path):
    (paths[0].parent / "link").symlink_to(tmp_path)
    root = paths[0].parents[1]
    (linked := paths[0].parent / "linked").mkdir()
    (tmp_path / "config").write_text("{}")
    (linked / "adapter_config.json").symlink_to(tmp_path / "config")
    for path in (
        tmp_path,
        linked,
        root,
        root / ".." / "else",
        "adapters/prose",
        paths[0].parent / "link",
        "/no/such/place",
    ):
        error = load(boss, "elsewhere", path).json()["error"]
        assert error["message"] == "the path must be absolute, and below --admin-root"
        assert (error["type"], error["param"]) == ("permission_error", "lora_path")


def test_a_broken_one_is_one_error_and_nothing_is_lost(alice, boss, paths, texts):
    tmp_path = paths[0].parent / "broken"
    tmp_path.mkdir()
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    answer = load(boss, "broken", tmp_path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path")
    assert "not a complete safetensors file" in answer.json()["error"]["message"]
    assert "broken" not in str(alice.get("/v1/models").json())
    assert complete(alice, "poems").json()["choices"][0]["text"] == texts[1]


def test_methods_of_reuse_are_refused_by_name_and_not_the_default(alice):
    """Documents and reasoning steps are not reused with an adapter; the server's default is for the model alone."""
    segments = [{"document": {"text": "The sea is deep. " * 20}}, {"text": "What is deep?"}]
    sampling = {"max_new_tokens": 2, "temperature": 0}
    body = {"segments": segments, "model": "poems", "sampling_params": sampling}
    assert alice.post("/generate", json=body).status_code == 200
    refused = alice.post("/generate", json=body | {"reuse": {"method": "cacheblend"}})
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        400,
        "documents are not reused with an adapter",
    )
    refused = complete(alice, "poems", reuse={"method": "reasoncache"})
    assert "not served with an adapter" in refused.json()["error"]["message"]


def test_the_metrics_count_its_requests(alice, boss):
    def count() -> float:
        lines = boss.get("/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith("ramet:adapter_requests_total{") and "poems" in line]
        return float(line.split()[-1])

    before = count()
    complete(alice, "poems", max_tokens=1)
    assert count() == before + 1
