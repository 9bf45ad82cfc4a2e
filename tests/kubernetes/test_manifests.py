"""Manifests follow the schemas of Kubernetes and Kubeflow, and fit each other and the scripts.

No cluster is asked: that a cluster accepts and runs them is not shown here.
"""

import copy
import os
import re
import shlex
import socket
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Count
from tests.kubernetes.checks import VERSIONS, Document, problems
from tests.rendering import Answers, all_answers, is_refused, multiply, render, run, silent, succeed

QUESTIONS = ("backend", "nodes")
"""What the manifests depend on."""

GRACE_S = 10
"""What Kubernetes leaves, at least, beyond what torchrun leaves to its processes."""

PORT = 29500


@dataclass(frozen=True)
class Project:
    """A rendered project and what it tells Kubernetes."""

    answers: Answers
    path: Path

    @property
    def launch(self) -> Path:
        """Where it stands."""
        return self.path / self.path.name / "launch"

    def documents(self) -> dict[str, Document]:
        """All of them, by their kind."""
        found = [
            document
            for path in sorted(self.launch.glob("*.yaml"))
            for document in yaml.safe_load_all(path.read_text())
        ]
        kinds = {document["kind"]: document for document in found}
        assert len(kinds) == len(found)
        return kinds

    def __getitem__(self, kind: str) -> Document:
        """The document of a kind."""
        return self.documents()[kind]

    @property
    def pod(self) -> Document:
        """What the Job makes pods from."""
        template: Document = self["Job"]["spec"]["template"]
        return template

    @property
    def container(self) -> Document:
        """In which the pods train."""
        (one,) = self.pod["spec"]["containers"]
        assert isinstance(one, dict)
        return one


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> list[Project]:
    """A project for each different set of manifests."""
    fixed: Answers = {"cluster": "kubernetes"}
    rows = [row | fixed for row in multiply({key: all_answers()[key] for key in QUESTIONS})]
    rows = [row for row in rows if not is_refused(row)]
    root = tmp_path_factory.mktemp("kubernetes")
    with silent():
        # The slug is no name for Kubernetes as it is, and the longest one.
        slug = "a_" * 19 + "aa"
        made = [render(row, root / str(number), slug=slug) for number, row in enumerate(rows)]
    return [Project(*pair) for pair in zip(rows, made, strict=True)]


@pytest.fixture
def jobs_of_several(projects: list[Project]) -> list[Project]:
    """Those with a pod for each machine."""
    return [project for project in projects if project.answers["nodes"] == "multi"]


@pytest.fixture
def train_jobs(projects: list[Project]) -> list[Project]:
    """Those with a TrainJob."""
    return [project for project in projects if project.answers["backend"] != "mpi"]


def value_at(document: Any, path: str) -> Any:
    """Follow keys and numbers into a document."""
    for word in path.split("."):
        document = document[int(word) if isinstance(document, list) else word]
    return document


def variables(container: Document) -> dict[str, str]:
    """What a container's environment has by value."""
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


# Schemas


@pytest.mark.parametrize("version", VERSIONS)
def test_documents_follow_the_schemas(projects: list[Project], version: str, count: Count) -> None:
    wrong = [
        f"{project.answers} {kind}: {problem}"
        for project in projects
        for kind, document in project.documents().items()
        for problem in problems(document, version)
    ]
    assert not wrong, "\n".join(wrong)
    count("manifests validated", sum(len(project.documents()) for project in projects))


def test_there_is_what_the_answers_need(projects: list[Project]) -> None:
    assert len(projects) == 5
    for project in projects:
        expected = {"Job", "PersistentVolumeClaim"}
        if project.answers["nodes"] == "multi":
            expected.add("Service")
        if project.answers["backend"] != "mpi":
            expected.add("TrainJob")
        assert set(project.documents()) == expected


_POD = "spec.template.spec"
_PATCH = "spec.runtimePatches.0.trainingRuntimeSpec.template.spec.replicatedJobs.0.template.spec"


