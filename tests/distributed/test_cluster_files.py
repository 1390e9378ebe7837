"""The cluster files: their syntax, the settings they give, and that Distill finds the ranks they start."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from distributed import free_port
from job import ROOT, composed, environment

from distill.config.settings import Config, OnUsr1
from distill.distributed.cluster.__main__ import FOLDER, main
from distill.distributed.launch import should_launch
from distill.distributed.rendezvous import meeting_point
from distill.runs.check import check
from distill.runtime.rank import RankInfo, rank_from_env

MANIFESTS = ("mpijob.yml", "pytorchjob.yml")
OVERRIDE = re.compile(r"\+?[a-z_]+(\.[a-z0-9_]+)*=.+")
PLACEHOLDERS = {"IMAGE", "CLAIM"}
# What sbatch gives its script.
JOB = {"SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "gpu[07-08]", "USER": "somebody"}


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


def containers(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The one container of each replica type."""
    specs = job["spec"].get("mpiReplicaSpecs") or job["spec"]["pytorchReplicaSpecs"]
    return {name: spec["template"]["spec"]["containers"][0] for name, spec in specs.items()}


def stub(folder: Path, name: str) -> dict[str, str]:
    """An environment in which the command `name` prints its arguments, one on a line."""
    folder.mkdir()
    (folder / name).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def slurm(tmp_path: Path, *more: str, **variables: str) -> list[str]:
    """What the script hands to srun, after the shell has put in its variables."""
    given = {**JOB, **variables}
    command = ["bash", str(FOLDER / "slurm.sh"), *more]
    done = subprocess.run(
        command, env=stub(tmp_path / "bin", "srun") | given, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def mpirun(tmp_path: Path) -> list[str]:
    """What the launcher of the MPIJob hands to mpirun, with a host file as the operator writes it."""
    hosts = tmp_path / "hostfile"
    hosts.write_text("".join(f"distill-worker-{n}.distill.default.svc slots=2\n" for n in range(4)))
    launcher = containers(manifest("mpijob.yml"))["Launcher"]
    script = launcher["args"][0].replace("/etc/mpi/hostfile", str(hosts))
    command = [*launcher["command"], script]
    return subprocess.run(
        command, env=stub(tmp_path / "bin", "mpirun"), capture_output=True, text=True, check=True
    ).stdout.splitlines()


def settings(arguments: list[str]) -> Config:
    """What follows `-m distill`, through Hydra and the checks."""
    overrides = arguments[arguments.index("distill") + 1 :]
    assert arguments[arguments.index("distill") - 1] == "-m" and all(OVERRIDE.fullmatch(each) for each in overrides)
    folders = [each.partition("=")[2] for each in overrides if each.startswith("hydra.")]
    assert folders in ([], ["/shared/runs/distilbert_paper"])
    given = [each for each in overrides if not each.startswith("hydra.")]
    check(composed(*(re.sub(r"=/.*", f"={ROOT}", each) for each in given)))  # as if the folders were here
    return composed(*given)


# --- Slurm


def test_slurm_script_is_a_shell_script() -> None:
    subprocess.run(["bash", "-n", str(FOLDER / "slurm.sh")], check=True)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, str(FOLDER / "slurm.sh")], check=True)
    lines = (FOLDER / "slurm.sh").read_text().splitlines()
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in options) and len(options) > 5
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(lines.index(option) < first_command for option in options), "Slurm reads them up to the first command"


def test_slurm_gives_settings_that_compose(tmp_path: Path) -> None:
    arguments = slurm(tmp_path, "seed=1", "train.epochs=1", BOOKS="/data/my books", TMPDIR="/scratch")
    assert "--kill-on-bad-exit=1" in arguments and "--cpus-per-task=8" in arguments
    config = settings(arguments)
    assert (config.backend.name, config.backend.threads, config.precision.student) == ("ddp", 8, "auto")
    assert config.teacher.path == "google-bert/bert-base-uncased"
    assert config.corpus.path == "/data/my books" and config.data.local == "/scratch/distill-somebody"
    assert (config.seed, config.train.epochs) == (1, 1)
    # Slurm warns by the signal that these settings answer with a checkpoint and the end of the run.
    assert config.train.on_usr1 is OnUsr1.stop
    assert "#SBATCH --signal=USR1@180" in (FOLDER / "slurm.sh").read_text().splitlines()


def test_slurm_takes_backend_and_recipe_from_the_environment(tmp_path: Path) -> None:
    config = settings(slurm(tmp_path, BACKEND="horovod", PRECISION="fp16", RECIPE="distilbert_gutenberg"))
    assert (config.backend.name, config.teacher.path) == ("horovod", "bundled_deep")
    assert config.precision.student == "fp16"


