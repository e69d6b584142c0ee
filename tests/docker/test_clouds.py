"""The recipes in docker/clouds: valid for the cloud, and what is ours in them exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from dht_bootstrap.cli import DEFAULT_DHT_PORT, DEFAULT_HTTP_PORT
from peer import __version__
from peer.config import load as settings
from peer.config.schema import CheckpointConfig
from peer.p2p.deadline import LEAVING_SECONDS
from peer.telemetry.metrics import METRICS_PORT
from tests.docker import clouds
from tests.docker.clouds import CLOUDS, KUBERNETES, README, UNITS, bootstrap, commands, of_kind, peer
from tests.docker.compose import FOLDER, ROOT, ours

PEER_PORT, ADDRESS = 31338, "/ip4/203.0.113.7/tcp/31337/p2p/QmYb..."
FILES = [it for it in sorted(CLOUDS.rglob("*")) if it.is_file()]
SCRIPTS = [CLOUDS / "start-peer.sh", KUBERNETES / "rules.sh", CLOUDS / "slurm.sbatch", FOLDER / "entrypoint.sh"]
MANIFESTS = ("bootstrap.yaml", "peers.yaml")
SETS = of_kind("StatefulSet")
SERVICES = ("noloco-peer.service", "noloco-bootstrap.service")
EXPOSURE = 25  # tenths of systemd's scale of ten
GRACE, SLOW_DISK = "900", 100e6  # seconds to save and leave; bytes a second


def name(path: Path) -> str:
    return path.name


def run(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=120, check=False, **options)


def program(called: str) -> Path:
    return Path(sys.executable).parent / called


@pytest.mark.parametrize("file", FILES, ids=name)
def test_names_and_versions_are_the_program_s(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert set(re.findall(r"NOLOCO_[A-Z_]+", text)) <= {*settings.ENVIRONMENT, *settings.OTHER_VARIABLES}
    assert set(re.findall(r"noloco-peer:(\d[\w.-]*\w)", text)) <= {__version__}


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_a_script_is_clean(script: Path) -> None:
    assert run("bash", "-n", script).returncode == 0
    checked = run(program("shellcheck"), script)
    assert checked.returncode == 0, checked.stdout


# -- RunPod, Vast.ai -----------------------------------------------------------------------------------


def test_a_pod_listens_on_the_port_that_it_exposes() -> None:
    (words,) = commands("runpodctl")
    given = dict(zip(words[3::2], words[4::2], strict=True))
    config = peer(arguments := shlex.split(given["--args"]))
    direct = PEER_PORT + 1  # the second port, for direct connections
    assert given["--ports"] == f"{config.peer.network.port}/tcp,{direct}/tcp"
    assert arguments[0] == "join" and config.peer.initial_peers == (ADDRESS,) and not config.peer.network.announce


def test_an_instance_listens_on_the_port_that_it_maps() -> None:
    (words,) = commands("vastai")
    options = shlex.split(words[words.index("--env") + 1])
    config = peer(arguments := words[words.index("--args") + 1 :])
    ports = (config.peer.network.port, PEER_PORT + 1)  # the second one for direct connections
    assert options == [word for port in ports for word in ("-p", f"{port}:{port}")]
    assert arguments[0] == "join" and config.peer.initial_peers == (ADDRESS,) and not config.peer.network.announce


# -- EC2, GCP ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exists", [False, True], ids=["first boot", "later boot"])
def test_a_virtual_machine_starts_a_confined_container(exists: bool, tmp_path: Path) -> None:
    said = tmp_path / "said"
    docker = f'#!/bin/sh\n[ "$1" = container ] && exit {int(not exists)}\nprintf "%s\\n" "$@" > {said}\n'
    (tmp_path / "docker").write_text(docker)
    (tmp_path / "docker").chmod(0o755)
    done = run(CLOUDS / "start-peer.sh", env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    words = said.read_text().splitlines()
    if exists:
        assert words == ["start", "noloco"]
        return
    image = words.index(f"noloco-peer:{__version__}")
    options, arguments = words[:image], words[image + 1 :]
    given = dict(pairwise(options))
    config = peer(arguments)
    assert arguments[0] == "join" and config.peer.network.port == PEER_PORT
    assert config.peer.initial_peers == (ADDRESS,)
    ports = f"{PEER_PORT}-{PEER_PORT + 1}"
    assert given["--publish"] == f"{ports}:{ports}" and given["--volume"] == "noloco:/data"
    service = ours("compose.peer.yaml")["peer"]
    assert {"--read-only", "--init"} <= set(options) and "--privileged" not in options
    assert [given["--tmpfs"]] == service["tmpfs"] and [given["--cap-drop"]] == service["cap_drop"]
    assert [given["--security-opt"]] == service["security_opt"]
    assert int(given["--pids-limit"]) == service["pids_limit"]
    assert given["--ulimit"] == f"nofile={service['ulimits']['nofile']}"
    passed = [value for option, value in pairwise(options) if option == "--env"]
    assert passed == ["TZ", "HF_TOKEN"]  # the zone of peer.hours; for what the hub does not give to everybody
    assert given["--restart"] == service["restart"] and given["--stop-timeout"] == GRACE
    assert re.fullmatch(r"\d{6,}k", given["--memory"])


def test_the_commands_of_the_clouds_name_files_that_exist() -> None:
    for called in ("aws", "gcloud", "sbatch", "kubectl", "sudo"):
        lines = commands(called)
        assert lines
        named = re.findall(r"(?:docker|configs)/[\w./-]+", " ".join(word for line in lines for word in line))
        assert all((ROOT / it).exists() for it in named), named


# -- Slurm (its job runs in tests/swarm/commands/test_slurm.py) ----------------------------------------


def test_the_job_has_time_to_save() -> None:
    text = (CLOUDS / "slurm.sbatch").read_text()
    assert f"#SBATCH --signal=TERM@{GRACE}\n" in text and "#SBATCH --requeue\n" in text
    (words,) = commands("sbatch")
    assert peer(["train", "--config", *words[words.index("docker/clouds/slurm.sbatch") + 1 :]]).run.steps == 5000


# -- Kubernetes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", MANIFESTS)
def test_a_manifest_follows_the_schema(file: str, tmp_path: Path) -> None:
    command = (program("kubernetes-validate"), "--strict", "--quiet")
    checked = run(*command, KUBERNETES / file)
    assert checked.returncode == 0, checked.stderr
    wrong = tmp_path / file
    wrong.write_text((KUBERNETES / file).read_text().replace("terminationGracePeriodSeconds", "gracePeriod"))
    assert run(*command, wrong).returncode != 0


def container(of: str) -> dict[str, Any]:
    (only,) = SETS[of]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def ports(of: str) -> dict[str, int]:
    return {it["name"]: it["containerPort"] for it in container(of)["ports"]}


def test_the_pods_run_commands_that_exist() -> None:
    args = bootstrap(container("noloco-bootstrap")["args"][1:])
    assert ports("noloco-bootstrap") == {"p2p": args.port, "monitor": args.http_port}
    assert (args.port, args.http_port, args.http_host) == (DEFAULT_DHT_PORT, DEFAULT_HTTP_PORT, "0.0.0.0")
    assert args.announce == [f"/dns4/{SETS['noloco-bootstrap']['spec']['serviceName']}/tcp/{args.port}"]
    assert container("noloco-bootstrap")["readinessProbe"]["httpGet"] == {"path": "/healthz", "port": "monitor"}
    assert f"cat {args.addresses_file}" in README
    values = of_kind("ConfigMap")["noloco"]["data"]
    environment = {}
    for it in container("noloco-peer")["env"]:
        source = it.get("valueFrom", {}).get("configMapKeyRef")
        environment[it["name"]] = values[source["key"]] if source else "noloco-peer-0"
    arguments = container("noloco-peer")["args"]
    joining = ["join", *(it for it in arguments[1:] if not it.startswith("--config"))]
    assert arguments[0] == "train" and peer(joining, environment).peer == peer(arguments, environment).peer
    config = peer(arguments, environment)
    assert config.peer.name == "noloco-peer-0" and config.peer.initial_peers == (values["NOLOCO_INITIAL_PEERS"],)
    assert ports("noloco-peer") == {"p2p": config.peer.network.port, "direct": PEER_PORT + 1, "metrics": METRICS_PORT}
    assert config.peer.metrics.host == "0.0.0.0"
    assert "TZ" in environment  # the zone of peer.hours
    (token,) = (it["valueFrom"] for it in container("noloco-peer")["env"] if it["name"] == "HF_TOKEN")
    assert token == {"secretKeyRef": {"name": "noloco", "key": "HF_TOKEN", "optional": True}}


@pytest.mark.parametrize("of", SETS)
def test_a_pod_is_confined(of: str) -> None:
    pod = SETS[of]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False and pod["shareProcessNamespace"] is True
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    # else a Service noloco-... gives it variables NOLOCO_..., and a peer refuses those that it does not know
    assert pod["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert container(of)["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container(of)["resources"]["limits"]
    claimed = {it["metadata"]["name"] for it in SETS[of]["spec"]["volumeClaimTemplates"]}
    mounted = {it["name"]: it["mountPath"] for it in container(of)["volumeMounts"]}
    assert mounted == {"data": "/data", "tmp": "/tmp"} and claimed | {it["name"] for it in pod["volumes"]} == {*mounted}
    assert "hostPath" not in str(pod["volumes"])


def test_a_pod_has_time_to_leave_and_comes_back_as_itself() -> None:
    assert SETS["noloco-peer"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == int(GRACE)
    (claim,) = SETS["noloco-peer"]["spec"]["volumeClaimTemplates"]
    room = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) * 2**30
    assert room / (CheckpointConfig().keep + 1) / SLOW_DISK + LEAVING_SECONDS < int(GRACE) / 2  # the largest that fits
    (name_of_it,) = (it for it in container("noloco-peer")["env"] if it["name"] == "NOLOCO_PEER_NAME")
    assert name_of_it["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}


@pytest.mark.parametrize("of", SETS)
def test_a_service_finds_its_pods(of: str) -> None:
    service = of_kind("Service")[SETS[of]["spec"]["serviceName"]]
    labels = SETS[of]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items() and service["spec"]["clusterIP"] == "None"
    assert SETS[of]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for port in service["spec"]["ports"]:
        assert ports(of)[port["name"]] == port["port"]


def test_prometheus_scrapes_as_the_one_in_docker() -> None:
    scraped = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    jobs = {it["job_name"]: it for it in scraped}
    monitor, peers = of_kind("ServiceMonitor")["noloco-bootstrap"], of_kind("ScrapeConfig")["noloco-peer"]["spec"]
    service = of_kind("Service")["noloco-bootstrap"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] in jobs
    assert {it["port"] for it in monitor["spec"]["endpoints"]} <= {it["name"] for it in service["spec"]["ports"]}
    model = jobs[peers["jobName"]]
    (found,) = peers["httpSDConfigs"]
    assert found["url"] == "http://noloco-bootstrap.default.svc:9400/targets"
    for key, theirs in {"sampleLimit": "sample_limit", "labelLimit": "label_limit"}.items():
        assert peers[key] == model[theirs]
    assert peers["labelValueLengthLimit"] == model["label_value_length_limit"]
    rules = [{key.replace("sourceLabels", "source_labels"): it[key] for key in it} for it in peers["metricRelabelings"]]
    assert rules == model["metric_relabel_configs"]


def test_prometheus_scrapes_as_often_as_rules_and_dashboards_expect() -> None:
    often = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yml").read_text())["global"]["scrape_interval"]
    monitor, peers = (
        of_kind("ServiceMonitor")["noloco-bootstrap"]["spec"],
        of_kind("ScrapeConfig")["noloco-peer"]["spec"],
    )
    assert {peers["scrapeInterval"], *(it["interval"] for it in monitor["endpoints"])} == {often}
    (source,) = yaml.safe_load((FOLDER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["jsonData"]["timeInterval"] == often


def test_the_rules_reach_the_operator_s_prometheus() -> None:
    """The dashboards' main panels show recorded series only."""
    printed = run(KUBERNETES / "rules.sh")
    assert printed.returncode == 0, printed.stderr
    made = {it["metadata"]["name"]: it for it in yaml.safe_load_all(printed.stdout)}
    assert made.keys() == {"noloco-recording", "noloco-alerts"}
    for name, it in made.items():
        assert (it["apiVersion"], it["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
        file = f"{name.removeprefix('noloco-')}.yml"
        assert it["spec"] == yaml.safe_load((FOLDER / "prometheus" / file).read_text())


# -- systemd -------------------------------------------------------------------------------------------


@pytest.mark.needs("systemd-analyze")
@pytest.mark.parametrize("file", SERVICES)
def test_a_unit_is_valid_and_confined(file: str, tmp_path: Path) -> None:
    text = (UNITS / file).read_text()
    here = tmp_path / file
    here.write_text(text.replace("/opt/noloco/bin", str(Path(sys.executable).parent)))
    checked = run("systemd-analyze", "verify", "--man=no", here)
    assert checked.returncode == 0 and file not in checked.stderr, checked.stderr
    scored = run("systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE}", "--no-pager", here)
    assert scored.returncode == 0, scored.stdout
    here.write_text(here.read_text().replace("TimeoutStopSec", "StopTimeout"))
    assert file in run("systemd-analyze", "verify", "--man=no", here).stderr


def test_the_peer_s_unit_hides_no_gpu() -> None:
    """ProtectClock forbade /dev/nvidia* before systemd 252, and the peer trained on the CPU."""
    mine = clouds.unit("noloco-peer.service")
    assert not {"ProtectClock", "PrivateDevices", "DevicePolicy", "DeviceAllow"} & mine.keys()
    assert clouds.unit("noloco-bootstrap.service")["ProtectClock"] == ["yes"]


def test_a_unit_runs_a_command_that_exists_and_gives_it_time() -> None:
    mine = clouds.unit("noloco-peer.service")
    called, variable, *words = shlex.split(mine["ExecStart"][0])
    assert called.endswith("/noloco-peer") and variable == "$COMMAND" and mine["Environment"][0] == "COMMAND=join"
    (first,) = re.findall(r"`COMMAND=(.*)`", README)
    assert first in (UNITS / "noloco-peer.service").read_text()
    for command in ("join", first):
        config = peer([*command.split(), *words], {"NOLOCO_INITIAL_PEERS": ADDRESS})
        assert config.peer.network.port == PEER_PORT and config.peer.initial_peers == (ADDRESS,)
    assert mine["TimeoutStopSec"] == [GRACE] and mine["RestartPreventExitStatus"] == ["2"]
    assert mine["StartLimitIntervalSec"] == ["0"] and int(mine["RestartSec"][0]) >= 10  # it never gives up
    node = clouds.unit("noloco-bootstrap.service")
    called, *words = shlex.split(node["ExecStart"][0])
    assert called.endswith("/noloco-bootstrap") and bootstrap(words).port == DEFAULT_DHT_PORT
    for it, state in ((mine, "noloco"), (node, "noloco-bootstrap")):
        assert it["StateDirectory"] == [state] and it["WorkingDirectory"] == [f"/var/lib/{state}"]
        assert it["NoNewPrivileges"] == ["yes"] and it["ProtectSystem"] == ["strict"]
        assert it["CapabilityBoundingSet"] == [""]
        assert {"MemoryMax", "TasksMax", "LimitNOFILE"} <= it.keys()