@pytest.mark.parametrize(
    ("kind", "path", "value", "said"),
    [
        ("Job", "kind", "Jobb", "'Jobb' is none of"),
        ("Job", "apiVersion", "batch/v2", "'batch/v2' has no Job"),
        ("Job", "spec.parallelism", "two", "'two' is not of type 'integer'"),
        ("Job", "spec.completion", 2, "'completion' was unexpected"),
        ("Job", f"{_POD}.containers.0.comand", ["train.sh"], "'comand' was unexpected"),
        ("Job", f"{_POD}.containers.0.env.0.value", 2, "2 is not of type 'string'"),
        ("Job", f"{_POD}.terminationGracePeriodSeconds", "630s", "is not of type 'integer'"),
        ("Service", "apiVersion", "v2", "'v2' has no Service"),
        ("Service", "spec.ports.0.port", "rdzv", "'rdzv' is not of type 'integer'"),
        ("Service", "spec.publishNotReadyAdresses", True, "was unexpected"),
        ("PersistentVolumeClaim", "spec.accessModes", "ReadWriteMany", "is not of type 'array'"),
        ("PersistentVolumeClaim", "spec.resources.request", {}, "'request' was unexpected"),
        ("TrainJob", "kind", "TrainJobs", "'TrainJobs' is none of"),
        ("TrainJob", "apiVersion", "trainer.kubeflow.org/v2alpha1", "has no TrainJob"),
        ("TrainJob", "spec.trainer.numNodes", "two", "numNodes: Input should be a valid integer"),
        ("TrainJob", "spec.trainer.numNode", 2, "spec.trainer.numNode: 2 is read as None"),
        ("TrainJob", "spec.podTemplateOverrides", [], "spec.podTemplateOverrides: [] is read as"),
        (
            "TrainJob",
            f"{_PATCH}.template.spec.volumes.0.persistentVolumeClaim.claim",
            "runs",
            "claim: 'runs' is read as None",
        ),
        (
            "TrainJob",
            "spec.runtimeRef",
            {"kind": "ClusterTrainingRuntime"},
            "name: Input should",
        ),
    ],
)
def test_planted_error_is_found(
    jobs_of_several: list[Project], kind: str, path: str, value: object, said: str
) -> None:
    document = copy.deepcopy(jobs_of_several[0][kind])
    parent, _, key = path.rpartition(".")
    (value_at(document, parent) if parent else document)[key] = value
    for version in VERSIONS:
        found = problems(document, version)
        assert any(said in problem for problem in found), found


# What no schema says


def test_names_are_names_for_kubernetes(projects: list[Project]) -> None:
    for project in projects:
        for kind, document in project.documents().items():
            # What becomes of a name: `-0` for a pod, `-node-0-0` for one of a TrainJob.
            longest = document["metadata"]["name"] + "-node-0-0"
            assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", longest), (kind, longest)
            assert not document["metadata"]["name"].endswith("-")


def test_pods_find_each_other(jobs_of_several: list[Project]) -> None:
    assert jobs_of_several
    for project in jobs_of_several:
        service, job, pod = project["Service"], project["Job"], project.pod
        name = service["metadata"]["name"]
        assert service["spec"]["clusterIP"] == "None"  # a name for each pod
        assert service["spec"]["publishNotReadyAddresses"] is True
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert pod["spec"]["subdomain"] == name
        first = f"{job['metadata']['name']}-0.{name}"
        assert variables(project.container)["RDZV_ENDPOINT"] == f"{first}:{PORT}"
        assert [one["port"] for one in service["spec"]["ports"]] == [PORT]
        assert [one["containerPort"] for one in project.container["ports"]] == [PORT]


