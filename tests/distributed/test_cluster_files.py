"""The cluster files: their syntax, the settings they give, and that Distill finds the ranks they start."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from job import ROOT, composed

from distill.config.settings import Config, OnUsr1
from distill.distributed.cluster.__main__ import FOLDER, main
from distill.distributed.rendezvous import meeting_point
from distill.runs.check import check
from distill.runtime.rank import RankInfo, rank_from_env

# What sbatch gives its script.
JOB = {"SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "gpu[07-08]", "USER": "somebody"}


def stub(folder: Path, name: str, body: str = 'printf "%s\\n" "$@"') -> dict[str, str]:
    """An environment in which the command `name` prints its arguments, one on a line, or does something else."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def settings(arguments: list[str]) -> Config:
    """What follows `-m distill`, through Hydra and the checks."""
    at = arguments.index("distill")
    given = [each for each in arguments[at + 1 :] if not each.startswith("hydra.run.dir=/shared/runs/")]
    assert arguments[at - 1] == "-m"
    check(composed(*(re.sub(r"=/.*", f"={ROOT}", each) for each in given)))  # as if the folders were here
    return composed(*given)


# --- Slurm


def slurm(tmp_path: Path, *more: str, **variables: str) -> list[str]:
    """What the script hands to srun, after the shell has put in its variables."""
    command, given = ["bash", str(FOLDER / "slurm.sh"), *more], {**JOB, **variables}
    environment = stub(tmp_path / "bin", "srun") | given
    return subprocess.check_output(command, env=environment, cwd=tmp_path, text=True).splitlines()


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
    head, _, _ = (FOLDER / "slurm.sh").read_text().partition("\nset -")
    assert "#SBATCH --signal=USR1@180" in head, "Slurm reads them up to the first command"
    config = settings(slurm(tmp_path, BACKEND="horovod", PRECISION="fp16", RECIPE="distilbert_gutenberg"))
    assert (config.backend.name, config.precision.student) == ("horovod", "fp16")
    assert config.teacher.path == "bundled_deep"


