"""The dashboard's queries, and the answers of a Prometheus to them: `python -m tests.docker.dashboard URL`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx

DASHBOARD = Path(__file__).parents[2] / "docker/grafana/dashboards/ramet.json"

# Values for Grafana's variables: all models and replicas at a scrape interval of ten seconds.
_VARIABLES = {"$__rate_interval": "40s", "$model": ".*", "$instance": ".*"}


def queries() -> Iterator[tuple[str, str]]:
    """Every query with its panel's title, ready for Prometheus."""
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"]
            for name, value in _VARIABLES.items():
                query = query.replace(name, value)
            yield panel["title"], query


def main() -> int:
    """Run all queries on a Prometheus; 1 if one is refused or finds nothing."""
    bad = 0
    for title, query in queries():
        answer = httpx.get(f"{sys.argv[1]}/api/v1/query", params={"query": query}).json()
        samples = answer.get("data", {}).get("result", [])
        values = ", ".join(sample["value"][1] for sample in samples) or answer.get("error", "no sample")
        print(f"{'ok ' if samples else 'BAD'} {title}: {query} -> {values}")
        bad += not samples
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