def test_numbers_of_pods_are_one_number(jobs_of_several: list[Project]) -> None:
    for project in jobs_of_several:
        spec, (waiting,) = project["Job"]["spec"], project.pod["spec"]["initContainers"]
        assert spec["completionMode"] == "Indexed"
        assert spec["completions"] == spec["parallelism"] > 1
        for container in (waiting, project.container):
            assert variables(container)["NNODES"] == str(spec["completions"])
        assert spec["backoffLimit"] >= spec["completions"]  # all of them fail together
        assert project["TrainJob"]["spec"]["trainer"]["numNodes"] == spec["completions"]


@pytest.mark.parametrize("known", [0, 1, 2])
def test_a_pod_waits_until_all_have_names(
    jobs_of_several: list[Project], known: int, tmp_path: Path
) -> None:
    """The commands of the manifest, with a name look-up that knows so many pods."""
    project = jobs_of_several[0]
    (waiting,) = project.pod["spec"]["initContainers"]
    name, service = project["Job"]["metadata"]["name"], project["Service"]["metadata"]["name"]
    for command, body in (
        ("getent", f'grep -qxF "$*" {tmp_path}/names'),
        ("sleep", f'echo "$@" >> {tmp_path}/slept; kill "$PPID"'),
    ):
        path = tmp_path / command
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    names = [f"hosts {name}-{number}.{service}\n" for number in range(known)]
    (tmp_path / "names").write_text("".join(names))
    environment = {**variables(waiting), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    ended = run(*waiting["command"], *waiting["args"], env=environment)
    assert (ended.returncode == 0) == (known == 2), ended.stdout
    assert (tmp_path / "slept").exists() == (known < 2)


def test_pods_have_time_to_save(projects: list[Project]) -> None:
    for project in projects:
        given = {"Job": (project.pod["spec"], variables(project.container))}
        if project.answers["backend"] != "mpi":
            train_job = project["TrainJob"]
            patch = value_at(train_job, f"{_PATCH}.template.spec")
            given["TrainJob"] = (patch, variables(train_job["spec"]["trainer"]))
            for _, environment in given.values():
                assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == 600
        for kind, (spec, environment) in given.items():
            needed = int(environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "0"))
            assert spec["terminationGracePeriodSeconds"] >= needed + GRACE_S, kind


def test_pods_are_replaced_without_being_counted_where_they_were_disrupted(
    projects: list[Project],
) -> None:
    for project in projects:
        spec = project["Job"]["spec"]
        assert spec["podFailurePolicy"]["rules"] == [
            {
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            }
        ]
        # Without these two the API refuses the policy.
        assert project.pod["spec"]["restartPolicy"] == "Never"
        assert spec["podReplacementPolicy"] == "Failed"
        assert 0 < spec["backoffLimit"] <= 6  # a mistake in the settings is not tried for ever


def _amount(quantity: str) -> float:
    """Read a quantity of Kubernetes, as a number of CPUs or bytes."""
    factors = {"m": 1e-3, "Mi": 2**20, "Gi": 2**30, "": 1}
    read = re.fullmatch(r"(\d+)(m|Mi|Gi|)", quantity)
    assert read is not None, quantity
    return int(read[1]) * factors[read[2]]


def test_processes_fit_what_a_pod_gets(projects: list[Project]) -> None:
    for project in projects:
        given = [(variables(project.container), project.container["resources"])]
        if project.answers["backend"] != "mpi":
            trainer = project["TrainJob"]["spec"]["trainer"]
            processes = {"NPROC": str(trainer["numProcPerNode"])}
            given.append((variables(trainer) | processes, trainer["resourcesPerNode"]))
        for environment, resources in given:
            limits, requests = resources["limits"], resources["requests"]
            gpus = environment["NPROC"] if project.answers["backend"] == "nccl" else None
            assert limits.get("nvidia.com/gpu") == gpus
            threads = int(environment["NPROC"]) * int(environment["OMP_NUM_THREADS"])
            assert threads <= _amount(limits["cpu"])
            assert requests.keys() == {"cpu", "memory"}
            assert all(_amount(requests[key]) <= _amount(limits[key]) for key in requests)


