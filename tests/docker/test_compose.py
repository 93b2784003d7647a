"""`docker/compose.yaml` and `docs/deployment.md` agree with the image, with nginx and with servelite."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import yaml

from servelite.cli import main
from servelite.observability.metrics import Metrics
from tests.docker.dockerfile import read_dockerfile, steps_of
from tests.docker.nginx import CONF
from tests.sources import ROOT

COMPOSE: Final[dict[str, Any]] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
SERVICES: Final = COMPOSE["services"]
REPLICAS: Final = ("replica-1", "replica-2")
PAGE: Final = (ROOT / "docs" / "deployment.md").read_text()


def last(word: str) -> str:
    """What the Dockerfile's CPU target says with the instruction `word`."""
    _, stages = read_dockerfile((ROOT / "docker" / "Dockerfile").read_text())
    return [text for name, text in steps_of(stages, "cpu") if name == word][-1]


def seconds(text: str) -> float:
    """A duration as compose writes it."""
    found = re.fullmatch(r"(\d+)(s|m)", text)
    assert found
    return int(found[1]) * {"s": 1, "m": 60}[found[2]]


def test_nginx_stands_before_exactly_the_replicas() -> None:
    assert set(SERVICES) == {*REPLICAS, "nginx"}
    assert set(re.findall(r"server ([\w-]+):8000", CONF.read_text())) == set(REPLICAS)
    assert last("EXPOSE") == "8000"
    (port,) = SERVICES["nginx"]["ports"]
    assert port.endswith(":8080") and "listen 8080;" in CONF.read_text()
    for mount in SERVICES["nginx"]["volumes"]:
        assert (ROOT / "docker" / mount.split(":")[0]).is_file()
    assert all(SERVICES["nginx"]["depends_on"][name] == {"condition": "service_healthy"} for name in REPLICAS)


def test_a_replica_is_the_image_as_it_is() -> None:
    build = SERVICES["replica-1"]["build"]
    assert (ROOT / "docker" / build["context"] / build["dockerfile"]).is_file() and build["target"] == "cpu"
    for name in REPLICAS:
        replica = SERVICES[name]
        assert replica["user"] == last("USER")
        assert replica["read_only"] is True and replica["cap_drop"] == ["ALL"]
        uid, gid = replica["user"].split(":")
        assert f"/run/servelite:uid={uid},gid={gid},mode=0700" in replica["tmpfs"]
        assert replica["healthcheck"]["test"][1:] == json.loads(last("HEALTHCHECK").partition("CMD ")[2])


def test_docker_waits_longer_than_a_drain_takes() -> None:
    for name in REPLICAS:
        words = SERVICES[name]["command"]
        assert "--drain-delay" not in words  # nginx probes nothing: a 503 is what it looks at
        drain = float(words[words.index("--drain-timeout") + 1])
        assert seconds(SERVICES[name]["stop_grace_period"]) >= drain + 10
        assert seconds(SERVICES["nginx"]["stop_grace_period"]) >= drain


def test_the_command_is_one_that_servelite_knows(capsys: Any) -> None:
    words = [word.replace("${MODEL:-demo}", "/no/such/model") for word in SERVICES["replica-1"]["command"]]
    assert main(words) == 3
    assert "/no/such/model" in capsys.readouterr().err


def test_the_page_names_what_there_is() -> None:
    exposed = set(re.findall(r"^# TYPE (\w+) ", Metrics("demo").expose().decode(), re.MULTILINE))
    named = set(re.findall(r"`(servelite_\w+)`", PAGE))
    assert named and named <= exposed
    flags = set(re.findall(r"`(--[a-z-]+)`", (ROOT / "docs" / "settings.md").read_text()))
    of_docker = {"--read-only", "--tmpfs", "--init", "--stop-timeout", "--cpuset-cpus", "--rm"}
    of_docker |= {"--build", "--wait", "--no-deps", "--force-recreate"}
    assert set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", PAGE)) <= flags | of_docker


def test_every_file_that_the_page_names_for_the_image_is_there() -> None:
    for name in re.findall(r"`docker/([\w.]+\w)`", PAGE):
        assert Path(ROOT, "docker", name).is_file(), name
