"""deploy/kubernetes.yaml: a server that cannot start, or be reached, on a release that does not verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.invoke import invoke
from refusals import refusal
from release_files import policy_json
from tiny_releases import KEY, signed_release

from memopt.errors import KeyFileError
from memopt.manifests.policy import parse_policy

ROOT = Path(__file__).parents[2]
RELEASE_PATH = "/models/release"


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))


def find(kind: str, name: str) -> dict[str, Any]:
    (found,) = [item for item in documents() if item["kind"] == kind and item["metadata"]["name"] == name]
    return found


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    return find("Deployment", "model-server")["spec"]["template"]["spec"]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["initContainers"], *pod["containers"]]


def mount(container: dict[str, Any], volume: str) -> dict[str, Any]:
    (found,) = [item for item in container["volumeMounts"] if item["name"] == volume]
    return found


def test_the_verifier_runs_before_the_server(pod: dict[str, Any]) -> None:
    (verify,) = pod["initContainers"]
    assert verify["args"][:4] == ["verify", RELEASE_PATH, "--policy", "/etc/memopt/trust.json"]
    # Not a sidecar, which would not hold the server back, and its image runs memopt.
    assert "restartPolicy" not in verify
    assert "command" not in verify
    assert "quick" not in " ".join(verify["args"])
    assert pod.get("restartPolicy", "Always") == "Always"
    assert pod["containers"][0]["command"] == ["vllm", "serve", RELEASE_PATH]


def test_the_arguments_are_those_of_the_command(pod: dict[str, Any], tmp_path: Path) -> None:
    release = signed_release(tmp_path / "release")
    policy = tmp_path / "trust.json"
    policy.write_text(policy_json())
    places = {RELEASE_PATH: str(release), "/etc/memopt/trust.json": str(policy)}
    arguments = [places.get(argument, argument) for argument in pod["initContainers"][0]["args"]]
    assert invoke(*arguments).code == 0
    policy.write_text(policy_json(identity="another"))
    assert invoke(*arguments).code == 5


def test_the_release_is_mounted_read_only_everywhere(pod: dict[str, Any]) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["release"]["persistentVolumeClaim"]["readOnly"] is True
    for container in containers(pod):
        assert mount(container, "release") == {"name": "release", "mountPath": RELEASE_PATH, "readOnly": True}
        # No other volume lies above or below it.
        others = [item["mountPath"] for item in container["volumeMounts"] if item["name"] != "release"]
        assert not [path for path in others if path.startswith("/models")]


def test_only_scratch_space_can_be_written(pod: dict[str, Any]) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in containers(pod):
        for item in container["volumeMounts"]:
            assert item.get("readOnly") is True or "emptyDir" in volumes[item["name"]], item
    assert all("sizeLimit" in volume["emptyDir"] for volume in volumes.values() if "emptyDir" in volume)
    assert not any("hostPath" in volume for volume in volumes.values())


def test_the_policy_comes_from_a_config_map(pod: dict[str, Any]) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    (verify,) = pod["initContainers"]
    trust = mount(verify, "trust")
    assert trust["readOnly"] is True
    assert verify["args"][3] == f"{trust['mountPath']}/trust.json"
    assert not verify["args"][3].startswith(RELEASE_PATH)
    assert volumes["trust"]["configMap"]["name"] == "memopt-trust"
    assert set(find("ConfigMap", "memopt-trust")["data"]) == {"trust.json"}


def test_the_policy_is_valid_once_a_key_is_put_in_and_not_before() -> None:
    text = find("ConfigMap", "memopt-trust")["data"]["trust.json"]
    with refusal(KeyFileError):
        parse_policy(text.encode())
    table = json.loads(text)
    table["keys"][0]["pem"] = KEY.public_key.pem.decode()
    policy = parse_policy(json.dumps(table).encode())
    assert policy.identity in (policy.keys[0].identities or ())
    assert (policy.threshold, policy.allow_code) == (1, False)
    assert dict(policy.min_counters) == {policy.identity: 1}


def test_weight_format_and_kv_cache_dtype_are_two_parameters(pod: dict[str, Any]) -> None:
    server = pod["containers"][0]
    data = find("ConfigMap", "model-server-formats")["data"]
    assert set(data) == {"weight-format", "kv-cache-dtype"}
    sources = {entry["name"]: entry["valueFrom"] for entry in server["env"] if "valueFrom" in entry}
    flags = dict(zip(server["args"][::2], server["args"][1::2], strict=True))
    for flag, variable, key in (
        ("--quantization", "WEIGHT_FORMAT", "weight-format"),
        ("--kv-cache-dtype", "KV_CACHE_DTYPE", "kv-cache-dtype"),
    ):
        # Each flag has its own variable, each variable its own key, and no value names the other's.
        assert flags[flag] == f"$({variable})"
        assert sources[variable] == {"configMapKeyRef": {"name": "model-server-formats", "key": key}}
        assert "$" not in data[key]
    assert data["weight-format"] != data["kv-cache-dtype"]


def test_nothing_runs_as_root_or_can_change_its_image(pod: dict[str, Any]) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    for container in containers(pod):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["runAsNonRoot"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "privileged" not in context


def test_every_container_has_limits_and_a_fixed_image(pod: dict[str, Any]) -> None:
    for container in containers(pod):
        for kind in ("requests", "limits"):
            assert {"cpu", "memory"} <= set(container["resources"][kind])
        image = container["image"]
        assert ":" in image.rpartition("/")[2]
        assert not image.endswith(":latest")


def test_a_server_that_is_not_ready_gets_no_requests(pod: dict[str, Any]) -> None:
    server = pod["containers"][0]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"] == {"path": "/health", "port": "http"}
    service = find("Service", "model-server")
    # Without this a Service would send requests to pods whose init container still verifies.
    assert not service["spec"].get("publishNotReadyAddresses", False)
    labels = find("Deployment", "model-server")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels


def test_the_verdict_reaches_kubectl(pod: dict[str, Any]) -> None:
    (verify,) = pod["initContainers"]
    assert verify["terminationMessagePath"] == "/dev/termination-log"
    assert verify["terminationMessagePolicy"] == "File"


def test_nothing_is_fetched_at_start(pod: dict[str, Any]) -> None:
    values = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert values["HF_HUB_OFFLINE"] == "1"
    assert "trust-remote-code" not in " ".join(pod["containers"][0]["args"])
