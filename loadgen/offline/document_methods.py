"""Document methods with their options, and the rows x layers that each computes by its paper."""

from collections.abc import Sequence
from statistics import fmean
from typing import get_args

from runtime.features.chunks.ask import LEADING, DocumentMethod, ReuseParams
from runtime.features.chunks.documents.prompt import TokenizedPrompt

METHODS = tuple(method for method in get_args(DocumentMethod) if method != "none")
# Methods that compute layer 0 of all rows behind the prefix before they choose.
_DENSE = ("a3", "cacheblend")
_RANKED = (*_DENSE, "prophetkv", "passages")


def ways(methods: Sequence[str], ratios: Sequence[float], granularities: Sequence[str]) -> dict[str, ReuseParams]:
    """By a name for tables, the methods with each of their options.

    LegoLink gets 16 leading rows and no ratio.
    """
    found = {}
    for method in methods:
        for ratio in ratios if method in _RANKED else (None,):
            for granularity in granularities if method in _RANKED else ("page",):
                k = LEADING if method == "legolink" else None
                fields = {"method": method, "ratio": ratio, "granularity": granularity, "k": k}
                asked = ReuseParams.model_validate(fields)
                found[name_of(asked)] = asked
    return found


def name_of(asked: ReuseParams) -> str:
    """For tables: method, ratio, granularity."""
    if asked.method not in _RANKED:
        return f"legolink {asked.k}" if asked.method == "legolink" else asked.method
    return f"{asked.method} {asked.ratio:g}" + (", tokens" if asked.granularity == "token" else "")


def row_layers(asked: ReuseParams | None, prompt: TokenizedPrompt, page_size: int, num_layers: int) -> int:
    """Rows x layers of a prompt by the papers, behind the cached pages before its documents, which are cached, too.

    Dense rows x 1 + (own and chosen rows) x L. The question is new, so that full reuse has to encode it. Documents that
    are longer than a chunk are not foreseen.
    """
    rows = len(prompt.tokens) - prompt.documents[0][0] // page_size * page_size
    if asked is None:
        return rows * num_layers
    candidates = sum(stop - start for start, stop in prompt.documents)
    own = rows - candidates
    if asked.method == "legolink":
        own += sum(min(asked.k or 0, stop - start) for start, stop in prompt.documents if start)
    if asked.method not in _RANKED or not (chosen := int(candidates * (asked.ratio or 0))):
        return own * num_layers
    look = rows if asked.method in _DENSE else own * num_layers
    return look + (own + chosen) * num_layers


def row_share(asked: ReuseParams, prompts: Sequence[TokenizedPrompt], page_size: int, num_layers: int) -> float:
    """Rows x layers of prompts, as a mean share of full prefill's."""
    return fmean(
        row_layers(asked, p, page_size, num_layers) / row_layers(None, p, page_size, num_layers) for p in prompts
    )
