"""The files in docker/ agree with the code: they are valid, and their ports, paths, commands and names exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser as torchrun_parser

from dht_bootstrap.cli import DEFAULT_DHT_PORT, DEFAULT_HTTP_PORT
from dht_bootstrap.cli import _parser as bootstrap_parser
from peer import __version__
from peer.commands.cli import _parser as peer_parser
from peer.config import load as settings
from peer.config.schema import Config
from peer.p2p.bulk.offer import beside
from peer.telemetry.metrics import METRICS_PORT
from tests.docker.compose import FILES, FOLDER, ROOT, Unset, load, ours, words

DOCKERFILE = (FOLDER / "Dockerfile").read_text()
README = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "README.md", FOLDER / "README.md"))
PEER_PORT = 31338  # fixed in compose.peer.yaml, because it is published
SERVICES = [(file, name) for file in FILES for name in ours(file)]
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


def configured(service: dict[str, Any]) -> Config:
    """The configuration of a peer's container; the image's /configs is our configs/."""
    arguments = [word.replace("/configs/", f"{ROOT}/configs/", 1) for word in words(service)]
    args = peer_parser().parse_args(arguments)
    environment = {key: value for key, value in service["environment"].items() if key.startswith("NOLOCO_") and value}
    return settings.load(args.config, args.overrides, environment=environment)


def check_schema(file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("file", FILES)
def test_a_compose_file_follows_the_specification(file: str, tmp_path: Path) -> None:
    checked = check_schema(FOLDER / file)
    assert checked.returncode == 0, checked.stdout
    wrong = tmp_path / file
    wrong.write_text((FOLDER / file).read_text().replace("stop_grace_period:", "stop_grace:"))
    assert check_schema(wrong).returncode != 0
    assert "version" not in load(file)


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
def test_the_dockerfile_is_clean() -> None:
    assert HADOLINT is not None
    checked = subprocess.run([HADOLINT, str(FOLDER / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(("file", "name"), SERVICES)
def test_a_service_of_ours_has_a_command_that_exists(file: str, name: str) -> None:
    service = ours(file)[name]
    if words(service)[0] == "bootstrap":
        args = bootstrap_parser().parse_args(words(service)[1:])
        assert (args.port, args.http_port, args.http_host) == (DEFAULT_DHT_PORT, DEFAULT_HTTP_PORT, "0.0.0.0")
        assert args.addresses_file == Path("/swarm/addresses")
        return
    config = configured(service)
    assert config.peer.metrics.host == "0.0.0.0"  # Prometheus is in another container
    assert config.peer.metrics.port in (None, METRICS_PORT)


def test_the_environment_reaches_the_configuration() -> None:
    given = {
        "PEER_ARGS": "--set run.steps=7",
        "PEER_ANNOUNCE": "/ip4/198.51.100.4/tcp/31338",
    }
    config = configured(ours("compose.peer.yaml", given)["peer"])
    assert config.run.steps == 7
    assert config.peer.network.announce == (given["PEER_ANNOUNCE"],)
    assert config.peer.network.port == PEER_PORT
    assert configured(ours("compose.peer.yaml")["peer"]).peer.network.announce == ()
    public = {"BOOTSTRAP_ANNOUNCE": "/ip4/203.0.113.7/tcp/31337", "BOOTSTRAP_ARGS": "--owner /data/owner.key"}
    node = ours("compose.yaml", public)
    args = bootstrap_parser().parse_args(words(node["bootstrap"])[1:])
    assert args.announce == ["/dns4/bootstrap/tcp/31337", "/ip4/203.0.113.7/tcp/31337"]
    assert args.owner == Path("/data/owner.key")
    with pytest.raises(Unset, match="an address that the bootstrap node printed"):
        load("compose.peer.yaml", {"NOLOCO_INITIAL_PEERS": ""})


def test_only_the_peer_to_peer_ports_are_published_to_other_machines() -> None:
    published = {port for file in FILES for it in load(file)["services"].values() for port in it.get("ports", [])}
    assert published == {
        f"{DEFAULT_DHT_PORT}:{DEFAULT_DHT_PORT}",
        f"{PEER_PORT}-{beside(PEER_PORT)}:{PEER_PORT}-{beside(PEER_PORT)}",
        *(f"127.0.0.1:{port}:{port}" for port in (DEFAULT_HTTP_PORT, METRICS_PORT, 9090, 3000)),
    }
    exposed = re.search(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE)
    assert exposed and exposed[1].split() == [
        str(it) for it in (DEFAULT_DHT_PORT, PEER_PORT, beside(PEER_PORT), DEFAULT_HTTP_PORT, METRICS_PORT)
    ]


@pytest.mark.parametrize("file", FILES)
def test_every_volume_is_declared_and_every_mounted_path_exists(file: str) -> None:
    content = load(file)
    used = {volume.split(":")[0] for it in content["services"].values() for volume in it.get("volumes", [])}
    assert {it for it in used if not it.startswith((".", "/"))} == set(content["volumes"])
    for path in sorted(it for it in used if it.startswith(".")):
        assert (FOLDER / path).is_dir(), path


@pytest.mark.parametrize(("file", "name"), SERVICES)
def test_a_service_of_ours_has_few_rights_and_time_to_leave(file: str, name: str) -> None:
    service = ours(file)[name]
    assert service["image"] == f"noloco-peer:{__version__}"
    assert service["init"]
    if words(service)[0] != "bootstrap":
        assert service["stop_grace_period"] == "15m"
        assert service["restart"] == "on-failure"
    assert ("gpu" in service.get("profiles", [])) == ("deploy" in service)


@pytest.mark.parametrize(("file", "name"), [(file, name) for file in FILES for name in load(file)["services"]])
def test_every_container_is_confined(file: str, name: str) -> None:
    """Ours, Prometheus and Grafana: what breaks into one can write nothing, gain nothing and use up nothing."""
    service = load(file)["services"][name]
    assert service["read_only"] is True and service["tmpfs"] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "pid", "ipc", "network_mode", "devices", "user"} & service.keys()
    gigabytes = re.fullmatch(r"(\d+)g", service["mem_limit"])
    assert gigabytes and 1 <= int(gigabytes[1]) <= 64
    assert 100 <= service["pids_limit"] <= 4096 and 1024 < service["ulimits"]["nofile"] <= 65536
    assert not any("docker.sock" in volume for volume in service["volumes"])


def test_a_peer_s_memory_is_a_variable() -> None:
    for file in FILES:
        assert {it["mem_limit"] for it in ours(file, {"MEMORY": "3g"}).values()} - {"2g"} == {"3g"}


@pytest.mark.parametrize(("file", "name"), SERVICES)
def test_a_peer_s_hours_are_in_the_zone_that_a_person_names(file: str, name: str) -> None:
    """They were in UTC in every container."""
    if words(ours(file)[name])[0] != "bootstrap":
        assert ours(file, {"TZ": "Europe/Berlin"})[name]["environment"]["TZ"] == "Europe/Berlin"
        assert not ours(file)[name]["environment"]["TZ"]  # UTC


@pytest.mark.parametrize(("file", "name"), SERVICES)
def test_a_peer_gets_a_token_of_the_hub(file: str, name: str) -> None:
    """The error for a gated tokenizer says to set it, and no container had it. The bootstrap node needs none."""
    of_peer = words(ours(file)[name])[0] != "bootstrap"
    for given in ({"HF_TOKEN": "hf_secret"}, {}):
        found = ours(file, given)[name]["environment"].get("HF_TOKEN")
        assert found == (given.get("HF_TOKEN", "") if of_peer else None)


def test_the_image_has_the_zones() -> None:
    last = DOCKERFILE.rpartition("FROM ${BASE}\n")[2]
    assert re.search(r"^RUN \[ -e /usr/share/zoneinfo/.*\n.* tzdata ", last, re.MULTILINE)


def test_nobody_logs_into_grafana_and_there_is_no_admin() -> None:
    settings = load("compose.yaml")["services"]["grafana"]["environment"]
    assert settings["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert settings["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == settings["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert settings["GF_AUTH_BASIC_ENABLED"] == "false"  # without a form admin:admin was good for the API
    assert not any("PASSWORD" in key or "ADMIN_USER" in key for key in settings)


@pytest.mark.parametrize("subnet", [{}, {"SUBNET": "10.9.8.0/24"}])
def test_prometheus_is_sent_into_the_containers_network_only(subnet: dict[str, str]) -> None:
    content = load("compose.yaml", subnet)
    (pool,) = content["networks"]["default"]["ipam"]["config"]
    args = bootstrap_parser().parse_args(words(content["services"]["bootstrap"])[1:])
    assert [str(it) for it in args.scrape_networks] == [pool["subnet"]]
    assert pool["subnet"] == subnet.get("SUBNET", "172.30.94.0/24")
    for it in content["services"].values():
        assert "networks" not in it


def test_a_peer_s_answer_sends_prometheus_nowhere_else() -> None:
    settings = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yml").read_text())
    (peers,) = (it for it in settings["scrape_configs"] if it["job_name"] == "noloco-peer")
    assert peers["follow_redirects"] is False
    assert {"body_size_limit", "sample_limit", "label_limit", "label_value_length_limit"} <= peers.keys()


def test_names_that_the_program_does_not_know_are_not_used() -> None:
    text = DOCKERFILE + "".join((FOLDER / file).read_text() for file in FILES)
    known = {*settings.ENVIRONMENT, *settings.OTHER_VARIABLES}
    assert set(re.findall(r"NOLOCO_[A-Z_]+", text)) <= known


def test_images_are_pinned_and_the_label_is_the_version() -> None:
    for file in FILES:
        for service in load(file)["services"].values():
            assert re.search(r":v?\d+\.\d+", service["image"]), service["image"]
    assert f'image.version="{__version__}"' in DOCKERFILE
    named = README + "".join((ROOT / file).read_text() for file in ("Makefile", "docker/Dockerfile"))
    assert set(re.findall(r"noloco-peer:(\d\S*)", named)) == {__version__}
    assert re.search(r"^ARG BASE=[\w./-]+:\d[\w.-]+$", DOCKERFILE, re.MULTILINE)


def test_every_file_that_the_dockerfile_copies_is_in_its_context() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all((ROOT / path).exists() for path in kept)
    copied = re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    assert {word for line in copied for word in line.split()} - {"."} <= kept


def test_the_readme_s_commands_name_files_profiles_and_services_that_exist() -> None:
    found = re.findall(r"docker compose -f docker/(\S+) ?(?:--profile (\w+) )?(\w+) ?(.*)", README)
    assert len(found) >= 5
    for file, profile, verb, rest in found:
        services = load(file)["services"]
        assert not profile or any(profile in it.get("profiles", []) for it in services.values())
        assert verb in {"up", "stop", "down", "logs", "exec", "build", "cp"}
        if verb in {"logs", "exec"}:
            assert next(word for word in rest.split() if not word.startswith("-")) in services


def test_the_readme_s_containers_run_commands_that_exist() -> None:
    lines = re.findall(r"^docker run (.*?) noloco-peer:\S+ (.*)$", README, re.MULTILINE)
    assert len(lines) == 3
    for options, line in lines:
        service = {"command": line, "environment": {}}
        if "--entrypoint torchrun" in options:
            ranks = torchrun_parser().parse_args(shlex.split(line))
            assert (ranks.module, ranks.training_script) == (True, "peer") and 850 <= ranks.shutdown_timeout < 900
            service["command"] = shlex.join(ranks.training_script_args)
        if words(service)[0] == "bootstrap":
            bootstrap_parser().parse_args(words(service)[1:])
        else:
            assert configured(service).peer.network.port == PEER_PORT


def test_a_container_that_a_text_starts_has_time_to_leave() -> None:
    """After ten seconds docker kills it: a peer lost what it had done since its last checkpoint."""
    files = [
        ROOT / "README.md",
        *(it for name in ("docker", "peer", "dht_bootstrap") for it in (ROOT / name).rglob("*.md")),
    ]
    text = " ".join("\n".join(file.read_text(encoding="utf-8") for file in files).split())
    found = re.findall(r"docker run (.*?) ?noloco-peer:\S+ (\S+)", text)
    assert len(found) >= 3
    for options, first in found:
        assert "--init" in options
        assert first == "bootstrap" or ("--stop-timeout 900" in options and ":/data" in options), options
