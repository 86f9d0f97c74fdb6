"""The `ramet` command."""

import importlib.util
import os
import pkgutil
import re
import shutil
import signal
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import gguf
import numpy as np
import pytest

import runtime.frontend
from radix import POLICIES
from runtime import Engine
from runtime.config import CacheConfig, Config, ServerConfig, make_config
from runtime.errors import ModelError
from runtime.execution import flashinfer_package
from runtime.execution.flashinfer_package import VERSION
from runtime.execution.native.library import load_best
from runtime.features.diffusion.feature import unusable
from runtime.models.resolve import resolve_model
from runtime.opening import open_engine
from server import doctor
from server.cli import main
from server.options import options_page
from server.serve import _bind
from tests.runtime.models.test_gguf_files import LAYERS, Kind, tensors, write
from tests.tiny import save_tiny


def test_every_option_of_the_configuration_is_there_and_explained(capsys):
    with pytest.raises(SystemExit) as end:
        main(["serve", "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for section in Config.model_fields.values():
        for name, field in section.annotation.model_fields.items():
            assert f"--{name.replace('_', '-')}" in text
            assert field.description, name
    assert "--no-prefix-cache" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--port", "99999"], "argument --port: "),
        (["serve", "--context-length", "0"], "argument --context-length: "),
        (["serve", "--pool-memory", "inf"], "argument --pool-memory: Input should be a finite number, not 'inf'"),
        (["serve", "--log-level", "loud"], "argument --log-level: "),
        (["generate", "x", "--temperature", "-1"], "argument --temperature: "),
        (["generate", "x", "--max-new-tokens", "many"], "argument --max-new-tokens: "),
        (["serve", "--served-model-name", ", ,"], "argument --served-model-name: "),
        (["serve", "--threads", "100000"], "argument --threads: "),
        (["serve", "--cors-origins", "https://a.example, https://b.example/"], "argument --cors-origins: "),
        (["serve", "--kv-events", "nonsense"], "argument --kv-events: "),
        *(
            (["serve", "--allowed-hosts", host], "argument --allowed-hosts: ")
            for host in ("a b", "http://a", "b, a:80", "::1", "[x]")
        ),
        (["serve", "--trusted-proxies", "10.0.0.1 10.0.0.2"], "argument --trusted-proxies: "),
        (["serve", "--disk-space", "5"], "argument --disk-space: needs --disk-cache"),
        (["serve", "--kv-events", "tcp://127.0.0.1:5557,5558"], "argument --kv-events: "),
        (["serve", "--hold-time", "60:"], "argument --hold-time: "),
        (["serve", "--hold-time", "60:30"], "argument --hold-time: DEFAULT is longer than MOST"),
        ([], "COMMAND"),
        (["serve", "--pool-memry", "2"], "unrecognized arguments: --pool-memry 2; did you mean --pool-memory?"),
        (["serve", "--lora", ""], "argument --lora: '' does not fit: low-rank adapters"),
        (["serve", "--xyz"], "unrecognized arguments: --xyz"),
        (["fetch-model", "--port", "1"], "unrecognized arguments: --port 1"),
        (["srve"], "there is no command 'srve'; did you mean serve?"),
        (["bench", "policies", "--capacitis=3"], "did you mean --capacities?"),
        (["profile", "--out", "t.json", "--plot", "/"], "argument --plot: / is a directory"),
        (["profile", "--out", "missing/t.json"], "argument --out: there is no directory missing"),
    ],
)
def test_a_wrong_value_is_one_line_and_status_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert words in told


def test_generate_prints_the_text(tiny_dir, capsys):
    options = ["--model", str(tiny_dir), "--dtype", "float32", "--pool-tokens", "1024", "--max-new-tokens", "4"]
    assert main(["generate", "Once upon", *options]) == 0
    once = capsys.readouterr().out
    assert once.endswith("\n")
    assert main(["generate", "Once upon", *options]) == 0
    assert capsys.readouterr().out == once
    assert main(["generate", "Hello", "--chat", *options]) == 0


