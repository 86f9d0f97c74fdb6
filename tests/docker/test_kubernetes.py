"""The manifests: Kubernetes' own schemas take them, and they name what the server has."""

import argparse
import warnings
from typing import Any

import pytest
import yaml

from server.options import add_options, config_from
from tests.docker.compose import DOCKER

FILES = ("ramet.yml", "monitoring.yml", "gateway.yml")
# Kinds of operators, whose schemas are not Kubernetes' own.
CUSTOM = {"ServiceMonitor", "InferencePool"}
OBJECTS: dict[str, dict[str, Any]] = {
    found["kind"]: found
    for name in FILES
    for found in yaml.safe_load_all((DOCKER / "kubernetes" / name).read_text(encoding="utf-8"))
}
POD = OBJECTS["StatefulSet"]["spec"]["template"]
(SERVER,) = POD["spec"]["containers"]


def test_their_schemas_take_them():
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for kind, found in OBJECTS.items():
        if kind not in CUSTOM:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                validate.validate(found, validate.latest_version(), strict=True)
    broken = {**OBJECTS["Service"], "spec": {"ports": [{"port": "many"}]}}
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, validate.latest_version(), strict=True)


def test_the_server_understands_its_options_and_has_time_to_drain():
    parser = argparse.ArgumentParser()
    add_options(parser)
    config = config_from(parser, parser.parse_args(SERVER["args"]))
    command, pause_s = SERVER["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert int(pause_s) + config.server.drain_time < POD["spec"]["terminationGracePeriodSeconds"]
    assert str(config.engine.threads) == SERVER["resources"]["limits"]["cpu"]
    (port,) = SERVER["ports"]
    assert port["containerPort"] == config.server.port
    keys = next(mount for mount in SERVER["volumeMounts"] if mount["name"] == "keys")
    assert str(config.server.api_keys.parent) == keys["mountPath"]


def test_everything_finds_the_pods():
    labels = POD["metadata"]["labels"]
    (named,) = SERVER["ports"]
    assert OBJECTS["Service"]["spec"]["selector"] == labels
    for kind in ("StatefulSet", "PodDisruptionBudget", "InferencePool"):
        assert OBJECTS[kind]["spec"]["selector"]["matchLabels"] == labels
    (service,) = OBJECTS["Service"]["spec"]["ports"]
    assert service["targetPort"] == named["name"]
    (scraped,) = OBJECTS["ServiceMonitor"]["spec"]["endpoints"]
    assert scraped["port"] == service["name"]
    assert OBJECTS["ServiceMonitor"]["spec"]["selector"]["matchLabels"] == OBJECTS["Service"]["metadata"]["labels"]
    scaled = OBJECTS["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (scaled["kind"], scaled["name"]) == ("StatefulSet", OBJECTS["StatefulSet"]["metadata"]["name"])
    for probe, path in (("startup", "/health"), ("liveness", "/health"), ("readiness", "/ready")):
        assert SERVER[f"{probe}Probe"]["httpGet"] == {"path": path, "port": named["name"]}
    mounted = {mount["name"] for mount in SERVER["volumeMounts"]}
    claimed = {claim["metadata"]["name"] for claim in OBJECTS["StatefulSet"]["spec"]["volumeClaimTemplates"]}
    assert claimed == {"data"}, "models and blocks outlive the process"
    assert mounted == {volume["name"] for volume in POD["spec"]["volumes"]} | claimed
