"""Files for Docker Compose and Kubernetes are what their schemas and one another say; nothing here runs them."""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import kubernetes_validate
import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner
from kubernetes_validate.utils import ValidationError
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.utilities.templating import apply_values, find_placeholders

from tests.docs_blocks import ROOT
from zeus_flows.orchestration.pools import PoolChange, open_variables, plan_pool
from zeus_flows.settings import read_settings

COMPOSE_FILE = ROOT / "deployments/stack/compose.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
NAMESPACE, DAEMON_SET = yaml.safe_load_all((ROOT / "deployments/kubernetes/zeusd.yaml").read_text(encoding="utf-8"))
TEMPLATES: dict[str, dict[str, Any]] = {
    pod: json.loads((ROOT / f"deployments/kubernetes/{file}.json").read_text(encoding="utf-8"))
    for pod, file in (("training", "work-pool"), ("janitor", "janitor-pool"))
}
JOBS: dict[str, dict[str, Any]] = {
    pod: template["job_configuration"]["job_manifest"] for pod, template in TEMPLATES.items()
}
PODS: dict[str, dict[str, Any]] = {
    "daemon": DAEMON_SET["spec"]["template"]["spec"],
    **{pod: job["spec"]["template"]["spec"] for pod, job in JOBS.items()},
}