def test_volumes_are_there_and_mounted(projects: list[Project]) -> None:
    for project in projects:
        claim = project["PersistentVolumeClaim"]
        modes = {"single": "ReadWriteOnce", "multi": "ReadWriteMany"}
        assert claim["spec"]["accessModes"] == [modes[str(project.answers["nodes"])]]
        pods = [(project.pod["spec"], project.container)]
        if project.answers["backend"] != "mpi":
            trainer = project["TrainJob"]["spec"]["trainer"]
            patch = value_at(project["TrainJob"], f"{_PATCH}.template.spec")
            pods.append((patch, patch["containers"][0] | trainer))
        for spec, container in pods:
            volumes = {one["name"]: one for one in spec["volumes"]}
            mounted = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
            assert mounted == {"runs": "/runs", "shm": "/dev/shm"}
            assert volumes.keys() == mounted.keys()
            name = volumes["runs"]["persistentVolumeClaim"]["claimName"]
            assert name == claim["metadata"]["name"]
            memory = volumes["shm"]["emptyDir"]
            assert memory["medium"] == "Memory"
            resources = container.get("resources") or container["resourcesPerNode"]
            assert _amount(memory["sizeLimit"]) < _amount(resources["limits"]["memory"])
            words = container["args"]
            run_dir = Path(words[words.index("--run_dir") + 1])
            assert run_dir.is_relative_to(mounted["runs"])


def test_nobody_is_root(projects: list[Project]) -> None:
    for project in projects:
        specs = [project.pod["spec"]]
        if project.answers["backend"] != "mpi":
            specs.append(value_at(project["TrainJob"], f"{_PATCH}.template.spec"))
        user = re.findall(r"^USER (\d+)$", (project.launch / "Dockerfile").read_text(), re.M)
        for spec in specs:
            who = spec["securityContext"]
            assert who["runAsNonRoot"] is True
            assert [str(who["runAsUser"])] == user
            assert who["fsGroup"] == who["runAsGroup"] == who["runAsUser"]  # may write to the disk
            for container in spec["containers"] + spec.get("initContainers", []):
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


# What the pods run


def _in_project(word: str, project: Project) -> str:
    """Say where a path of the image lies in the project."""
    return word.replace("/app/", f"{project.path}/", 1) if word.startswith("/app/") else word


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_pods_run_the_script_with_settings_that_it_has(projects: list[Project]) -> None:
    """The command of the manifest in the project, up to what it would start."""
    for project in projects:
        container = project.container
        (script,) = (Path(_in_project(word, project)) for word in container["command"])
        assert os.access(script, os.X_OK)
        settings = [_in_project(word, project) for word in container["args"]]
        environment = variables(container)
        if project.answers["nodes"] == "multi":
            assert {"NNODES", "RDZV_ENDPOINT", "JOIN_TIMEOUT_S", "MAX_RESTARTS"} < set(environment)
            environment["NNODES"] = "1"  # the name of the first pod leads nowhere here
        said = succeed(script, "--dry-run", *settings, env=environment)
        *given, command = said.splitlines()
        assert f"OMP_NUM_THREADS={environment['OMP_NUM_THREADS']}" in given
        words = shlex.split(command)
        package = project.path.name
        assert words[words.index(f"{package}.train") + 1 :] == settings
        flag = "-np" if project.answers["backend"] == "mpi" else "--nproc-per-node"
        assert words[words.index(flag) + 1] == environment["NPROC"]
        for name in environment:  # each is one that a script or torch reads
            read = any(name in path.read_text() for path in project.launch.glob("*.sh"))
            assert read, name


