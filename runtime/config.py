"""The typed configuration tree, the source of `ramet serve --help` and the tables of options."""

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from radix import PolicyName
from runtime.asks import ReuseMethod
from runtime.errors import ModelError
from runtime.logs import LogFormat

SchedulePolicy = Literal["balanced", "fcfs", "priority", "lpm"]

_ENDPOINT = r"(tcp|ipc|inproc)://[^,]+"
_SECONDS = r"\d{1,9}(\.\d{1,3})?"
# The origin of a web page. A path or a slash after the host is refused, because no origin would match it.
_ORIGIN = r"(\*|null|[^\s,/]+://[^\s,/]+)"
_NAMES = r"^[^\s,]+(\s*,\s*[^\s,]+)*$"
# Host names. A scheme or a port is refused, because no host would match it.
_HOST = r"(\[[0-9A-Fa-f:.]+\]|[^\s,/:\[\]]+)"
_HOSTS = rf"^{_HOST}(\s*,\s*{_HOST})*$"
# Hosts with or without a port, addresses, and networks.
_IMAGE_HOST = r"([0-9A-Fa-f:.]+(/\d{1,3})?|[^\s,/:\[\]]+(:\d{1,5})?)"

ModelCode = Literal["ramet", "transformers"]

DEFAULT_MODEL = "smollm2-135m-instruct"