def pinned(package: str) -> str:
    """Return the version of a package that this release was tested with."""
    found = re.search(rf"^{package}==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def container(pod: str) -> dict[str, Any]:
    (only,) = PODS[pod]["containers"]
    return cast("dict[str, Any]", only)


def texts(value: object) -> Iterator[str]:
    """Yield every text in a document, its keys too."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from (*texts(key), *texts(item))
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
    elif isinstance(value, str):
        yield value


# -- Compose -------------------------------------------------------------------------------------------------------


def test_the_compose_file_is_as_the_compose_specification_wants_it() -> None:
    checked = CliRunner().invoke(check_jsonschema, ["--builtin-schema", "vendor.compose-spec", str(COMPOSE_FILE)])
    assert checked.exit_code == 0, checked.output


def test_the_specification_is_really_asked(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(COMPOSE_FILE.read_text(encoding="utf-8").replace("healthcheck:", "healthchek:"), encoding="utf-8")
    assert CliRunner().invoke(check_jsonschema, ["--builtin-schema", "vendor.compose-spec", str(wrong)]).exit_code == 1


def test_images_are_of_the_versions_that_were_tested() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    prefect = f"prefecthq/prefect:{pinned('prefect')}-python3.12"
    assert {name: service["image"] for name, service in SERVICES.items()} == {
        "postgres": "postgres:16.14",
        "mlflow": f"ghcr.io/mlflow/mlflow:v{pinned('mlflow')}-full",
        "prefect": prefect,
        "pool": prefect,
        "worker": f"zeus-flows-worker:{version}",
    }
    recipe = SERVICES["worker"]["build"]["dockerfile_inline"]
    assert f"FROM {prefect}\n" in recipe
    assert f"prefect=={pinned('prefect')} mlflow=={pinned('mlflow')}" in recipe
    assert container("training")["image"] == SERVICES["worker"]["image"]


def test_what_the_workers_image_is_made_of_is_there() -> None:
    build = SERVICES["worker"]["build"]
    copied = re.findall(r"^COPY (.+) \S+$", build["dockerfile_inline"], re.MULTILINE)
    context = COMPOSE_FILE.parent / build["context"]
    assert copied
    assert [path for line in copied for path in line.split() if not (context / path).exists()] == []
    assert (
        COMPOSE_FILE.parent / COMPOSE["configs"]["pool"]["file"]
    ).resolve() == ROOT / "deployments/pools/process.json"


def test_services_volumes_and_configs_that_are_named_exist() -> None:
    for name, service in SERVICES.items():
        assert set(service.get("depends_on", {})) <= set(SERVICES), name
        assert {config["source"] for config in service.get("configs", [])} <= set(COMPOSE["configs"]), name
        for volume in service.get("volumes", []):
            source = re.sub(r"\$\{.*?\}", "$", volume).split(":")[0]
            assert source == "$" or source in COMPOSE["volumes"], f"{name}: {volume}"


def test_addresses_name_a_service_and_the_port_it_listens_on() -> None:
    ports = {"postgres": "5432", "mlflow": "5000", "prefect": "4200"}
    for name in ("mlflow", "prefect"):
        command = SERVICES[name]["command"]
        assert command[command.index("--port") + 1] == ports[name]
        assert SERVICES[name]["ports"] == [f"127.0.0.1:{ports[name]}:{ports[name]}"]
        assert f"127.0.0.1:{ports[name]}/" in SERVICES[name]["healthcheck"]["test"][-1]
    addresses = [
        found
        for service in SERVICES.values()
        for value in service.get("environment", {}).values()
        for found in re.findall(r"://(?:\w+@)?([a-z]+):(\d+)", value)
    ]
    assert set(addresses) == set(ports.items())
    assert SERVICES["prefect"]["environment"]["PREFECT_SERVER_DATABASE_HOST"] == "postgres"
    assert SERVICES["prefect"]["environment"]["PREFECT_SERVER_DATABASE_PORT"] == ports["postgres"]
    assert "mlflow:5000" in SERVICES["mlflow"]["environment"]["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")


def test_databases_that_are_used_are_made() -> None:
    made = {SERVICES["postgres"]["environment"]["POSTGRES_DB"]}
    made |= set(re.findall(r"create database (\w+);", COMPOSE["configs"]["second-database"]["content"]))
    used = SERVICES["mlflow"]["environment"]["MLFLOW_BACKEND_STORE_URI"].rpartition("/")[2]
    assert made == {used, SERVICES["prefect"]["environment"]["PREFECT_SERVER_DATABASE_NAME"]}


def test_secrets_come_from_the_environment_and_have_no_default() -> None:
    secrets = [
        (name, key, value)
        for name, service in SERVICES.items()
        for key, value in service.get("environment", {}).items()
        if re.search("PASSWORD|AUTH_STRING|TOKEN|SECRET", key)
    ]
    assert len(secrets) == 6
    for name, key, value in secrets:
        assert re.fullmatch(r"\$\{(POSTGRES_PASSWORD|PREFECT_AUTH_STRING):\?[^}]+\}", value), f"{name}: {key}"
    assert not [text for text in texts(COMPOSE) if re.search(r"://\w*:[^/@]+@", text)]


def test_whoever_waits_for_a_service_waits_for_one_that_tells_its_health() -> None:
    for name, service in SERVICES.items():
        for other, wait in service.get("depends_on", {}).items():
            ends = SERVICES[other]["restart"] == "no"
            assert wait["condition"] == ("service_completed_successfully" if ends else "service_healthy"), name
            assert ends or "healthcheck" in SERVICES[other], other


def test_the_worker_takes_no_other_pool_and_its_state_outlives_it() -> None:
    worker, pool = SERVICES["worker"], SERVICES["pool"]["command"]
    assert worker["command"][worker["command"].index("--pool") + 1] == pool[pool.index("create") + 1]
    assert "--no-create-pool-if-not-found" in worker["command"]
    assert pool[pool.index("--base-job-template") + 1] == SERVICES["pool"]["configs"][0]["target"]
    state = read_settings(worker["environment"]).state_dir
    assert f"state:{state}" in worker["volumes"]
    assert "privileged" not in worker
    assert "cap_add" not in worker


def test_what_is_commented_out_for_gpus_is_valid_once_it_is_not(tmp_path: Path) -> None:
    text = re.sub(r"^(\s+)# ((?:deploy:|  +|- /run).*)$", r"\1\2", COMPOSE_FILE.read_text(encoding="utf-8"), flags=re.M)
    worker = yaml.safe_load(text)["services"]["worker"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert "/run/zeusd:/run/zeusd:ro" in worker["volumes"]
    whole = tmp_path / "compose.yaml"
    whole.write_text(text, encoding="utf-8")
    checked = CliRunner().invoke(check_jsonschema, ["--builtin-schema", "vendor.compose-spec", str(whole)])
    assert checked.exit_code == 0, checked.output


# -- Kubernetes ----------------------------------------------------------------------------------------------------


#: The oldest that people still run, one between, and the newest whose schemas there are.
KUBERNETES = ("1.29", "1.33", "1.37")


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_are_as_the_schemas_of_kubernetes_want_them(version: str) -> None:
    for manifest in (NAMESPACE, DAEMON_SET):
        kubernetes_validate.validate(manifest, version, strict=True)
    for job in JOBS.values():
        with pytest.raises(ValidationError, match="'completions', 'parallelism' were unexpected"):
            kubernetes_validate.validate(job, version, strict=True)
        seen = copy.deepcopy(job)  # as the API server takes it, without what Prefect wants in the wrong place
        for name in ("completions", "parallelism"):
            del seen["spec"]["template"]["spec"][name]
        kubernetes_validate.validate(seen, version, strict=True)


def test_the_schemas_are_really_asked() -> None:
    wrong = copy.deepcopy(DAEMON_SET)
    wrong["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(ValidationError, match="'volumeMount' was unexpected"):
        kubernetes_validate.validate(wrong, KUBERNETES[-1], strict=True)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_prefect_takes_the_template_and_deploy_finds_nothing_open_in_its_pool(template: dict[str, Any]) -> None:
    made = WorkPoolCreate(name="kubernetes", type="kubernetes", base_job_template=template)
    assert open_variables(made.base_job_template) == ()
    client = cast(SyncPrefectClient, SimpleNamespace(read_work_pool=lambda name: made))
    for lock in (False, True):
        found = plan_pool(client, "kubernetes", lock=lock)
        assert found == PoolChange("kubernetes", "unchanged", type="kubernetes")
    assert found.worker_command == "prefect worker start --pool kubernetes"  # the cluster counts its GPUs


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_caller_of_a_run_can_replace_nothing_in_the_template(template: dict[str, Any]) -> None:
    assert template["variables"] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert [text for text in texts(template) if find_placeholders(text) or "{{" in text] == []
    # Prefect would merge a caller's into it.
    assert "env" not in template["job_configuration"]
    given = dict.fromkeys(("command", "image", "env", "namespace", "job_manifest", "labels", "name"), "theirs")
    assert apply_values(template["job_configuration"], given) == template["job_configuration"]


@pytest.mark.parametrize("pod", JOBS)
def test_the_job_is_one_that_prefects_worker_accepts(pod: str) -> None:
    job = JOBS[pod]
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert job["metadata"]["namespace"] == TEMPLATES[pod]["job_configuration"]["namespace"]
    assert job["metadata"] | {"labels": {}, "annotations": {}} == job["metadata"]
    # Fields of a Job that Prefect wants in the pod, where the API server drops them.
    assert PODS[pod]["parallelism"] == PODS[pod]["completions"] == 1
    assert PODS[pod]["restartPolicy"] == "Never"
    assert container(pod)["name"] == "prefect-job"
    # Prefect's worker states the command; a second attempt is the policy's to decide, not the cluster's.
    assert not {"command", "args"} & set(container(pod))
    assert job["spec"]["backoffLimit"] == 0


def test_the_janitor_asks_for_no_gpu_and_has_neither_secrets_nor_folders_of_the_node() -> None:
    assert "nvidia.com/gpu" not in str(JOBS["janitor"])
    assert not {"envFrom", "env", "volumeMounts"} & set(container("janitor"))
    assert container("janitor")["image"] == container("training")["image"]
    assert container("janitor")["securityContext"] == container("training")["securityContext"]
    assert not {"volumes", "hostPID", "hostNetwork", "hostIPC"} & set(PODS["janitor"])


def test_a_training_pod_has_a_gpu_and_no_capability() -> None:
    resources = container("training")["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "1"
    assert container("training")["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert not {"hostPID", "hostNetwork", "hostIPC", "initContainers"} & set(PODS["training"])
    assert PODS["training"]["automountServiceAccountToken"] is False


def test_the_daemon_may_set_limits_and_nothing_else() -> None:
    assert container("daemon")["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_ADMIN"]}
    assert not {"hostPID", "hostNetwork", "hostIPC"} & set(PODS["daemon"])
    assert "--enable=gpu-control,gpu-read" in container("daemon")["args"]
    assert "nvidia.com/gpu" not in str(container("daemon")["resources"])  # it takes no GPU from a job
    assert "ports" not in container("daemon")


def test_the_daemon_set_selects_its_own_pods_in_its_own_namespace() -> None:
    assert (NAMESPACE["apiVersion"], NAMESPACE["kind"]) == ("v1", "Namespace")
    assert (DAEMON_SET["apiVersion"], DAEMON_SET["kind"]) == ("apps/v1", "DaemonSet")
    assert DAEMON_SET["metadata"]["namespace"] == NAMESPACE["metadata"]["name"]
    labels = DAEMON_SET["spec"]["template"]["metadata"]["labels"]
    assert DAEMON_SET["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("pod", PODS)
def test_volumes_that_are_mounted_exist_and_those_that_exist_are_mounted(pod: str) -> None:
    mounts = container(pod).get("volumeMounts", [])
    assert sorted(mount["name"] for mount in mounts) == sorted(v["name"] for v in PODS[pod].get("volumes", []))
    assert len({mount["mountPath"] for mount in mounts}) == len(mounts)


@pytest.mark.parametrize("pod", PODS)
def test_images_are_pinned(pod: str) -> None:
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+", container(pod)["image"])


def place_on_the_node(pod: str, path: str) -> str:
    """Return the node's folder that a pod sees at a path."""
    (name,) = [mount["name"] for mount in container(pod)["volumeMounts"] if mount["mountPath"] == path]
    (volume,) = [volume for volume in PODS[pod]["volumes"] if volume["name"] == name]
    return str(volume["hostPath"]["path"])


def test_a_training_pod_finds_the_daemons_socket_and_keeps_its_state_on_the_node() -> None:
    settings = read_settings({item["name"]: item["value"] for item in container("training")["env"]})
    assert f"--socket-path={settings.zeusd_socket}" in container("daemon")["args"]
    folder = str(settings.zeusd_socket.parent)
    assert place_on_the_node("training", folder) == place_on_the_node("daemon", folder)
    assert place_on_the_node("training", str(settings.state_dir)) == "/var/lib/zeus-flows"