def test_a_reader_that_leaves_ends_the_output_quietly():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", "import sys; from server.cli import main; sys.exit(main())", "options"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


SCHEMA = """<schema name="cities">Trips.
<module name="plan">For <parameter name="days" length="2"/> days
<union><module name="rome">in Rome</module></union></module>
</schema>"""


def test_schema_check_prints_the_layout_or_the_first_error(tiny_dir, tmp_path, capsys):
    (tmp_path / "cities.pml").write_text(SCHEMA)
    assert main(["schema", "check", str(tmp_path / "cities.pml"), "--model", str(tiny_dir)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert [row[0] for row in rows] == ["/", "/plan", "/plan/rome"]
    assert rows[1][3:] == ["days 6 to 7", ""]
    assert rows[2] == ["/plan/rome", "10 to 11", "2", "", "10 to 11"]
    (tmp_path / "cities.pml").write_text(SCHEMA.replace("</union>", ""))
    assert main(["schema", "check", str(tmp_path / "cities.pml"), "--model", str(tiny_dir)]) == 1
    assert "ramet: /plan, line 3: this is not XML: mismatched tag" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["schema", "check", str(tmp_path / "none.pml"), "--model", "/no/such/model"])
    assert "none.pml cannot be read: No such file" in capsys.readouterr().err


def test_generate_imports_modules(tiny_dir, tmp_path, capsys):
    (tmp_path / "cities.pml").write_text(SCHEMA)
    options = ["--model", str(tiny_dir), "--dtype", "float32", "--pool-tokens", "1024", "--max-new-tokens", "4"]
    prompt = '<prompt schema="cities"><plan days="3"/> I</prompt>'
    assert main(["generate", prompt, "--schema", str(tmp_path / "cities.pml"), *options]) == 0
    alone = capsys.readouterr().out
    assert alone.endswith("\n")
    assert main(["generate", prompt, "--schema", str(tmp_path / "cities.pml"), "--mode", "nested", *options]) == 0
    assert capsys.readouterr().out != alone
    with pytest.raises(SystemExit):
        main(["generate", prompt, "--mode", "nested", *options])
    assert "argument --mode: needs --schema" in capsys.readouterr().err
    assert main(["generate", "Hello", "--schema", str(tmp_path / "cities.pml"), *options]) == 1
    assert "ramet: line 1: this is not XML" in capsys.readouterr().err


def test_generate_reads_documents(tiny_dir, tmp_path, capsys):
    (tmp_path / "one.txt").write_text("Rome is old.")
    options = ["--model", str(tiny_dir), "--dtype", "float32", "--pool-tokens", "1024", "--max-new-tokens", "4"]
    assert main(["generate", "Rome is old.\nWhy?", *options]) == 0
    plain = capsys.readouterr().out
    documents = ["--document", str(tmp_path / "one.txt")]
    assert main(["generate", "Why?", *documents, *options]) == 0
    assert capsys.readouterr().out == plain
    assert main(["generate", "Why?", *documents, "--reuse", "pie", *options]) == 0
    assert capsys.readouterr().out == plain  # it begins at 0
    assert main(["generate", "Why?", *documents, "--chat", *options]) == 0
    with pytest.raises(SystemExit):
        main(["generate", "Why?", "--document", str(tmp_path / "none.txt"), "--model", "/no/such/model"])
    assert "none.txt cannot be read: No such file" in capsys.readouterr().err


def test_fetch_model_prints_the_directory_of_a_model(tiny_dir, tmp_path, capsys):
    assert main(["fetch-model", "--model", str(tiny_dir)]) == 0
    assert Path(capsys.readouterr().out.strip()) == tiny_dir
    assert main(["fetch-model", "--model", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "config.json" in captured.err


def test_lists_of_hosts_and_proxies_may_have_spaces_at_their_commas():
    server = make_config(allowed_hosts="a.example, b.example", trusted_proxies="10.0.0.1 ,fd00::/8").server
    assert (server.allowed_hosts, server.trusted_proxies) == ("a.example, b.example", "10.0.0.1 ,fd00::/8")


def test_a_model_that_is_not_there_is_one_line_and_status_1(capsys):
    assert main(["generate", "x", "--model", "/no/such/model"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ramet: --model /no/such/model: ")
    assert main(["generate", "x", "--model", "smollm2-135m-instuct"]) == 1
    assert capsys.readouterr().err.endswith("; did you mean smollm2-135m-instruct?\n")
    assert main(["generate", "x", "--model", "smolm2"]) == 1
    assert capsys.readouterr().err.endswith("; did you mean smollm2-135m-instruct?\n")


def test_only_what_may_be_a_model_is_proposed(tmp_path, capsys):
    (tmp_path / "nope.key").write_text("secret")
    (tmp_path / "qwen3").mkdir()
    for meant, name in ((None, "nope"), ("qwen3", "qwen")):
        assert main(["generate", "x", "--model", str(tmp_path / name)]) == 1
        line = capsys.readouterr().err
        assert ("did you mean" in line) == (meant is not None)
        assert meant is None or line.endswith(f"{tmp_path / meant}?\n")


@pytest.mark.parametrize(("option", "value"), [("depth_table", "t.json"), ("depth_bound", 0.5)])
def test_options_that_the_model_cannot_use_are_refused(tiny_dir, option, value):
    with pytest.raises(ModelError, match=f"--{option.replace('_', '-')}: {tiny_dir.name} is a causal model"):
        Engine(model=str(tiny_dir), dtype="float32", pool_tokens=1024, **{option: value})
    with pytest.raises(ModelError, match="--kernels flashinfer: FlashInfer needs CUDA"):
        Engine(model=str(tiny_dir), kernels="flashinfer", device="cpu", pool_tokens=1024)
    config = make_config(reuse="reasoncache", depth_table="t.json")
    assert [unusable(config, is_diffusion) for is_diffusion in (True, False)] == ["reuse reasoncache", "depth-table"]
    assert [unusable(Config(), is_diffusion) for is_diffusion in (True, False)] == [None, None]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ssl-certfile", "none"], "--ssl-certfile none cannot be used: "),
        (["--ssl-certfile", __file__], f"--ssl-certfile {__file__} cannot be used: "),
        (["--ssl-certfile", f"{__file__},{__file__}"], f"--ssl-certfile {__file__},{__file__} cannot be used: "),
    ],
)
def test_a_bad_certificate_is_one_line_before_the_model_is_loaded(options, words, capsys):
    assert main(["serve", "--port", "0", "--model", "/no/such/model", *options]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_tiers_and_adapters_that_cannot_be_used_are_an_error_before_the_weights_are_read(tiny_dir, tmp_path):
    shutil.copy(tiny_dir / "config.json", tmp_path)
    shutil.copy(tiny_dir / "tokenizer.json", tmp_path)
    for options, words in (
        ({"disk_cache": tmp_path / "config.json"}, "--disk-cache: "),
        ({"kv_encryption_key_file": tmp_path / "none"}, "--kv-encryption-key-file: "),
        ({"host_memory": 1e9}, "--host-memory is 1e.09 GiB; this machine has "),
        ({"host_memory": 1, "prefix_cache": False}, "--no-prefix-cache leaves nothing for --host-memory"),
        ({"lora": f"poems={tmp_path}"}, f"--lora poems={tmp_path}: .* has no adapter_model.safetensors"),
    ):
        with pytest.raises(ModelError, match=words):
            Engine(model=str(tmp_path), pool_tokens=1024, **options)


def test_a_file_that_cannot_be_opened_is_one_line(tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise PermissionError(13, "Permission denied", "some/file")

    monkeypatch.setattr("server.cli.options_page", fail)
    assert main(["options"]) == 1
    assert capsys.readouterr().err == "ramet: some/file: Permission denied\n"


def test_the_doctor_tells_what_there_is(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("RAMET_CACHE", str(tmp_path / "none"))
    assert main(["doctor", "--pool-memory", "3"]) == 0
    told = capsys.readouterr().out
    rows = {line.split("  ")[0].strip(): line for line in told.splitlines()}
    assert {"processor", "cores", "kernels", "memory", "disk", "model", "Python", "packages"} <= rows.keys()
    assert "3 GiB (--pool-memory)" in rows["pool"]
    assert "fetched at the first start" in rows["model"]
    assert "torch " in told
    assert ("may not use all cores" in told) == (len(os.sched_getaffinity(0)) < os.cpu_count())


@pytest.mark.parametrize(
    ("name", "words"),
    [("{}/nope", "no such directory or file"), ("nope", "no such directory or file"), ("{}", "config.json is missing")],
)
def test_the_doctor_finds_no_model(capsys, tmp_path, name, words):
    assert main(["doctor", "--model", name.format(tmp_path)]) == 1
    told = capsys.readouterr()
    assert words in told.err
    assert "processor" in told.out


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gguf", {}),
        ("llama", {"dtype": "float32"}),
        ("llama", {"kv_dtype": "fp8", "page_size": 5}),
        ("gemma3", {}),  # some layers have a pool of their own
        ("gemma3", {"context_length": 64}),
    ],
)
def test_the_doctor_counts_the_tokens_of_the_pool(capsys, tmp_path, kind, options):
    path = write(tmp_path / "m.gguf") if kind == "gguf" else save_tiny(kind, tmp_path)
    options |= {"model": str(path), "device": "cpu", "pool_memory": 0.001}
    arguments = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["doctor", *arguments]) == 0
    config = make_config(**options)
    core = open_engine(config, resolve_model(config.model))
    pool = core.executor.pool
    core.close()
    assert f"0.001 GiB (--pool-memory): {pool.num_pages * pool.page_size:,} tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("packages", "nvcc", "row", "hint"),
    [
        ({}, None, "torch: FlashInfer is missing", "Without it, torch copies the KV"),
        ({"flashinfer-python": "0.7.2"}, None, f"0.7.2 is installed, and Ramet calls {VERSION}", "sorts to filter"),
        ({"flashinfer-python": VERSION}, None, "has neither compiled kernels nor nvcc", "`make extra-cuda`) nor nvcc."),
        ({"flashinfer-python": VERSION}, "/bin/nvcc", "compiled at a model's first start with /bin/nvcc", ""),
        ({"flashinfer-python": VERSION, "flashinfer-jit-cache": "1+cu130"}, None, "compiled (1+cu130)", ""),
    ],
)
def test_the_doctor_tells_what_computes_attention_on_a_gpu(capsys, monkeypatch, packages, nvcc, row, hint):
    real = doctor.version

    def version(name):
        if name.startswith("flashinfer") and name not in packages:
            raise PackageNotFoundError(name)
        return packages.get(name) or real(name)

    for module in (doctor, flashinfer_package):
        monkeypatch.setattr(module, "version", version)
    found = "flashinfer-python" in packages
    monkeypatch.setattr(flashinfer_package, "find_spec", lambda name: found or None)
    monkeypatch.setattr(doctor, "_gpu", lambda: "H100")
    monkeypatch.setattr("shutil.which", lambda name: nvcc if name == "nvcc" else None)
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    (line,) = [line for line in told.splitlines() if line.startswith("attention")]
    assert row in line
    assert hint in told
    assert ("Without it" in told) == bool(hint)
    assert main(["doctor", "--kernels", "torch"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"^attention +torch \(--kernels torch\)", told, re.MULTILINE)
    assert "Without it" not in told


@pytest.mark.parametrize("compiler", [None, "/bin/c++"])
def test_the_doctor_misses_kernels_that_were_not_built(capsys, monkeypatch, compiler):
    best = load_best()
    if best is None:
        pytest.skip("there are no native kernels here")
    assert main(["doctor"]) == 0
    assert "are missing" not in capsys.readouterr().out
    monkeypatch.setattr("runtime.execution.native.library.load", lambda isa: None)
    monkeypatch.setattr("shutil.which", lambda name: compiler)
    assert main(["doctor"]) == 0
    why = "but /bin/c++ did not build them" if compiler else "and a C++20 compiler builds them"
    assert f"Kernels for {best.isa} are missing, {why}." in capsys.readouterr().out


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_the_doctor_tells_how_a_file_is_computed(capsys, tmp_path, quantization):
    kinds = {"attn_q": Kind.Q4_0, "token_embd": Kind.F16}
    path = write(tmp_path / "m.gguf", tensors(), kinds)
    assert main(["doctor", "--model", str(path), "--quantization", quantization]) == 0
    told = re.sub(r"\s+", " ", capsys.readouterr().out)
    is_coded = quantization == "auto" and "none: torch computes" not in told
    assert (re.search(rf"weights .*{LAYERS} Q4_0: computed as stored", told) is not None) == is_coded
    assert re.search(r"1 F16.*: unpacked to --dtype", told)
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF")
    assert main(["doctor", "--model", str(path)]) == 1
    told = capsys.readouterr()
    assert "not a readable GGUF file" in told.err
    assert "processor" in told.out


def test_an_option_of_the_engine_is_refused_in_words():
    with pytest.raises(ValueError, match=r"^hold_time: 'soon' does not fit: seconds for which .* 30:600"):
        make_config(hold_time="soon")


def test_the_doctor_tells_that_transformers_code_unpacks_a_file(capsys, tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "granitehybrid")
    values = gguf.quants.quantize(np.ones((2, 32), np.float32), Kind.Q4_0)
    writer.add_tensor("blk.0.ssm_in.weight", values, raw_dtype=Kind.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert main(["doctor", "--model", str(path)]) == 1
    told = capsys.readouterr()
    assert "1 Q4_0: unpacked to --dtype" in re.sub(r"\s+", " ", told.out)
    assert "no metadata field granitehybrid.attention.head_count" in told.err


def test_the_server_process_does_without_torch(server):
    loaded = Path(f"/proc/{server.process.pid}/maps")
    if not loaded.exists():
        pytest.skip("there is no /proc here")
    assert "libtorch" not in loaded.read_text()
    modules = [f"runtime.frontend.{module.name}" for module in pkgutil.iter_modules(runtime.frontend.__path__)]
    code = f"import sys, {', '.join(['server.serve', *modules])}\n"
    code += "sys.exit(not {'torch', 'transformers'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_connections_do_not_wait_for_acknowledgements():
    """asyncio turns Nagle's algorithm off only where a socket names TCP as its protocol."""
    with _bind(Config(server=ServerConfig(port=0))) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_the_page_of_options_is_up_to_date(monkeypatch):
    """`make docs` writes it."""
    monkeypatch.delenv("RAMET_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    page = Path(__file__).parents[2] / "server/OPTIONS.md"
    assert page.read_text(encoding="utf-8") == options_page() + "\n"


def test_the_tables_have_every_option_with_its_default(capsys):
    assert main(["options"]) == 0
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines() if row.startswith("| `--")]
    options = {name: field for s in Config.model_fields.values() for name, field in s.annotation.model_fields.items()}
    assert [row[0] for row in rows] == [f"| `--{name.replace('_', '-')}`" for name in options]
    defaults = {row[0].strip("| `-").replace("-", "_"): row[1].strip("`") for row in rows}
    assert defaults["page_size"] == str(CacheConfig().page_size)
    named = ("prefix_cache", "eviction_policy", "pin_budget", "kv_events")
    assert [defaults[name] for name in named] == ["on", "foresight", "0.5", ""]
    assert all(row[2].startswith(field.description) for row, field in zip(rows, options.values(), strict=True))
    texts = {row[0].strip("| `-"): row[2] for row in rows}
    assert texts["eviction-policy"].endswith(f" ({', '.join(POLICIES)}) |")
    assert texts["page-size"] == f"{options['page_size'].description} |"


def test_a_benchmark_without_its_packages_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(
        "server.cli.find_spec", lambda name: None if name == "aiohttp" else importlib.util.find_spec(name)
    )
    with pytest.raises(SystemExit) as end:
        main(["bench", "serve"])
    assert end.value.code == 1
    assert capsys.readouterr().err == "ramet: benchmarks need aiohttp: `make extra-bench`, or `pip install aiohttp`\n"
