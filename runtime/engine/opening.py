"""Makes an engine from a configuration: the executor, the model's strategies and decoding, and the parts."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from runtime.config import Config, refuse_approximations
from runtime.diffusion.decoding import CanvasDecoding
from runtime.engine.adapters import EngineAdapters
from runtime.engine.core import EngineCore
from runtime.engine.next_turns import NextTurns
from runtime.engine.operators import Operators
from runtime.engine.part import Part
from runtime.engine.parts import Drafts, Grammars, KVEvents
from runtime.engine.pins import Pins
from runtime.engine.strategies import Strategies
from runtime.engine.tiering import Tiering, open_tiers
from runtime.errors import ModelError
from runtime.execution.executor import Executor
from runtime.execution.parallel.driver import open_executor
from runtime.features.feature import Opening
from runtime.features.registry import FEATURES
from runtime.kv.cache import PagedCache
from runtime.models.adapters.lora import read_lora
from runtime.models.implementation import own_spec
from runtime.models.resolve import model_name
from runtime.models.spec import LlamaSpec
from runtime.models.tokenizer import ends_of_turns
from runtime.protocol import ModelInfo
from runtime.request import Decoding, Strategy
from runtime.reuse.bicache.depth_table import read_table
from runtime.reuse.bicache.strategy import BiCache
from runtime.reuse.blocks import BlockPrefix, CanvasPrefix
from runtime.reuse.fusion.strategy import Fusion
from runtime.reuse.hybrid.strategy import HybridPrefix
from runtime.reuse.modules.strategy import Modules
from runtime.reuse.prefix import PrefixStrategy
from runtime.reuse.windowed import WindowedPrefix
from runtime.sampling.batched import FlashInferChoosing
from runtime.sampling.decoding import NextToken
from runtime.sampling.sampler import Sampler


def open_engine(config: Config, path: Path, quotas: Mapping[str, int] | None = None) -> EngineCore:
    """The engine of the model directory `path`; `quotas`: most cached pages by tenant. Raises ModelError."""
    # Options are checked before the weights are read, so that a bad option fails at once.
    _check(config, path)
    if config.engine.threads is not None:
        torch.set_num_threads(config.engine.threads)
    cipher, stores = open_tiers(config.tiers)
    executor = open_executor(config, path)
    cache = PagedCache(executor.pool, config.cache, quotas)
    info = _describe_model(config, executor, path)
    strategies, decoding = _open_model(Opening(config, path, executor, cache, info))
    core = EngineCore(config, executor, cache, info, strategies, decoding)
    tiering = Tiering(core, path, cipher, stores) if stores else None
    parts: list[Part | None] = [
        Operators(core, tiering),
        EngineAdapters(executor, core.requests),
        Grammars(core, path),
        tiering,
        Pins(core),
        NextTurns.open(core),
        Drafts.open(core),
        KVEvents.open(core, tiering),
        *(part for feature in FEATURES for part in feature.parts(core)),
    ]
    core.install([part for part in parts if part is not None])
    if tiering is not None:
        tiering.recall()
    return core


def _check(config: Config, path: Path) -> None:
    """Raise ModelError for options that exclude each other, and for unusable files of `--lora` and `--depth-table`."""
    for feature in FEATURES:
        feature.check(config)
    if config.tiers.any and not config.cache.prefix_cache:
        raise ModelError("--no-prefix-cache leaves nothing for --host-memory, --disk-cache and --kv-store")
    for name, directory in config.model.adapters:
        try:
            read_lora(Path(directory))
        except ModelError as error:
            raise ModelError(f"--lora {name}={directory}: {error.message}") from None
    if config.diffusion.depth_table is not None:
        spec = own_spec(config.model, path)
        if spec is not None and spec.diffusion is not None:
            read_table(config.diffusion.depth_table, spec)


def _describe_model(config: Config, executor: Executor, path: Path) -> ModelInfo:
    spec, page_size = executor.spec, config.cache.page_size
    return ModelInfo(
        name=model_name(config.model, path),
        path=str(path),
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        context_length=executor.context_length,
        eos_token_ids=list(dict.fromkeys((*spec.eos_token_ids, *_ends_of_turns(path, spec.vocab_size)))),
        dtype=str(executor.dtype).removeprefix("torch."),
        device=str(executor.device),
        attention_backend=executor.backend_name,
        page_size=page_size,
        pool_tokens=executor.pool.num_pages * page_size,
        model_impl=executor.implementation,
        max_running=config.scheduler.max_running or executor.max_running,
        attention_note=executor.backend_note,
        quantization=executor.quantization,
    )


def _ends_of_turns(path: Path, vocab_size: int) -> list[int]:
    """The tokens by which the tokenizer ends turns; fine-tunes often keep the base model's in the configuration."""
    with suppress(ModelError):  # no tokenizer: prompts are tokens
        return [token for token in ends_of_turns(path) if token < vocab_size]
    return []


def _open_model(opening: Opening) -> tuple[Strategies, Decoding]:
    """The strategies and the decoding for a kind of model. Sets `opening.info.diffusion`."""
    config, executor, cache, info = opening.config, opening.executor, opening.cache, opening.info
    spec = executor.spec
    if spec.diffusion is None:
        openers: dict[str, Callable[[], Strategy]] = {
            feature.method: partial(feature.strategy, opening)
            for feature in FEATURES
            if feature.method is not None and feature.serves(opening)
        }
        # Other strategies read spans whose positions are not consecutive. Windows and states require this.
        is_consecutive = executor.has_windows or executor.states is not None
        if not is_consecutive:
            openers[Modules.name] = partial(Modules, cache, spec.num_layers, info)
        if not is_consecutive and executor.implementation == "ramet":
            openers[Fusion.name] = partial(Fusion, cache, executor, info)
        else:
            refuse_approximations(config.cache)
        choosing = FlashInferChoosing() if executor.backend_name == "flashinfer" else executor.choosing
        default = _prefix_strategy(executor, cache, info.eos_token_ids)
        return Strategies(default, openers), NextToken(Sampler(spec.vocab_size, executor.device, choosing))
    strategy: BlockPrefix | BiCache
    if spec.diffusion.attended is not None:
        strategy = (CanvasPrefix if executor.soften else BlockPrefix)(cache, spec.num_layers, spec.diffusion)
    else:
        strategy = BiCache.load(config, opening.path, spec, cache)
    info.diffusion = strategy.info
    return Strategies(strategy), CanvasDecoding(spec.diffusion, executor.device, spec.vocab_size, executor.soften)


def _prefix_strategy(executor: Executor, cache: PagedCache, eos: Sequence[int]) -> PrefixStrategy:
    spec = executor.spec
    if executor.states is not None:
        return HybridPrefix(cache, spec.num_layers, executor.states, eos)
    if executor.near is None:
        return PrefixStrategy(cache, spec.num_layers)
    assert isinstance(spec, LlamaSpec)
    return WindowedPrefix(cache, spec.num_layers, executor.near, spec.largest_window)