def default_cache_dir() -> Path:
    """`$RAMET_CACHE`, else `$XDG_CACHE_HOME/ramet`, else `~/.cache/ramet`."""
    if own := os.environ.get("RAMET_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ramet"


class Section(BaseModel):
    """A group of options."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The model."""

    model: str = Field(
        DEFAULT_MODEL,
        description="a Hugging Face directory, a GGUF file, a hub name (org/name), or the short name of a model that "
        "Ramet knows",
    )
    served_model_name: str | None = Field(
        None,
        pattern=r"[^\s,]",
        description="the model's names for clients, separated by commas; * allows any; default: derived from --model",
    )
    lora: str | None = Field(
        None,
        pattern=r"^[^=,]+=[^,]+(,[^=,]+=[^,]+)*$",
        description="low-rank adapters (PEFT) to load at the start: NAME=DIRECTORY, separated by commas",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="type of weights and KV; auto: bfloat16, or float32 on a CPU without bfloat16 and native kernels",
    )
    quantization: Literal["auto", "none", "int4", "int8"] = Field(
        "auto",
        description="weights; int4, int8: rounded to 4 or 8 bits, for the native CPU kernels; none: unpacked; auto: "
        "as the checkpoint stores them (GGUF, MXFP4, AWQ, GPTQ, compressed-tensors; on a GPU also FP8) if --dtype is "
        "auto, otherwise none; quantised weights round activations to 8 bits",
    )
    model_impl: Literal["auto", ModelCode] = Field(
        "auto",
        description="code that computes the model; ramet: Ramet's own, for the Llama family; transformers: the "
        "library's, for any decoder, slower; auto: ramet if it supports the model",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    random_weights: bool = Field(False, description="use random weights, to measure a model directory that has none")
    tensor_parallel: int = Field(
        1, ge=1, description="number of processes that split each layer, each on its own GPU if there are GPUs"
    )
    context_length: int | None = Field(None, ge=1, description="longest prompt plus output; default: the model's own")
    chat_template: Path | None = Field(None, description="a Jinja file that replaces the model's chat template")
    kernels: Literal["auto", "native", "torch", "flashinfer"] = Field(
        "auto",
        description="native: C++, for CPUs with AVX2, AVX-512 or ARM's dot products; flashinfer: for CUDA; torch: the "
        "reference, on any device; auto: the fastest that supports the model",
    )

    @property
    def adapters(self) -> list[tuple[str, str]]:
        """Names and directories of `lora`."""
        pairs = (given.partition("=") for given in (self.lora or "").split(",") if given)
        return [(name.strip(), path.strip()) for name, _, path in pairs]


class CacheConfig(Section):
    """The KV pool and its prefix cache."""

    prefix_cache: bool = Field(True, description="reuse the KV of earlier requests' prefixes")
    reuse: Literal["auto", ReuseMethod] = Field(
        "auto",
        description="default of requests' `reuse`; all methods but none are approximate; auto: BiCache for diffusion "
        "models, none for others",
    )
    eviction_policy: PolicyName = Field("foresight", description="which unused pages are evicted first")
    hold_time: str = Field(
        "0",
        pattern=rf"^{_SECONDS}(:{_SECONDS})?$",
        coerce_numbers_to_str=True,
        description="seconds for which used prefixes are evicted last, within --pin-budget: DEFAULT, or DEFAULT:MOST, "
        "where requests may ask for up to MOST by `hold_s`; such as 30 or 30:600",
    )
    tenant_quota: int | None = Field(
        None,
        ge=1,
        description="most cached pages of a tenant, public pages included; an API key may set another number",
    )
    kv_events: str | None = Field(
        None,
        pattern=rf"^{_ENDPOINT}(,{_ENDPOINT})?$",
        description="publish KV events on a ZeroMQ endpoint, and replay missed ones on another: PUBLISH or "
        "PUBLISH,REPLAY, e.g. tcp://127.0.0.1:5557,tcp://127.0.0.1:5558",
    )
    kv_events_of: Literal["public", "all", "hashes"] = Field(
        "public",
        description="blocks in KV events: public: those without tenant and salt; all: those of all tenants; "
        "hashes: all, without token ids and salts",
    )
    pin_budget: float = Field(
        0.5, ge=0, le=1, description="share of the pool that pins, kept prefixes and holds may have together"
    )
    page_size: int = Field(16, ge=1, le=1024, description="tokens in a page of the pool")
    pool_tokens: int | None = Field(None, ge=1, description="size of the pool in tokens; overrides --pool-memory")
    pool_memory: float | None = Field(
        None,
        gt=0,
        description="size of the pool in GiB; default: 1, and on a GPU what weights leave of 85 % of its memory",
    )
    kv_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="type of KV; auto: as --dtype; fp8: e4m3 without scales, half the memory, slow on CPUs"
    )

    @field_validator("hold_time")
    @classmethod
    def _is_bounded(cls, given: str) -> str:
        default, _, most = given.partition(":")
        if most and float(most) < float(default):
            raise ValueError("DEFAULT is longer than MOST")
        return given

    @property
    def hold_s(self) -> float:
        """Seconds for which the prefixes of requests without `hold_s` are held."""
        return float(self.hold_time.partition(":")[0])

    @property
    def most_hold_s(self) -> float:
        """The largest `hold_s` of a request."""
        return float(self.hold_time.rpartition(":")[2])

    @property
    def events_endpoint(self) -> str:
        """Where KV events are published; empty: nowhere."""
        return (self.kv_events or "").partition(",")[0]

    @property
    def replay_endpoint(self) -> str:
        """Where KV events are replayed; empty: nowhere."""
        return (self.kv_events or "").partition(",")[2]


class TierConfig(Section):
    """Tiers: KV that outlives the pool."""

    host_memory: float | None = Field(None, gt=0, description="GiB of memory for KV that the pool has no room for")
    disk_cache: Path | None = Field(None, description="directory for KV that outlives the server")
    disk_space: float = Field(10.0, gt=0, description="GiB that --disk-cache may take")
    kv_store: str | None = Field(
        None,
        pattern=r"^(rediss?://|dir:).",
        description="store of KV that replicas share: redis://HOST:PORT, rediss://... or dir:PATH",
    )
    admin_root: Path | None = Field(
        None, description="directory below which admins may name adapters over HTTP; default: nowhere"
    )
    kv_encryption_key_file: Path | None = Field(
        None, description="file with a secret; KV on disks and in stores is encrypted with a key for each tenant"
    )

    @property
    def any(self) -> bool:
        """Whether there is a tier."""
        return self.host_memory is not None or self.disk_cache is not None or self.kv_store is not None


# The default of `max_running` on a GPU, where a step of many rows takes hardly longer.
MOST_RUNNING = 256


class SchedulerConfig(Section):
    """Scheduling and limits."""

    step_tokens: int | None = Field(
        None, ge=1, description="token rows of a step, decode rows first; default: 256 on a CPU, 2048 on a GPU"
    )
    chunk_tokens: int | None = Field(None, ge=1, description="most rows of one prompt in a step; default: no limit")
    schedule_policy: SchedulePolicy = Field(
        "balanced",
        description="order of waiting requests; lpm: longest prefix match first",
    )
    max_running: int | None = Field(None, ge=1, description="most running requests; default: 64 on a CPU, 256 on a GPU")
    max_waiting: int = Field(4096, ge=1, description="most waiting requests; more are refused with 503")
    key_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="largest share of open requests, and of waiting prompt tokens, for one API key; more are refused "
        "with 429",
    )
    max_output_tokens: int | None = Field(None, ge=1, description="most tokens of an output; default: the context")
    next_turn_tokens: int = Field(
        4096, ge=0, description="most tokens to compute, while idle, of a chat's history as its next turn renders it"
    )
    max_timeout: float | None = Field(None, gt=0, description="default and largest timeout_s of a request, in seconds")

    @property
    def max_open(self) -> int:
        """Most open requests; more are refused with 503."""
        return (self.max_running or MOST_RUNNING) + self.max_waiting

    @property
    def max_waiting_tokens(self) -> int:
        """Most waiting prompt tokens; more are refused with 503."""
        return 1024 * max(self.max_waiting, 4096)


class DiffusionConfig(Section):
    """Diffusion models."""

    depth_table: Path | None = Field(
        None,
        description="JSON file of reuse depths by ratio; default: the model's own or published table, else depth 1",
    )
    depth_bound: float | None = Field(
        None,
        ge=0,
        description="measure reuse depths while serving, for outputs that diverge by at most this many nats; 0: exact; "
        "default: the table's depths",
    )


