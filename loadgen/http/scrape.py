"""The server's own metrics, before and after a run."""

from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

# Metrics of cached and of looked-up prompt tokens, by server.
_HITS = (
    ("vllm:prefix_cache_hits", "vllm:prefix_cache_queries"),
    ("sglang:cached_tokens", "sglang:prompt_tokens"),
)
_MOST_BYTES = 8 << 20


class Scrape:
    """Counters, and sums and counts of histograms, from one scrape; summed over labels."""

    def __init__(self, text: str):
        self.counters: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name
                if family.type == "counter" and not name.endswith("_created"):
                    _add(self.counters, name.removesuffix("_total"), sample.value)
                elif family.type in ("histogram", "summary") and name.endswith(("_sum", "_count")):
                    _add(self.counters, name, sample.value)


def _add(samples: dict[str, float], name: str, value: float) -> None:
    samples[name] = samples.get(name, 0.0) + value


async def scrape(url: str, key: str | None, seconds: float) -> Scrape | None:
    """The server's `/metrics`; None where they cannot be read within `seconds`."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds), headers=headers) as session,
            session.get(url.rstrip("/") + "/metrics") as response,
        ):
            if response.status != 200:
                return None
            return Scrape((await _read(response.content)).decode())
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError):
        return None


async def _read(content: aiohttp.StreamReader) -> bytes:
    text = b""
    async for chunk in content.iter_any():
        text += chunk
        if len(text) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes of metrics")
    return text


def difference(before: Scrape | None, after: Scrape | None) -> dict[str, Any] | None:
    """Changes of the counters, and the run's hit ratio in tokens; None without both scrapes."""
    if before is None or after is None:
        return None
    gained = {name: value - before.counters.get(name, 0.0) for name, value in after.counters.items()}
    ratio = next((gained[hit] / gained[asked] for hit, asked in _HITS if gained.get(asked) and hit in gained), None)
    changed = {name: value for name, value in gained.items() if value}
    return {"hit_ratio": ratio, "counters": changed}
