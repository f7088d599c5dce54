"""The compose file, the Dockerfiles and the telemetry configuration say what the code says; no engine is needed."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from services.common.config import env_name, load
from services.common.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
CONTAINERS: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVICES = ("gateway", "router", "usage", "worker")
OURS = {name: name.partition("-")[0] for name in CONTAINERS if name.partition("-")[0] in SERVICES}
VARIABLE = re.compile(r"\$\{([A-Z_]+)(?::-([^}]*))?\}")
IMAGES_BY_SCRIPT = re.search(r"known=\(([^)]*)\)", (ROOT / "deploy/airgap/build-base-images.sh").read_text())


def with_defaults(text: object) -> str:
    """What compose makes of a value when the operator's environment is empty."""
    return VARIABLE.sub(lambda match: match.group(2) or "", str(text))


def environment(container: str) -> dict[str, str]:
    return {name: with_defaults(value) for name, value in CONTAINERS[container].get("environment", {}).items()}


def config_class(service: str) -> type[Any]:
    module = importlib.import_module(f"services.{service}.config")
    found: type[Any] = getattr(module, f"{service.capitalize()}Config")
    return found


def dockerfile(container: str) -> list[list[str]]:
    """Instructions as word lists, continuation lines joined."""
    text = (ROOT / CONTAINERS[container]["build"]["dockerfile"]).read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def seconds(text: str) -> int:
    match = re.fullmatch(r"(\d+)s", text)
    assert match, text
    return int(match.group(1))


def test_the_compose_file_has_every_service_once() -> None:
    assert sorted(set(OURS.values())) == sorted(SERVICES)
    assert {name for name in CONTAINERS if not CONTAINERS[name].get("profiles")} == {*SERVICES, "redis"}
    profiles = {profile for c in CONTAINERS.values() for profile in c.get("profiles", [])}
    assert profiles == {"disaggregated", "gpu", "observability"}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_container_of_each_role_has_it(role: str) -> None:
    config = load(config_class("worker"), environment(f"worker-{role}"))

    assert config.engine.role.value == role


@pytest.mark.parametrize("container", OURS)
def test_the_command_is_a_module_that_exists_and_the_image_starts_the_same(container: str) -> None:
    command = CONTAINERS[container]["command"]
    service = OURS[container]

    assert command == ["python", "-m", f"services.{service}"]
    assert importlib.util.find_spec(f"services.{service}.__main__") is not None
    assert [json.loads(" ".join(line[1:])) for line in dockerfile(container) if line[0] == "CMD"] == [command]


@pytest.mark.parametrize("container", OURS)
def test_the_service_understands_its_environment(container: str) -> None:
    variables = environment(container)
    config = load(config_class(OURS[container]), variables)

    known = {env_name(field.name) for field in dataclasses.fields(config)}
    assert set(variables) <= known
    assert all(name.startswith("MILLRACE_") for name in variables)


@pytest.mark.parametrize("container", OURS)
def test_a_variable_of_the_operator_feeds_the_setting_of_the_same_name(container: str) -> None:
    for name, value in CONTAINERS[container]["environment"].items():
        for variable, _ in VARIABLE.findall(str(value)):
            assert variable == name


@pytest.mark.parametrize("container", OURS)
def test_listeners_are_reachable_from_other_containers_and_advertised_on_their_port(container: str) -> None:
    variables = environment(container)
    fields = {field.name for field in dataclasses.fields(config_class(OURS[container]))}

    listeners = {field for field in fields if field.endswith("_listen")}
    for field in listeners:
        assert variables[env_name(field)].startswith("0.0.0.0:"), field
    if "advertise" in fields:
        assert variables["MILLRACE_ADVERTISE"] == f"{{hostname}}:{port_of(variables['MILLRACE_GRPC_LISTEN'])}"
    exposed = {int(word) for line in dockerfile(container) if line[0] == "EXPOSE" for word in line[1:]}
    assert exposed == {port_of(variables[env_name(field)]) for field in listeners}


@pytest.mark.parametrize("container", OURS)
def test_the_health_check_asks_a_listener_of_the_service(container: str) -> None:
    variables = environment(container)
    line = next(line for line in dockerfile(container) if line[0] == "HEALTHCHECK")
    *_, script, address, path = json.loads(" ".join(line[line.index("CMD") + 1 :]))

    # The gateway's own door is what its health is about; the others have none but the one for metrics.
    http = variables.get("MILLRACE_HTTP_LISTEN") or variables["MILLRACE_METRICS_LISTEN"]
    assert port_of(address) == port_of(http)
    assert path == "/healthz"
    copied = [line for line in dockerfile(container) if line[0] == "COPY" and line[-1] == script]
    assert len(copied) == 1
    assert (ROOT / copied[0][1]).is_file()


@pytest.mark.parametrize("container", OURS)
def test_a_container_has_time_to_drain(container: str) -> None:
    config = load(config_class(OURS[container]), environment(container))

    assert seconds(CONTAINERS[container]["stop_grace_period"]) > getattr(config, "drain_grace_s", 10)


