"""The one typed configuration tree; `ramet serve --help` and the README are made from it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from radix import PolicyName
from runtime.logs import LogFormat

SchedulePolicy = Literal["balanced", "fcfs", "priority", "lpm", "dfs"]

DEFAULT_MODEL = "smollm2-135m-instruct"


def default_cache_dir() -> Path:
    """`$RAMET_CACHE`, else `$XDG_CACHE_HOME/ramet`, else `~/.cache/ramet`."""
    if own := os.environ.get("RAMET_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ramet"


class Section(BaseModel):
    """A group of options."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class ModelConfig(Section):
    """What is served."""

    model: str = Field(
        DEFAULT_MODEL,
        description="a Hugging Face directory, a GGUF file, a hub name (org/name), or the default model's or an "
        "adapter's short name",
    )
    served_model_name: str | None = Field(None, description="the name clients use; default: derived from --model")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="weights and KV; auto: bfloat16, but float32 where a CPU has neither it nor our kernels"
    )
    quantization: Literal["none", "int8"] = Field(
        "none", description="int8: weights and what meets them in 8 bits, for the CPU's kernels with AVX-512 VNNI"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    random_weights: bool = Field(
        False, description="for measurements: weights at random, of which the model's directory needs none"
    )
    tensor_parallel: int = Field(
        1, ge=1, description="processes, each with a GPU of its own if there are any, that share the model's layers out"
    )
    context_length: int | None = Field(None, ge=1, description="longest prompt plus output; default: the model's own")
    cache_dir: Path = Field(default_factory=default_cache_dir, description="where converted models are kept")
    chat_template: Path | None = Field(None, description="a Jinja file that replaces the model's chat template")
    attention_backend: Literal["auto", "cpu", "flashinfer"] = Field(
        "auto", description="cpu is the torch reference and runs on any device; flashinfer needs CUDA"
    )
    native_kernels: bool = Field(True, description="on a CPU with AVX2 or AVX-512, compute in C++; false: in torch")


class CacheConfig(Section):
    """The KV pool and the prefix cache that lives in it."""

    prefix_cache: bool = Field(True, description="reuse the KV of earlier requests' prefixes")
    eviction_policy: PolicyName = Field("lru", description="which unreferenced pages go first when room is needed")
    tenant_quota: int | None = Field(
        None, ge=1, description="pages that a tenant may keep cached, unless its key says another number"
    )
    kv_events: str | None = Field(
        None, description="publish what the cache holds on this ZeroMQ endpoint, e.g. tcp://127.0.0.1:5557"
    )
    kv_events_replay: str | None = Field(None, description="endpoint at which missed events can be asked for")
    kv_events_tokens: bool = Field(True, description="events carry token ids; without, only block hashes")
    pin_budget: float = Field(0.5, ge=0, le=1, description="share of the pool that pins may hold together")
    page_size: int = Field(16, ge=1, le=1024, description="tokens in a page of the pool")
    pool_tokens: int | None = Field(None, ge=1, description="size of the pool in tokens; overrides --pool-memory")
    pool_memory: float = Field(1.0, gt=0, description="size of the pool in GiB (CPU)")
    memory_fraction: float = Field(0.85, gt=0, lt=1, description="share of the GPU for weights and pool (CUDA)")
    kv_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="auto: as --dtype; fp8: e4m3 without scales, half the memory (on a CPU computed by torch)",
    )


class SchedulerConfig(Section):
    """Who takes part in a step."""

    step_tokens: int | None = Field(
        None, ge=1, description="token rows in one step, decode rows first; default: 256 on a CPU, 2048 on a GPU"
    )
    chunk_tokens: int | None = Field(
        None, ge=1, description="most rows that one prompt may take of a step; default: all"
    )
    schedule_policy: SchedulePolicy = Field(
        "balanced", description="who is admitted next; lpm: longest match first, dfs: in the order of the tree"
    )
    overtake_share: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="policy balanced: share of the work that goes by longest match, not by arrival",
    )
    max_running: int = Field(64, ge=1, description="requests that decode together")
    max_waiting: int = Field(4096, ge=1, description="requests that may wait; more are refused with 503")
    max_waiting_tokens: int = Field(
        1 << 22, ge=1, description="prompt tokens that may wait together; more are refused with 503"
    )
    key_requests: int | None = Field(
        None,
        ge=1,
        description="requests that one API key may have open; more are refused with 429; default: half",
    )
    key_tokens: int | None = Field(
        None, ge=1, description="prompt tokens of one API key that may wait; more are refused with 429; default: half"
    )
    max_prompt_tokens: int | None = Field(None, ge=1, description="longest prompt; default: what the context holds")
    max_output_tokens: int | None = Field(None, ge=1, description="longest output; default: what the context holds")
    max_timeout: float | None = Field(
        None, gt=0, description="seconds that a request may take, and the most that its timeout_s may say"
    )

    @property
    def max_open(self) -> int:
        """Requests that may run or wait."""
        return self.max_running + self.max_waiting