def starts(tmp_path: Path, *statuses: int, **variables: str) -> list[bool]:
    """Whether the script puts its job back in each of its starts, by the status that srun ends with."""
    environment = stub(tmp_path / "bin", "scontrol") | JOB | variables
    found = []
    for number, status in enumerate(statuses):
        (tmp_path / "bin" / "srun").write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / "bin" / "srun").chmod(0o755)
        given = environment | ({"SLURM_RESTART_COUNT": str(number)} if number else {})
        done = subprocess.run(
            ["bash", str(FOLDER / "slurm.sh")], env=given, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == status and not done.stderr
        again = f"status {status} in start {number + 1} of job 4711: back into the queue\nrequeue\n4711\n"
        assert done.stdout in ("", again)
        found.append(bool(done.stdout))
    return found


@pytest.mark.parametrize(
    ("statuses", "back"),
    [
        ([138, 138, 0], [True, True, False]),
        ([1], [False]),
        ([2], [False]),
        ([3], [False]),
        ([74], [False]),
        ([4, 134, 143, 137], [True, True, True, False]),  # not more often than RESTARTS in a row
        ([4, 4, 138, 4, 4, 4, 4], [True] * 6 + [False]),
        ([4, 4, 4, 0, 4], [True, True, True, False, True]),
    ],
)
def test_slurm_puts_the_job_back_while_it_can_go_on(statuses: list[int], back: list[bool], tmp_path: Path) -> None:
    assert starts(tmp_path, *statuses, RESTARTS="3") == back


def test_slurm_ranks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes with two tasks each, as srun sets its variables; nothing is started anew, all meet at one point."""
    points = set()
    for rank in range(4):
        given = {
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_ID": "0",
            "SLURM_NTASKS": "4",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            "SLURM_STEP_NODELIST": "gpu[07-08]",
            "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(rank // 2),
            "SLURM_LOCALID": str(rank % 2),
        }
        info = rank_from_env(given)
        assert info == RankInfo("Slurm", rank, 4, rank % 2, 2)
        points.add(meeting_point(info, given))
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        assert not should_launch(composed("backend=ddp", "backend.processes=4").backend)
    assert {host for host, _ in points} == {"gpu07"} and len(points) == 1


# --- Kubernetes


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_have_what_every_pod_needs(name: str) -> None:
    job = manifest(name)
    assert re.fullmatch(r"[a-z][a-z0-9-]*", job["metadata"]["name"])
    specs = job["spec"].get("mpiReplicaSpecs") or job["spec"]["pytorchReplicaSpecs"]
    for spec in specs.values():
        assert spec["replicas"] > 0 and spec["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        pod = spec["template"]["spec"]
        # The user of the Dockerfile, and what the Pod Security Standard "restricted" asks for.
        assert pod["securityContext"]["runAsUser"] == 10001 and pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert container["securityContext"] == rights
            assert container["name"] and container["image"] == "IMAGE" and container["command"]
            assert all(isinstance(word, str) for word in [*container["command"], *container["args"]])
            assert all(isinstance(limit, str) for limit in container["resources"]["limits"].values())
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounted == {volume["name"] for volume in pod.get("volumes", [])}
    head = (FOLDER / name).read_text().partition("apiVersion")[0]
    used = set(re.findall(r"\b(?:image|claimName): (\S+?)[},]*$", (FOLDER / name).read_text(), re.M))
    assert used == PLACEHOLDERS and all(re.search(rf"^#   {word} ", head, re.M) for word in used)
    assert f"kubectl apply -f {name}" in head


def test_mpijob_is_one() -> None:
    job = manifest("mpijob.yml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    known = {"slotsPerWorker", "sshAuthMountPath", "launcherCreationPolicy", "runPolicy", "mpiReplicaSpecs"}
    assert job["spec"].keys() <= known and job["spec"]["runPolicy"].keys() <= {"cleanPodPolicy", "backoffLimit"}
    assert job["spec"]["mpiReplicaSpecs"].keys() == {"Launcher", "Worker"}
    assert job["spec"]["mpiReplicaSpecs"]["Launcher"]["replicas"] == 1
    keys = job["spec"]["sshAuthMountPath"]
    assert f"{keys}/id_rsa" in containers(job)["Worker"]["command"]


def test_mpijob_gives_settings_that_compose_and_a_meeting_point(tmp_path: Path) -> None:
    arguments = mpirun(tmp_path)
    config = settings(arguments)
    job, worker = manifest("mpijob.yml")["spec"], containers(manifest("mpijob.yml"))["Worker"]
    cores = int(worker["resources"]["limits"]["cpu"])
    assert config.backend.name == "horovod" and config.data.local == "/local"
    assert cores == job["slotsPerWorker"] * (config.backend.threads or 0) == config.data.workers
    exported = dict(arguments[at + 1].split("=", 1) for at, word in enumerate(arguments) if word == "-x")
    of_rank = {
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        **exported,
    }
    info = rank_from_env(of_rank)
    assert info == RankInfo("Open MPI", 5, 8, 1, 2)
    assert meeting_point(info, of_rank) == ("distill-worker-0.distill.default.svc", 23456)


def test_pytorchjob_is_one() -> None:
    job = manifest("pytorchjob.yml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    assert spec.keys() <= {"runPolicy", "elasticPolicy", "pytorchReplicaSpecs", "nprocPerNode"}
    assert spec["pytorchReplicaSpecs"].keys() == {"Worker"}, "with an elastic policy there is no master"
    replicas = spec["pytorchReplicaSpecs"]["Worker"]["replicas"]
    assert spec["elasticPolicy"]["minReplicas"] <= spec["elasticPolicy"]["maxReplicas"] == replicas
    assert containers(job)["Worker"]["name"] == "pytorch", "the operator looks for this name"


def test_pytorchjob_gives_settings_that_compose() -> None:
    worker = containers(manifest("pytorchjob.yml"))["Worker"]
    config = settings([*worker["command"], *worker["args"]])
    (ranks,) = (int(word.partition("=")[2]) for word in worker["command"] if word.startswith("--nproc-per-node="))
    cores = int(worker["resources"]["limits"]["cpu"])
    assert config.backend.name == "ddp" and config.data.local == "/local"
    full = ranks * manifest("pytorchjob.yml")["spec"]["elasticPolicy"]["maxReplicas"]
    assert config.train.sequences(full) == 12800 and config.train.accumulate is None
    assert cores == ranks * (config.backend.threads or 0) == config.data.workers
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == str(ranks)


@pytest.mark.slow
def test_torchrun_starts_the_ranks_of_a_pytorchjob(tmp_path: Path) -> None:
    """torchrun itself, with the variables that the operator gives a pod and the manifest's own options."""
    (tmp_path / "print_rank.py").write_text(
        "from distill.runtime.rank import rank_from_env\n"
        "from distill.distributed.rendezvous import meeting_point\n"
        "info = rank_from_env()\nprint(info, meeting_point(info))\n"
    )
    pod = {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"localhost:{free_port()}",
        "PET_NNODES": "1:1",
        "PET_MAX_RESTARTS": "3",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
    }
    options = containers(manifest("pytorchjob.yml"))["Worker"]["command"][1:-1]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "print_rank"]
    done = subprocess.run(command, env={**environment(), **pod}, capture_output=True, text=True, timeout=500)
    for rank in range(8):
        info = f"RankInfo(launcher='torchrun', rank={rank}, size=8, local_rank={rank}, local_size=8)"
        assert info in done.stdout, done.stdout + done.stderr


