"""The compose files, as a composer without Docker sees them: defaults for all variables, `extends` put in."""

import re
from pathlib import Path
from typing import Any

import yaml

DOCKER = Path(__file__).parents[2] / "docker"
# The files of each stack, as `docker compose -f` takes them.
STACKS = {
    "base": ["docker-compose.yml"],
    "gpu": ["docker-compose.yml", "compose.gpu.yml"],
    "scale": ["docker-compose.yml", "compose.scale.yml"],
    "ray": ["docker-compose.yml", "compose.ray.yml"],
}
_VARIABLE = re.compile(r"\$\{(\w+):?-([^}]*)\}")


def load(name: str) -> dict[str, Any]:
    """One file, with every variable at its default."""
    text = (DOCKER / name).read_text(encoding="utf-8")
    assert "${" not in _VARIABLE.sub("", text), "a variable without a default"
    return yaml.safe_load(_VARIABLE.sub(lambda found: found[2], text))


def stack(name: str) -> dict[str, Any]:
    """The files of a stack laid over each other: maps are merged, lists joined, anything else is replaced."""
    files = [load(file) for file in STACKS[name]]
    for file in files:
        file["services"] = {name: _extended(service) for name, service in file["services"].items()}
    merged: dict[str, Any] = {}
    for file in files:
        merged = _over(merged, file)
    return merged


def _extended(service: dict[str, Any]) -> dict[str, Any]:
    if not (parent := service.get("extends")):
        return service
    own = {key: value for key, value in service.items() if key != "extends"}
    return _over(load(parent["file"])["services"][parent["service"]], own)


def _over(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{key: _over(below[key], value) if key in below else value for key, value in above.items()}}
    return [*below, *above] if isinstance(below, list) and isinstance(above, list) else above