def test_settings_of_the_manifests_are_accepted(projects: list[Project]) -> None:
    """By the program itself, which prints what is in effect."""
    project = projects[-1]
    assert project.answers["backend"] == "mpi"  # it has more of them than the others
    words = [_in_project(word, project) for word in project.container["args"]]
    program = ("python", "-m", f"{project.path.name}.train")
    said = succeed(*program, *words, "--print_config", cwd=project.path)
    effective = yaml.safe_load(said)
    assert effective["run_dir"] == f"/runs/{project.path.name}"
    assert effective["backend"] == "gloo"


def test_trainjob_trains_with_the_variables_of_the_operator(
    train_jobs: list[Project], tmp_path: Path
) -> None:
    """Its command, started as the operator would start it in the one pod of a small run."""
    chosen: Answers = {"backend": "gloo", "nodes": "single"}
    (project,) = (one for one in train_jobs if one.answers.items() >= chosen.items())
    trainer = project["TrainJob"]["spec"]["trainer"]
    injected = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(_free_port()),
    }
    settings = [_in_project(word, project) for word in trainer["args"]]
    settings[settings.index("--run_dir") + 1] = str(tmp_path / "run")
    said = succeed(
        *trainer["command"],
        *settings,
        *("--max_steps", "2", "--data.num_workers", "0"),
        cwd=project.path,
        env={**variables(trainer), **injected, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert f"world size     {trainer['numProcPerNode']} on cpu" in said
    assert '"done"' in (tmp_path / "run" / "status.json").read_text()


# The image


def test_dockerfiles_are_clean(projects: list[Project]) -> None:
    for project in projects:
        succeed("hadolint", project.launch / "Dockerfile")


def test_hadolint_finds_something(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN cd /tmp\n")
    assert "DL3006" in run("hadolint", "--no-color", tmp_path / "Dockerfile").stdout


def _instructions(project: Project) -> list[tuple[str, str]]:
    """Give the instructions of the Dockerfile, each with what follows it."""
    text = (project.launch / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_image_holds_what_pods_run(projects: list[Project]) -> None:
    for project in projects:
        steps = _instructions(project)
        copied = [word for name, rest in steps if name == "COPY" for word in rest.split()[:-1]]
        assert copied == ["pyproject.toml", "README.md", f"{project.path.name}/"]
        assert all((project.path / word).exists() for word in copied)
        # What is copied is not left out of what Docker is given.
        ignored = (project.path / ".dockerignore").read_text().splitlines()
        assert [line for line in ignored if line.startswith("!")] == [
            "!" + word.rstrip("/") for word in copied
        ]
        ((_, entry),) = [step for step in steps if step[0] == "ENTRYPOINT"]
        assert yaml.safe_load(entry) == project.container["command"]  # a list: the exec form
        assert dict(steps)["WORKDIR"] == "/app"


def test_image_has_the_torch_that_the_project_asks_for(projects: list[Project]) -> None:
    for project in projects:
        steps = _instructions(project)
        arguments = dict(rest.split("=", 1) for name, rest in steps if name == "ARG")
        wanted = tomllib.loads((project.path / "pyproject.toml").read_text())["project"]
        (least,) = (
            word.removeprefix("torch>=") for word in wanted["dependencies"] if "torch>" in word
        )
        newer = [int(part) for part in arguments["TORCH_VERSION"].split(".")]
        assert newer >= [int(part) for part in least.split(".")]
        is_cpu = arguments["TORCH_INDEX"].endswith("/cpu")
        assert is_cpu == (project.answers["backend"] != "nccl")


def test_images_of_all_documents_are_the_one_that_is_built(projects: list[Project]) -> None:
    for project in projects:
        text = (project.launch / "Dockerfile").read_text()
        (tag,) = re.findall(r"--tag (\S+)", text)
        spec = project.pod["spec"]
        images = [one["image"] for one in spec["containers"] + spec.get("initContainers", [])]
        if project.answers["backend"] != "mpi":
            images.append(project["TrainJob"]["spec"]["trainer"]["image"])
        assert set(images) == {tag}
        assert f"--file {project.path.name}/launch/Dockerfile " in text