class EngineConfig(Section):
    """The engine process."""

    threads: int | None = Field(None, ge=1, le=4096, description="CPU threads of the engine; default: all cores")
    cuda_graph_batches: str = Field(
        "1,2,4,8,16,32,64,128,256",
        pattern=r"^(\d+(,\d+)*)?$",
        description="comma-separated batch sizes of CUDA graphs for decode steps, padded to the next; 0: none at all",
    )
    overlap: Literal["auto", "on", "off"] = Field(
        "auto", description="schedule the next step during a decode step (causal models); auto: on a GPU"
    )
    drafts: Literal["auto", "off"] = Field("auto", description="speculate from cached text when measured faster")
    debug_invariants: bool = Field(False, description="check page conservation after every step (slow)")
    step_timeout: float = Field(
        120.0,
        ge=0,
        description="longest step in seconds: then /ready answers 503; after five times as long the engine is killed; "
        "0: no limit",
    )


class ServerConfig(Section):
    """The HTTP server."""

    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(30000, ge=0, le=65535, description="port to bind; 0: any free port")
    api_keys: Path | None = Field(
        None, description="file of API keys, a line each: NAME KEY and its permissions; also $RAMET_API_KEYS"
    )
    open_admin: bool = Field(
        False, description="without keys, let clients on other machines use the routes for admins, too"
    )
    allowed_hosts: str | None = Field(
        None,
        pattern=_HOSTS,
        description="host names, without ports, of a server without keys that clients may use, separated by commas; * "
        "allows all; the server's own address, localhost and this machine's name are allowed anyway",
    )
    client_timeout: float = Field(
        30.0, gt=0, description="seconds in which a client must send headers or a body, or read a response"
    )
    drain_time: float = Field(
        30.0,
        ge=0,
        description="seconds for running requests to end after SIGTERM; a second SIGTERM ends the server at once",
    )
    cors_origins: str | None = Field(
        None,
        pattern=rf"^{_ORIGIN}(\s*,\s*{_ORIGIN})*$",
        description="origins of web pages that may use the server: SCHEME://HOST or SCHEME://HOST:PORT, separated by "
        "commas; * allows all",
    )
    image_hosts: str | None = Field(
        None,
        pattern=rf"^{_IMAGE_HOST}(\s*,\s*{_IMAGE_HOST})*$",
        description="hosts from which images are fetched, separated by commas: HOST (ports 80 and 443), HOST:PORT, or "
        "an address, ADDRESS:PORT or a network, which may be private; default: images come with requests alone",
    )
    ssl_certfile: str | None = Field(
        None, description="serve HTTPS with this certificate and its private key (PEM): FILE or CERTIFICATE,KEY"
    )
    trusted_proxies: str | None = Field(
        None,
        pattern=_NAMES,
        description="addresses of proxies whose X-Forwarded-For and -Proto are trusted, separated by commas",
    )
    record_trace: Path | None = Field(
        None, description="append times, lengths, tenants and block hashes of requests to this file; never text"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level that is logged")
    log_format: LogFormat = Field("text", description="text, or one JSON object per line; prompts are never logged")


class Config(Section):
    """The whole configuration."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    cache: CacheConfig = Field(default_factory=CacheConfig)
    tiers: TierConfig = Field(default_factory=TierConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    diffusion: DiffusionConfig = Field(default_factory=DiffusionConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)


def refuse_approximations(cache: CacheConfig) -> None:
    """Raise ModelError if `--reuse` sets a method. For models that support none."""
    if cache.reuse not in ("auto", "none"):
        raise ModelError(
            f"--reuse {cache.reuse} is for models that Ramet's own code computes, without sliding windows or recurrent "
            "layers"
        )


def make_config(**options: object) -> Config:
    """A `Config` from option names without sections; names are unique over all sections.

    Raises:
        ValueError: for an unknown name, or a value out of range. Its text is the option's name and what is wrong.
    """
    sections: dict[str, dict[str, object]] = {}
    for name, value in options.items():
        section = next((s for s, f in Config.model_fields.items() if name in f.annotation.model_fields), None)  # type: ignore[union-attr]
        if section is None:
            raise ValueError(f"no such option: {name}")
        sections.setdefault(section, {})[name] = value
    try:
        return Config.model_validate(sections)
    except ValidationError as error:
        raise ValueError(_in_words(error)) from None


def _in_words(error: ValidationError) -> str:
    problem = error.errors()[0]
    section, name = str(problem["loc"][0]), str(problem["loc"][-1])
    if problem["type"] != "string_pattern_mismatch":
        return f"{name}: {problem['msg'].removeprefix('Value error, ')}, not {problem['input']!r}"
    # The description says more than the pattern.
    described = Config.model_fields[section].annotation.model_fields[name].description  # type: ignore[union-attr]
    return f"{name}: {problem['input']!r} does not fit: {described}"
