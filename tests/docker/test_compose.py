"""The compose files: they fit together, name files that exist, and publish nothing beyond the machine."""

import argparse
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from server.options import add_options, config_from
from tests.docker.compose import DOCKER, STACKS, load, stack

pytestmark = pytest.mark.parametrize("name", STACKS)
# Made by make-secrets.sh, or a directory of the user's.
MADE = ("./secrets/", "./models")


def test_ports_are_published_on_this_machine_alone(name):
    ports = [port for service in stack(name)["services"].values() for port in service.get("ports", [])]
    assert len(ports) >= 3
    assert all(port.startswith("127.0.0.1:") for port in ports), ports
    assert len({port.split(":")[1] for port in ports}) == len(ports)


def test_every_file_that_is_named_exists(name):
    composed = stack(name)
    sources = [v.split(":")[0] for s in composed["services"].values() for v in s.get("volumes", [])]
    files = [source for source in sources if source.startswith(".")]
    files += [secret["file"] for secret in composed["secrets"].values()]
    assert files
    for file in files:
        assert file.startswith(MADE) or (DOCKER / file).exists(), file
    for service in composed["services"].values():
        if build := service.get("build"):
            assert (DOCKER / build["context"] / build["dockerfile"]).is_file()


def test_volumes_secrets_and_services_that_are_used_are_declared(name):
    composed = stack(name)
    for service in composed["services"].values():
        named = {volume.split(":")[0] for volume in service.get("volumes", [])}
        assert {volume for volume in named if not volume.startswith(".")} <= composed["volumes"].keys()
        secrets = [*service.get("secrets", []), *service.get("build", {}).get("secrets", [])]
        assert set(secrets) <= composed["secrets"].keys()
        assert set(service.get("depends_on", [])) <= composed["services"].keys()
        own = {other["image"] for other in composed["services"].values() if "build" in other}
        assert service["image"] in own or re.search(r":v?\d", service["image"]), "not pinned"


def test_build_arguments_are_the_dockerfiles_own(name):
    for service in stack(name)["services"].values():
        if build := service.get("build"):
            text = (DOCKER / build["context"] / build["dockerfile"]).read_text()
            assert set(build["args"]) <= set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
            assert f" AS {build['target']}\n" in text
            assert build["secrets"] == ["pip"], "other indexes, and their passwords"
            assert "target=/etc/pip.conf" in text
            # An empty index leaves torch to pip's configuration.
            assert "${TORCH_INDEX_URL:-" not in (DOCKER / "docker-compose.yml").read_text()


def test_everything_is_limited_and_starts_again(name):
    for service_name, service in stack(name)["services"].items():
        assert {"cpus", "memory", "pids"} <= service["deploy"]["resources"]["limits"].keys()
        assert "no-new-privileges:true" in service["security_opt"]
        assert service_name == "loadgen" or service["restart"] == "unless-stopped"


def test_servers_understand_their_options(name):
    parser = argparse.ArgumentParser()
    add_options(parser)
    servers = [s for s in stack(name)["services"].values() if "api_keys" in s.get("secrets", [])]
    assert len(servers) == (1 if name in ("base", "gpu") else 2)
    for server in servers:
        config = config_from(parser, parser.parse_args(shlex.split(server["command"])))
        assert config.server.api_keys == Path("/run/secrets/api_keys")
        assert config.engine.threads == int(server["deploy"]["resources"]["limits"]["cpus"])
        # Compose kills containers that have not ended by then.
        assert config.server.drain_time < int(server["stop_grace_period"].removesuffix("s"))


def test_the_example_shows_every_variable_with_its_default(name):
    shown = dict(re.findall(r"^#(\w+)=(.*)$", (DOCKER / ".env.example").read_text(), re.MULTILINE))
    used = {}
    for file in (*STACKS[name], "replica.yml"):
        used |= dict(re.findall(r"\$\{(\w+):?-([^}]*)\}", (DOCKER / file).read_text()))
    images = {"RAMET_IMAGE", "RAMET_CUDA_IMAGE", "RAMET_RAY_IMAGE"}
    memory = {"RAMET_MEMORY"} if name == "gpu" else set()  # the GPU's machine gets more of it
    assert {key: value for key, value in used.items() if key not in images | memory} == {
        key: shown.get(key) for key in used.keys() - images - memory
    }


def test_the_load_generator_finds_the_server(name):
    loadgen = stack(name)["services"]["loadgen"]
    assert loadgen["profiles"] == ["load"]
    assert loadgen["environment"]["LOADGEN_URL"] == "http://server:30000"
    server = stack(name)["services"]["server"]
    assert f"--model {loadgen['environment']['LOADGEN_MODEL']} " in server["command"]
    script = loadgen["entrypoint"][2].replace("$$", "$")
    assert subprocess.run(["sh", "-n", "-c", script]).returncode == 0


def test_podman_compose_reads_it(name):
    if not shutil.which("podman-compose"):
        pytest.skip("needs podman-compose")
    files = [word for file in STACKS[name] for word in ("-f", str(DOCKER / file))]
    subprocess.run(["podman-compose", *files, "config"], check=True, capture_output=True)
    assert load("replica.yml")["services"].keys() == {"replica"}