@pytest.mark.parametrize(
    ("statuses", "back"),  # of the starts of a job: how srun ends, and whether the script puts the job back
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
    stub(tmp_path / "bin", "scontrol")
    for number, (status, again) in enumerate(zip(statuses, back, strict=True)):
        environment = stub(tmp_path / "bin", "srun", f"exit {status}") | JOB | {"RESTARTS": "3"}
        environment |= {"SLURM_RESTART_COUNT": str(number)} if number else {}
        command = ["bash", str(FOLDER / "slurm.sh")]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == status and not done.stderr
        line = f"status {status} in start {number + 1} of job 4711: back into the queue\nrequeue\n4711\n"
        assert done.stdout == (line if again else "")


# --- Kubernetes


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


def pods(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The pod of each replica type."""
    specs = job["spec"].get("mpiReplicaSpecs") or job["spec"]["pytorchReplicaSpecs"]
    return {name: spec["template"]["spec"] for name, spec in specs.items()}


@pytest.mark.parametrize(
    ("name", "kind", "replicas"),
    [("mpijob.yml", "MPIJob", {"Launcher", "Worker"}), ("pytorchjob.yml", "PyTorchJob", {"Worker"})],
)
def test_manifests_have_what_every_pod_needs(name: str, kind: str, replicas: set[str]) -> None:
    job, text = manifest(name), (FOLDER / name).read_text()
    assert job["kind"] == kind and job["apiVersion"].startswith("kubeflow.org/") and pods(job).keys() == replicas
    for pod in pods(job).values():
        # The user of the Dockerfile, and what the Pod Security Standard "restricted" asks for.
        assert pod["securityContext"]["runAsUser"] == 10001 and pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["securityContext"] == rights and container["image"] == "IMAGE"
        assert all(isinstance(word, str) for word in [*container["command"], *container["args"]])
    placeholders = set(re.findall(r"\b(?:image|claimName): (\S+?)[},]*$", text, re.M))
    assert placeholders == {"IMAGE", "CLAIM"} and all(f"#   {word} " in text for word in placeholders)


def test_mpijob_gives_settings_that_compose_and_a_meeting_point(tmp_path: Path) -> None:
    """What the launcher hands to mpirun, with a host file as the operator writes it."""
    hosts, job = tmp_path / "hostfile", manifest("mpijob.yml")
    hosts.write_text("".join(f"distill-worker-{n}.distill.default.svc slots=2\n" for n in range(4)))
    launcher, worker = (pods(job)[name]["containers"][0] for name in ("Launcher", "Worker"))
    assert f"{job['spec']['sshAuthMountPath']}/id_rsa" in worker["command"]
    command = [*launcher["command"], launcher["args"][0].replace("/etc/mpi/hostfile", str(hosts))]
    arguments = subprocess.check_output(command, env=stub(tmp_path / "bin", "mpirun"), text=True).splitlines()
    config, cores = settings(arguments), int(worker["resources"]["limits"]["cpu"])
    assert config.backend.name == "horovod" and config.data.local == "/local"
    assert cores == job["spec"]["slotsPerWorker"] * (config.backend.threads or 0) == config.data.workers
    of_rank = dict(arguments[at + 1].split("=", 1) for at, word in enumerate(arguments) if word == "-x")
    numbers = {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    of_rank |= {f"OMPI_COMM_WORLD_{name}": number for name, number in numbers.items()}
    info = rank_from_env(of_rank)
    assert info == RankInfo("Open MPI", 5, 8, 1, 2)
    assert meeting_point(info, of_rank) == ("distill-worker-0.distill.default.svc", 23456)


def test_pytorchjob_gives_settings_that_compose() -> None:
    spec, (worker,) = manifest("pytorchjob.yml")["spec"], pods(manifest("pytorchjob.yml"))["Worker"]["containers"]
    config = settings([*worker["command"], *worker["args"]])
    (ranks,) = (int(word.partition("=")[2]) for word in worker["command"] if word.startswith("--nproc-per-node="))
    replicas = spec["pytorchReplicaSpecs"]["Worker"]["replicas"]
    assert spec["elasticPolicy"]["minReplicas"] <= spec["elasticPolicy"]["maxReplicas"] == replicas
    assert config.backend.name == "ddp" and config.data.local == "/local"
    assert config.train.sequences(ranks * replicas) == 12800 and config.train.accumulate is None
    limits = worker["resources"]["limits"]
    assert int(limits["cpu"]) == ranks * (config.backend.threads or 0) == config.data.workers
    assert limits["nvidia.com/gpu"] == str(ranks) and worker["name"] == "pytorch", "the operator looks for this name"


# --- Docker, and the command that prints the files


def test_dockerfile_installs_by_the_projects_own_commands_and_horovod_before_mpi() -> None:
    """Debian's openmpi-bin brings an mpicxx without headers, which Horovod's build would try to use."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.M))
    found = [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]
    runs = [rest for word, rest in found if word == "RUN"]
    for run in runs:
        subprocess.run(["sh", "-n", "-c", run], check=True)
    horovod = next(at for at, run in enumerate(runs) if "python -m distill.distributed.install_horovod" in run)
    assert horovod < next(at for at, run in enumerate(runs) if "openmpi-bin" in run)
    copied = [source for word, rest in found if word == "COPY" for source in rest.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    # What the wheel is made of.
    assert {"pyproject.toml", "README.md", "LICENSE", "NOTICE", "distill", "conf", "recipes"} <= set(copied)
    assert [rest for word, rest in found if word == "USER"] == ["10001"] and found[-1][0] == "CMD"


def test_the_command_prints_every_file_and_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    files = {path.read_text() for path in FOLDER.iterdir() if path.suffix != ".py" and path.is_file()}
    assert main([]) == 2
    names = [line.split()[0] for line in capsys.readouterr().err.splitlines()[1:]]
    printed = [(main([name]), capsys.readouterr().out) for name in names]
    assert {status for status, _ in printed} == {0} and {text for _, text in printed} == files
    assert main(["lsf"]) == 2 and "slurm" in capsys.readouterr().err