# --- Docker

INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "USER", "WORKDIR"}


def instructions() -> list[tuple[str, str]]:
    lines = [line for line in (FOLDER / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def test_dockerfile_holds_known_instructions_on_files_that_exist() -> None:
    found = instructions()
    assert {word for word, _ in found} <= INSTRUCTIONS
    assert found[0] == ("ARG", "BASE=debian:bookworm-slim") and found[1] == ("FROM", "${BASE}")
    for word, rest in found:
        if word == "COPY":
            *sources, target = rest.split()
            assert all((ROOT / source).exists() for source in sources) and target
        if word == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)
    users = [rest for word, rest in found if word == "USER"]
    assert users == ["10001"] and found[-1][0] == "CMD"


def test_dockerfile_installs_by_the_projects_own_commands_and_horovod_before_mpi() -> None:
    """Debian's openmpi-bin brings an mpicxx without headers, which Horovod's build would try to use."""
    runs = [rest for word, rest in instructions() if word == "RUN"]
    horovod = next(at for at, run in enumerate(runs) if "python -m distill.distributed.install_horovod" in run)
    mpi = next(at for at, run in enumerate(runs) if "openmpi-bin" in run)
    assert horovod < mpi
    copied = [source for word, rest in instructions() if word == "COPY" for source in rest.split()[:-1]]
    # What the wheel is made of.
    assert {"pyproject.toml", "README.md", "LICENSE", "NOTICE", "distill", "conf", "recipes"} <= set(copied)


# --- The command


def test_the_command_prints_every_file_and_lists_them(capsys: pytest.CaptureFixture) -> None:
    files = {path.name for path in FOLDER.iterdir() if path.suffix != ".py" and path.is_file()}
    printed = set()
    assert main([]) == 2
    names = [line.split()[0] for line in capsys.readouterr().err.splitlines()[1:]]
    for name in names:
        assert main([name]) == 0
        text = capsys.readouterr().out
        printed |= {file for file in files if (FOLDER / file).read_text() == text}
    assert printed == files
    assert main(["lsf"]) == 2 and "slurm" in capsys.readouterr().err
