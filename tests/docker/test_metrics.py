"""Dashboard and alerts ask for metrics that a server really exposes, by labels that these have."""

import hashlib
import re
import shutil
import subprocess

import httpx
import pytest
import yaml

from server.auth.keys import read_keys
from tests.docker.compose import DOCKER
from tests.docker.dashboard import queries
from tests.server.conftest import guarded  # noqa: F401

PROMETHEUS = DOCKER / "prometheus"
# Prometheus' own, and the labels that it adds.
BUILT_IN = {"up"}
ADDED = {"job", "instance", "le"}
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{([^}]*)\})?")
_WORDS = {"sum", "max", "by", "rate", "increase", "histogram_quantile", "and", "le", "instance", "cause"}


def alerts() -> list[dict]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def asked(query: str) -> list[tuple[str, set[str]]]:
    """Metrics of a query with the labels that are matched or kept."""
    plain = re.sub(r"\[[^\]]*\]", "", query)
    kept = {label.strip() for found in re.findall(r"\bby \(([^)]*)\)", plain) for label in found.split(",")}
    plain = re.sub(r"\bby \([^)]*\)", "", plain)
    found = [(name, labels) for name, labels in _SELECTOR.findall(plain) if name not in _WORDS]
    return [(name, kept | set(re.findall(r"(\w+)\s*=~?", labels))) for name, labels in found]


@pytest.fixture(scope="module")
def exposed(guarded) -> dict[str, set[str]]:  # noqa: F811
    """The labels of every series, by its name, after a request; scraped with an admin's key, as Prometheus does it."""
    key = {"authorization": "Bearer boss-secret-key"}
    body = {"text": "x", "sampling_params": {"max_new_tokens": 2}}
    assert httpx.post(f"{guarded.url}/generate", json=body, headers=key, timeout=60).status_code == 200
    assert httpx.get(f"{guarded.url}/metrics").status_code == 401
    text = httpx.get(f"{guarded.url}/metrics", headers=key).text
    labels: dict[str, set[str]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, pairs = re.match(r"([\w:]+)(\{.*\})?", line).groups()
            labels.setdefault(name, set()).update(re.findall(r'(\w+)="', pairs or ""))
    return labels


def test_queries_are_read():
    assert asked('sum by (le, a) (rate(x:y_total{b=~"c", d="e"}[5m])) / up') == [
        ("x:y_total", {"le", "a", "b", "d"}),
        ("up", {"le", "a"}),
    ]


def test_every_panel_asks_for_what_is_exposed(exposed):
    everything = list(queries())
    assert len(everything) > 40
    for title, query in everything:
        assert "$" not in query, title
        for name, labels in asked(query):
            assert name in exposed.keys() | BUILT_IN, (title, name)
            assert name in BUILT_IN or labels <= exposed[name] | ADDED, (title, name, labels)


def test_every_alert_asks_for_what_is_exposed(exposed):
    assert len(alerts()) >= 10
    for rule in alerts():
        names = [name for name, _ in asked(rule["expr"]) if not re.fullmatch(r"[\d.]+", name)]
        assert names
        assert set(names) <= exposed.keys() | BUILT_IN, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


def test_prometheus_takes_the_rules_and_they_fire_when_they_should():
    if not shutil.which("promtool"):
        pytest.skip("needs promtool")
    subprocess.run(["promtool", "test", "rules", "alerts_test.yml"], cwd=PROMETHEUS, check=True)


def test_scraping_needs_the_key_that_the_stack_hands_over():
    jobs = {
        job["job_name"]: job for job in yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    }
    composed = yaml.safe_load((DOCKER / "docker-compose.yml").read_text())
    assert jobs["ramet"]["authorization"]["credentials_file"] == "/run/secrets/metrics_key"
    assert composed["services"]["prometheus"]["secrets"] == ["metrics_key"]
    assert composed["secrets"]["metrics_key"] == {"file": "./secrets/metrics_key"}


@pytest.mark.parametrize("older", [None, "boss boss-secret-key admin", "boss boss-secret-key admin\n"])
def test_the_keys_that_are_made_are_what_the_server_takes(tmp_path, monkeypatch, older):
    """Also where an earlier version has made keys, before Prometheus had one."""
    monkeypatch.delenv("RAMET_API_KEYS", raising=False)
    for name in ("make-secrets.sh", ".env.example"):
        shutil.copy(DOCKER / name, tmp_path)
    if older is not None:
        (tmp_path / "secrets").mkdir()
        (tmp_path / "secrets" / "api_keys").write_text(older)
        (tmp_path / "secrets" / "api_keys").chmod(0o444)
    for _ in range(2):
        subprocess.run([tmp_path / "make-secrets.sh"], check=True, capture_output=True)
    tenants = {tenant.name: tenant for tenant in read_keys(tmp_path / "secrets" / "api_keys")}
    assert tenants.keys() == ({"boss"} if older else {"admin", "user"}) | {"prometheus", "loadgen"}
    scraper = (tmp_path / "secrets" / "metrics_key").read_bytes()
    assert tenants["prometheus"].digest == hashlib.sha256(scraper).digest()
    loader = (tmp_path / "secrets" / "loadgen_key").read_bytes()
    assert tenants["loadgen"].digest == hashlib.sha256(loader).digest()
    assert [name for name, tenant in tenants.items() if tenant.metrics] == ["prometheus"]
    assert [name for name, tenant in tenants.items() if tenant.admin] == ["boss" if older else "admin"]
