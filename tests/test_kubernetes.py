"""The manifests: the Kubernetes API accepts them, and what the how-to promises of them is in them.

Nothing here starts a cluster. The schemas of the API are in the package `kubernetes-validate`.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from flywheel.config.file import Config, parse
from flywheel.config.ingest import host_and_port
from flywheel.judge.rubric.file import parse_rubric
from flywheel.serving import routes
from flywheel.serving.server.vllm_command import check_arguments
from tests.conftest import ROOT
from tests.factories.commands import root

FOLDER = ROOT / "docs" / "operate" / "kubernetes"
OBJECTS: list[dict[str, Any]] = [
    each
    for file in sorted(FOLDER.glob("*.yaml"))
    if file.name != "kustomization.yaml"
    for each in yaml.safe_load_all(file.read_text())
]
CUSTOM = {"ServiceMonitor", "RayCluster"}


def found(kind: str, name: str) -> dict[str, Any]:
    (only,) = [each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return only


SERVER: dict[str, Any] = found("Deployment", "flywheel-server")["spec"]
DAEMON: dict[str, Any] = found("StatefulSet", "flywheel-daemon")["spec"]
PODS = {"server": SERVER["template"], "daemon": DAEMON["template"]}


def ray_pods() -> list[dict[str, Any]]:
    """The templates of the RayCluster: its head, then its workers."""
    spec = found("RayCluster", "flywheel")["spec"]
    return [spec["headGroupSpec"]["template"], *(each["template"] for each in spec["workerGroupSpecs"])]


def container(pod: str) -> dict[str, Any]:
    (only,) = PODS[pod]["spec"]["containers"]
    return dict(only)


@pytest.fixture
def config() -> Config:
    text = found("ConfigMap", "flywheel")["data"]["flywheel.yaml"]
    return parse(yaml.safe_load(text), "test", Path("/etc/flywheel"))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None,
    reason="the schemas are not installed: pip install kubernetes-validate",
)
def test_the_kubernetes_api_has_each_field() -> None:
    import kubernetes_validate  # type: ignore[import-not-found, import-untyped, unused-ignore]

    checked = [each for each in OBJECTS if each["kind"] not in CUSTOM]
    checked += [{"apiVersion": "v1", "kind": "Pod", **template} for template in ray_pods()]
    for each in checked:
        kubernetes_validate.validate(each, "1.34", strict=True)
    assert len(checked) >= 10
    with pytest.raises(kubernetes_validate.ValidationError):
        wrong = {**found("Deployment", "flywheel-server"), "spec": {**SERVER, "replica": 1}}
        kubernetes_validate.validate(wrong, "1.34", strict=True)


def test_every_file_is_listed() -> None:
    text = (FOLDER / "kustomization.yaml").read_text()
    listed = [line.strip().lstrip("# ").removeprefix("- ") for line in text.splitlines() if line.endswith(".yaml")]
    assert sorted(listed) == sorted({each.name for each in FOLDER.glob("*.yaml")} - {"kustomization.yaml"})


def test_the_configuration_is_valid_and_fits_the_manifests(config: Config) -> None:
    port = container("server")["ports"][0]["containerPort"]
    assert config.serving.port == port
    assert config.serving.start == "wait"
    assert config.serving.urls == [f"dns://flywheel-replicas:{port}"]
    assert config.serving.host == "0.0.0.0"
    check_arguments(config.serving.extra_args)
    assert config.daemon.metrics is not None
    assert host_and_port(config.daemon.metrics) == ("0.0.0.0", container("daemon")["ports"][0]["containerPort"])
    assert config.filter.rubric is not None
    rubric = found("ConfigMap", "flywheel")["data"][Path(config.filter.rubric).name]
    parse_rubric(yaml.safe_load(rubric), "rubric.yaml")


def test_the_how_to_names_every_key(config: Config) -> None:
    page = (ROOT / "docs" / "operate" / "scale.md").read_text()
    names = {config.serving.api_key_env, config.serving.admin_key_env, config.daemon.metrics_token_env}
    names |= {"OPENAI_API_KEY", *(credentials_of(each) for each in OBJECTS if each["kind"] == "ServiceMonitor")}
    for name in names:
        assert f"--from-literal={name}=" in page
    for pod in PODS:
        assert container(pod)["envFrom"] == [{"secretRef": {"name": "flywheel-keys"}}]
    assert "create secret generic flywheel-keys" in page
    assert "Nothing on this page has run on a cluster" in page


def credentials_of(monitor: dict[str, Any]) -> str:
    (endpoint,) = monitor["spec"]["endpoints"]
    credentials = endpoint["authorization"]["credentials"]
    assert credentials["name"] == "flywheel-keys"
    return str(credentials["key"])


def test_containers_start_commands_that_exist() -> None:
    assert (container("server")["args"], container("daemon")["args"]) == (["serve"], ["run"])
    assert {"serve", "run"} <= root().commands.keys()


def test_a_pod_is_alive_while_vllm_is_and_ready_when_the_alias_is_answered() -> None:
    server, daemon = container("server"), container("daemon")
    assert server["startupProbe"]["httpGet"]["path"] == server["livenessProbe"]["httpGet"]["path"] == routes.HEALTH
    assert server["readinessProbe"]["httpGet"]["path"] == routes.READY
    assert {routes.HEALTH, routes.READY} <= routes.OPEN, "probes have no key"
    assert server["startupProbe"]["periodSeconds"] * server["startupProbe"]["failureThreshold"] >= 1800
    assert daemon["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert daemon["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_answers_in_progress_end_before_a_pod_does(config: Config) -> None:
    (_, sleep) = container("server")["lifecycle"]["preStop"]["exec"]["command"]
    arguments = config.serving.extra_args
    stream = int(arguments[arguments.index("--shutdown-timeout") + 1])
    assert SERVER["template"]["spec"]["terminationGracePeriodSeconds"] > int(sleep) + stream
    assert SERVER["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    budget = found("PodDisruptionBudget", "flywheel-server")["spec"]
    assert 1 <= budget["minAvailable"] < SERVER["replicas"]
    assert budget["selector"] == SERVER["selector"]


def test_the_daemon_sees_every_pod_and_agents_only_those_that_are_ready() -> None:
    labels = SERVER["template"]["metadata"]["labels"]
    replicas, clients = (found("Service", name)["spec"] for name in ("flywheel-replicas", "flywheel"))
    assert replicas["clusterIP"] == "None"
    assert replicas["publishNotReadyAddresses"] is True
    assert "clusterIP" not in clients
    assert not clients.get("publishNotReadyAddresses")
    for each in (replicas, clients):
        assert each["selector"].items() <= labels.items()
        assert each["ports"][0]["targetPort"] == container("server")["ports"][0]["name"]


def test_there_is_one_daemon_with_a_disk_of_its_own() -> None:
    assert DAEMON["replicas"] == 1
    (claim,) = DAEMON["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"]
    mounts = {each["name"]: each["mountPath"] for each in container("daemon")["volumeMounts"]}
    assert mounts[claim["metadata"]["name"]] == "/var/lib/flywheel"


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_has_the_images_user_and_shared_memory_and_no_more_rights(pod: str) -> None:
    spec, only = PODS[pod]["spec"], container(pod)
    dockerfile = (ROOT / "Dockerfile").read_text()
    user = spec["securityContext"]["runAsUser"]
    assert f"USER {user}" in dockerfile
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["fsGroup"] == user
    assert only["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    volumes = {each["name"]: each for each in spec["volumes"]}
    mounts = {each["mountPath"]: each["name"] for each in only["volumeMounts"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert set(mounts.values()) <= {*volumes, "state"}
    for path in ("/var/lib/flywheel", "/var/cache/flywheel"):
        assert path in mounts
        assert path in dockerfile


def test_only_the_daemon_agents_and_prometheus_reach_the_servers() -> None:
    policy = found("NetworkPolicy", "flywheel-server")["spec"]
    assert policy["podSelector"] == SERVER["selector"]
    (rule,) = policy["ingress"]
    assert {"podSelector": DAEMON["selector"]} in rule["from"]
    assert all(each.get("podSelector") or each["namespaceSelector"].get("matchLabels") for each in rule["from"])


def test_the_daemon_is_beside_the_head_of_the_ray_cluster() -> None:
    spec, head = found("RayCluster", "flywheel")["spec"], ray_pods()[0]["spec"]
    assert f"ray=={spec['rayVersion']}\n" in (ROOT / "requirements" / "gpu.txt").read_text()
    assert spec["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    ray, daemon = head["containers"]
    assert daemon["command"] == ["flywheel", "run"]
    assert daemon["envFrom"] == container("daemon")["envFrom"]
    assert head["shareProcessNamespace"] is True
    shared = {each["mountPath"] for each in ray["volumeMounts"]}
    assert shared == {"/tmp/ray", "/dev/shm"}
    assert shared <= {each["mountPath"] for each in daemon["volumeMounts"]}
    user = SERVER["template"]["spec"]["securityContext"]
    for pod in ray_pods():
        assert pod["spec"]["securityContext"] == user
        assert {each["image"] for each in pod["spec"]["containers"]} == {ray["image"]}
        volumes = {each["name"] for each in pod["spec"]["volumes"]}
        assert {mount["name"] for each in pod["spec"]["containers"] for mount in each["volumeMounts"]} == volumes
