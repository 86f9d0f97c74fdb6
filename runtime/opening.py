"""Makes an engine from a configuration: the executor, the model's strategies and decoding, and the parts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from runtime.config import Config, refuse_approximations
from runtime.engine.core import EngineCore
from runtime.engine.operators import Operators
from runtime.engine.part import Part
from runtime.engine.pins import Pins
from runtime.engine.strategies import Strategies
from runtime.errors import ModelError
from runtime.execution.building import build_executor
from runtime.execution.device import most_running
from runtime.execution.executor import Executor
from runtime.features.feature import Feature, Opening
from runtime.features.registry import FEATURES
from runtime.kv.cache import PagedCache
from runtime.models.resolve import model_name
from runtime.models.tokenizer import ends_of_turns
from runtime.protocol import ModelInfo
from runtime.request import AnyStrategy, Decoding
from runtime.reuse.prefix import PrefixStrategy
from runtime.sampling.batched import FlashInferChoosing
from runtime.sampling.decoding import NextToken
from runtime.sampling.sampler import Sampler

T = TypeVar("T")


def open_engine(config: Config, path: Path, quotas: Mapping[str, int] | None = None) -> EngineCore:
    """The engine of the model directory `path`; `quotas`: most cached pages by tenant. Raises ModelError."""
    # Options are checked before the weights are read, so that a bad option fails at once.
    features = [feature(config, path) for feature in FEATURES]
    if config.engine.threads is not None:
        torch.set_num_threads(config.engine.threads)
    executor = _open_executor(config, path)
    cache = PagedCache(executor.pool, config.cache, quotas)
    info = _describe_model(config, executor, path)
    strategies, decoding = _open_model(Opening(config, path, executor, cache, info), features)
    core = EngineCore(config, executor, cache, info, strategies, decoding)
    parts: list[Part] = [Operators(core), Pins(core)]
    parts += [part for feature in features for part in feature.parts(core)]
    for part in parts:
        core.add_part(part)
    for part in parts:
        part.resume()
    return core


def _open_executor(config: Config, path: Path) -> Executor:
    if config.model.tensor_parallel == 1:
        return build_executor(config, path)
    from runtime.execution.parallel.driver import open_ranks

    return open_ranks(config, path)


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
        attention_backend=executor.decoder.attention,
        page_size=page_size,
        pool_tokens=executor.pool.num_pages * page_size,
        model_impl=executor.decoder.code,
        max_running=config.scheduler.max_running or most_running(executor.device),
        attention_note=executor.decoder.note,
        quantization=executor.decoder.quantization,
    )


def _ends_of_turns(path: Path, vocab_size: int) -> list[int]:
    """The tokens by which the tokenizer ends turns; fine-tunes often keep the base model's in the configuration."""
    with suppress(ModelError):  # no tokenizer: prompts are tokens
        return [token for token in ends_of_turns(path) if token < vocab_size]
    return []


def _open_model(opening: Opening, features: Sequence[Feature]) -> tuple[Strategies, Decoding]:
    """The strategies and the decoding for a kind of model. A feature may set `opening.info.decoding`."""
    executor, cache, spec = opening.executor, opening.cache, opening.executor.spec
    default = _first(feature.default(opening) for feature in features) or PrefixStrategy(cache, spec.num_layers)
    openers: dict[str, Callable[[], AnyStrategy]] = {
        feature.method: partial(feature.strategy, opening)
        for feature in features
        if feature.method is not None and feature.serves(opening)
    }
    if spec.causal and not (opening.reads_anywhere and executor.decoder.code == "ramet"):
        refuse_approximations(opening.config.cache)
    decoding = _first(feature.decoding(opening) for feature in features) or _next_token(executor)
    return Strategies(default, openers), decoding


def _next_token(executor: Executor) -> NextToken:
    choosing = FlashInferChoosing() if executor.decoder.attention == "flashinfer" else executor.decoder.choosing
    return NextToken(Sampler(executor.spec.vocab_size, executor.device, choosing))


def _first(found: Iterable[T | None]) -> T | None:
    return next((one for one in found if one is not None), None)