class DiffusionConfig(Section):
    """Diffusion models."""

    bicache: bool = Field(True, description="reuse shared prefixes in shallow layers, unless a request says otherwise")
    depth_table: Path | None = Field(
        None, description="in how many layers, by ratio; default: the model's own or published one, else 1"
    )
    partial_matches: bool = Field(
        False, description="reuse the beginning of longer encoded prefixes, as deep as the table was measured for that"
    )
    refresh_interval: int | None = Field(
        None,
        ge=1,
        description="steps between refreshes of the other layers; default: the table's, else 16, without a table 1",
    )
    boundary_memory: float = Field(
        0.25, ge=0, description="GiB for states with which cached prefixes enter a refresh; 0: computed anew each time"
    )


class EngineConfig(Section):
    """The engine process."""

    threads: int | None = Field(None, ge=1, description="CPU threads of the engine; default: all cores")
    cuda_graph_batches: str = Field(
        "1,2,4,8,16,32,64,128",
        pattern=r"^(\d+(,\d+)*)?$",
        description="decode steps of so many requests, filled up to the next number, are CUDA graphs; 0: none",
    )
    overlap: Literal["auto", "on", "off"] = Field(
        "auto", description="launch a decode step before the one ahead of it is read, if a causal model; auto: on a GPU"
    )
    debug_invariants: bool = Field(False, description="check page conservation after every step (slow)")
    grammar_timeout: float = Field(
        5.0, gt=0, description="seconds that a JSON schema or a regular expression may take to compile"
    )
    on_engine_death: Literal["exit", "restart"] = Field(
        "exit", description="if the engine dies: the server exits with code 70, or starts a new engine"
    )


class ServerConfig(Section):
    """The HTTP server."""

    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(30000, ge=0, le=65535, description="port to bind; 0 takes a free one")
    api_keys: Path | None = Field(
        None,
        description="file of API keys, a line each: NAME KEY and what the key may do; also $RAMET_API_KEYS",
    )
    max_body_bytes: int = Field(8 << 20, ge=1024, description="larger request bodies are refused with 413")
    client_timeout: float = Field(
        30.0, gt=0, description="seconds that a client may take to send a head or a body, or to read what it is sent"
    )
    idle_timeout: int = Field(75, ge=1, description="seconds for which an idle connection is kept")
    drain_time: float = Field(
        30.0, ge=0, description="seconds for which running requests may go on after SIGTERM; a second one ends at once"
    )
    cors_origins: str | None = Field(
        None, description="origins of web pages that may use the server, separated by commas; * allows all"
    )
    ssl_certfile: Path | None = Field(None, description="serve HTTPS with this certificate (PEM)")
    ssl_keyfile: Path | None = Field(None, description="the certificate's private key (PEM)")
    trusted_proxies: str | None = Field(
        None, description="addresses of proxies whose X-Forwarded-For and -Proto are believed, separated by commas"
    )
    incremental_output: bool = Field(
        False, description="/generate streams only the new text in `text` and `output_ids` (SGLang: --stream-output)"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="how much is logged")
    otlp_endpoint: str | None = Field(
        None, description="send OpenTelemetry traces there, e.g. http://127.0.0.1:4318/v1/traces; needs ramet[otel]"
    )
    log_format: LogFormat = Field("text", description="text, or one JSON object a line; prompts are never logged")


class Config(Section):
    """Everything that can be set."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    cache: CacheConfig = Field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    diffusion: DiffusionConfig = Field(default_factory=DiffusionConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)


def make_config(**options: object) -> Config:
    """A `Config` from flat option names (they are unique over the sections).

    Raises:
        ValueError: for a name that no section has, or a value out of range.
    """
    sections: dict[str, dict[str, object]] = {}
    for name, value in options.items():
        section = next((s for s, f in Config.model_fields.items() if name in f.annotation.model_fields), None)  # type: ignore[union-attr]
        if section is None:
            raise ValueError(f"no such option: {name}")
        sections.setdefault(section, {})[name] = value
    return Config.model_validate(sections)