@pytest.mark.parametrize("container", OURS)
def test_redis_and_the_collector_are_containers_of_this_file(container: str) -> None:
    variables = environment(container)
    endpoint = (ROOT / "deploy/otel/observability.env").read_text().split("MILLRACE_OTLP_ENDPOINT=")[1].strip()
    collector = yaml.safe_load((ROOT / "deploy/otel/collector.yaml").read_text())

    assert re.fullmatch(r"redis://redis:6379/\d+", variables["MILLRACE_REDIS_URL"])
    assert variables["MILLRACE_OTLP_ENDPOINT"] == ""
    host, port = endpoint.removeprefix("http://").split(":")
    assert host in CONTAINERS
    assert int(port) == port_of(collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"])


def test_only_the_gateway_is_published_by_default_and_all_on_the_loopback_address() -> None:
    for name, container in CONTAINERS.items():
        published = [with_defaults(port).split(":") for port in container.get("ports", [])]
        assert all(host == "127.0.0.1" for host, _, _ in published)
        if not container.get("profiles"):
            assert bool(published) == (name == "gateway")
    variables = environment("gateway")
    inner = {int(with_defaults(port).split(":")[2]) for port in CONTAINERS["gateway"]["ports"]}
    assert inner == {port_of(variables["MILLRACE_HTTP_LISTEN"]), port_of(variables["MILLRACE_GRPC_LISTEN"])}
    assert COMPOSE["networks"]["inside"] == {"internal": True}
    assert {name for name in SERVICES if "edge" in CONTAINERS[name]["networks"]} == {"gateway"}


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_is_confined(container: str) -> None:
    settings = CONTAINERS[container]

    assert settings["read_only"] is True
    assert settings["cap_drop"] == ["ALL"]
    assert settings["security_opt"] == ["no-new-privileges:true"]
    assert settings["pids_limit"] > 0
    assert settings["mem_limit"]
    assert "privileged" not in settings
    assert not any("docker.sock" in str(volume) for volume in settings.get("volumes", []))


@pytest.mark.parametrize("container", OURS)
def test_the_image_runs_as_nobody_and_copies_what_exists(container: str) -> None:
    lines = dockerfile(container)

    assert [line[1] for line in lines if line[0] == "USER"] == ["millrace"]
    assert ["ENTRYPOINT", '["run-service"]'] in lines
    for line in lines:
        if line[0] == "COPY" and not line[1].startswith("--from"):
            for source in line[1:-1]:
                assert re.search(r"[\[*$]", source) or (ROOT / source).exists(), source


@pytest.mark.parametrize("container", OURS)
def test_only_the_worker_installs_torch(container: str) -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    steps = [" ".join(line) for line in dockerfile(container) if line[0] == "RUN" and "install.sh" in " ".join(line)]
    extras = [match for step in steps for match in re.findall(r"install\.sh dependencies (\S+)", step)]

    assert extras == [OURS[container]]
    needed = {*document["dependencies"], *document["optional-dependencies"][extras[0]]}
    if OURS[container] == "worker":
        assert any("install.sh torch" in step for step in steps)
    else:
        assert not [name for name in needed if re.match(r"torch|triton|nvidia|transformers", name)]
        assert not any("install.sh torch" in step for step in steps)


def test_torch_is_the_pinned_one_in_both_worker_images() -> None:
    pin = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin
    default = next(line[1] for line in dockerfile("worker") if line[0] == "ARG" and line[1].startswith("TORCH="))

    assert default == f"TORCH=torch=={pin.group(1)}+cpu"
    assert CONTAINERS["worker-gpu"]["build"]["args"]["TORCH"] == f"torch=={pin.group(1)}"
    declared = {line[1].partition("=")[0] for line in dockerfile("worker-gpu") if line[0] == "ARG"}
    assert set(CONTAINERS["worker-gpu"]["build"]["args"]) <= declared


def test_an_air_gapped_site_can_build_every_base_image_of_the_default_profile() -> None:
    assert IMAGES_BY_SCRIPT
    built = set(IMAGES_BY_SCRIPT.group(1).split())
    needed = {CONTAINERS["redis"]["image"]}
    for container in OURS:
        lines = dockerfile(container)
        defaults = dict(line[1].partition("=")[::2] for line in lines if line[0] == "ARG")
        needed |= {defaults.get(line[1].strip("${}"), line[1]) for line in lines if line[0] == "FROM"}

    assert needed <= built


def metric_names() -> set[str]:
    names = set()
    for family in Metrics().registry.collect():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}.get(family.type, [""])
        names |= {family.name + suffix for suffix in suffixes}
    return names


@pytest.mark.parametrize("file", ["prometheus/rules.yml", "grafana/dashboards/millrace.json"])
def test_rules_and_dashboards_name_metrics_of_the_catalogue(file: str) -> None:
    used = set(re.findall(r"\bmillrace_[a-z_]+", (ROOT / "deploy" / file).read_text()))

    assert used
    assert used <= metric_names()


def test_prometheus_scrapes_each_service_where_it_serves_metrics() -> None:
    jobs = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]

    scraped = {(name, entry["port"]) for job in jobs for entry in job["dns_sd_configs"] for name in entry["names"]}
    expected = set()
    for name in OURS:
        variables = environment(name)
        expected.add((name, port_of(variables["MILLRACE_METRICS_LISTEN"])))
    assert scraped == expected


def test_mounted_files_exist() -> None:
    for container in CONTAINERS.values():
        for volume in container.get("volumes", []):
            source = with_defaults(volume).split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]


def test_the_command_in_the_header_is_one_of_the_command_line() -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    match = re.search(r"exec usage millrace (\w+) (\w+) (--\w+)", text)
    assert match
    group, command, option = match.groups()

    app = typer.main.get_command(importlib.import_module("cli.main").app)
    parameters = app.commands[group].commands[command].params  # type: ignore[attr-defined]
    assert any(option in parameter.opts for parameter in parameters)
