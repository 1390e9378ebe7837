"""Whole runs for `gpu_parts.py`: the main job beside the CPU's, every way to run five steps, and what follows a run."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import version_of
from benchmarks.gpu_parts import QUICK, Part

EXACT = ("precision.deterministic=true",)
ONE, SAME = "again", "deterministic, again"  # the same commands as `single` and `deterministic`
# Settings of a quick run, by what it is for; `single` is in precision=auto.
WAYS: dict[str, tuple[str, ...]] = {
    "single": (),
    ONE: (),
    "ddp, one rank": ("backend=ddp", "backend.processes=1"),
    "fsdp, one rank": ("backend=fsdp", "backend.processes=1"),
    "fp16 with loss scaling": ("precision=fp16",),
    "fp32": ("precision=fp32",),
    "fp32 without TF32": ("precision=fp32", "precision.tf32=false"),
    "deterministic": EXACT,
    SAME: EXACT,
    "compiled": ("precision.compile=true",),
    "gradient checkpointing": ("student.gradient_checkpointing=true",),
    "profile": ("profile=on",),
    "cached teacher": ("objective.masking.static=true", "objective.cosine.weight=0", "teacher.cache.top_k=16"),
}
GPU_WAYS = {
    "fsdp, teacher offloaded": ("backend=fsdp", "backend.processes=1", "backend.offload_teacher=true"),
    "flex_attention": ("precision=bf16", "precision.attention=flex_attention"),
    "flash_attention_2": ("precision=bf16", "precision.evaluate=bf16", "precision.attention=flash_attention_2"),
    "teacher in int8": ("precision=bf16", "precision.quantize_teacher=int8"),
    "teacher in fp8": ("precision=bf16", "precision.quantize_teacher=fp8"),
}
NEEDS = {"flash_attention_2": "flash_attn", "teacher in int8": "torchao", "teacher in fp8": "torchao"}
FEWER = ("single", "fsdp, one rank")  # of a rehearsal
MAIN = "the main job"


class Runs:
    """Each run is a process of its own; quick ones run side by side, as they show what works and not how fast."""

    def __init__(self, part: Part) -> None:
        self.part, self.folder = part, part.scratch / "runs"
        self.folder.mkdir()
        self.device = f"backend.device={part.device.type}"
        self.side_by_side = min(6, max(1, len(os.sched_getaffinity(0)) // 2))

    def all(self) -> None:
        part = self.part
        main_job = ("+recipe=distilbert_gutenberg", *part.sizes.run)
        ways = WAYS | GPU_WAYS if part.on_gpu else {name: WAYS[name] for name in FEWER}
        scores = self.way(MAIN, (*main_job, self.device)).get("scores") if part.on_gpu else None
        self.quick("single", ways.pop("single"))  # the others find its sequences
        with ThreadPoolExecutor(1) as beside, ThreadPoolExecutor(self.side_by_side) as pool:
            on_cpu = beside.submit(self.start, f"{MAIN} on the CPU", (*main_job, "backend.device=cpu"), nice=10)
            killed = pool.submit(self.killed_and_resumed)
            list(pool.map(self.quick, ways, ways.values()))
            if ONE in ways:
                self.compare("same command twice", "single", ONE)
                self.compare("same command twice, deterministic", "deterministic", SAME)
            texts = ("text=It was a dark and stormy [MASK].", f"device={part.device.type}")
            after = {"predict": ("predict", f"model={self.path('single')}", *texts)}
            score = (f"model={self.path('single')}", f"output={self.folder / 'scores'}", "evaluate.max_sequences=8")
            after["evaluate"] = ("evaluate", *score, self.device)
            for name, arguments in after.items():
                self.way(name, arguments, folder=None)
            killed.result()
            self.beside_the_cpu(scores, on_cpu.result())

    def quick(self, name: str, settings: tuple[str, ...]) -> None:
        if (package := NEEDS.get(name)) is not None and version_of(package) is None:
            self.part.row(name, error=f"{package} is not installed")
            return
        self.way(name, (*QUICK, self.device, *settings))

    def path(self, name: str) -> Path:
        return self.folder / name.replace(" ", "-").replace(",", "")

    def start(self, name: str, arguments: tuple[str, ...], folder: Path | None = None, nice: int = 0) -> dict[str, Any]:
        """Run `distill ARGUMENTS` to its end; its status, time and last lines, and what its record has."""
        folder = folder or self.path(name)
        command = [sys.executable, "-m", "distill", *arguments]
        if arguments[0].startswith("+"):
            command.append(f"hydra.run.dir={folder}")
        began = time.monotonic()
        try:
            done = subprocess.run(
                ["nice", f"-n{nice}", *command], cwd=self.folder, capture_output=True, text=True,
                timeout=max(1.0, self.part.until - time.monotonic()),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"status": "took too long", "took": time.monotonic() - began}
        print(f"## {name}\n{done.stdout}\n{done.stderr}", flush=True)
        values: dict[str, Any] = {"status": done.returncode, "took": time.monotonic() - began}
        if done.returncode:
            values["tail"] = done.stderr[-800:]
        elif (record := folder / "results.json").exists():
            values |= self.read(json.loads(record.read_text()))
        else:
            values["printed"] = done.stdout[-300:]
        return values

    @staticmethod
    def read(record: dict[str, Any]) -> dict[str, Any]:
        """What a row has of a run's record."""
        training, kind = record["training"], record["precision"]["student"]
        names = [name for name in ("perplexity", "pseudo_perplexity") if name in record["student"]]
        return {
            "device": record["environment"]["device"],
            "precision": kind,
            "loss": training["final_loss"]["total"],
            "tokens_per_second": training["tokens_per_second"],
            "scores": {name: {who: record[who][name] for who in ("teacher", "student")} for name in names},
            "profile": (record.get("profile") or {}).get("bottleneck"),
        }

    def way(self, name: str, arguments: tuple[str, ...], folder: Path | None = None) -> dict[str, Any]:
        """A run and its row."""
        values = self.start(name, arguments, folder)
        self.part.row(name, **{key: value for key, value in values.items() if value is not None})
        return values

    def killed_and_resumed(self) -> None:
        """A run that is killed after its first checkpoint and resumed, against the same one in one go."""
        steps, every = self.part.sizes.killed_run
        # Threads are chosen by what runs beside, and another number of them has other bits.
        settings = (
            *QUICK,
            *EXACT,
            f"train.steps={steps}",
            f"train.save_every={every}",
            "backend.threads=1",
            self.device,
        )
        folder = self.path("killed")
        command = [sys.executable, "-m", "distill", *settings, f"hydra.run.dir={folder}"]
        process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not list(folder.glob("checkpoints/step-*")):
            time.sleep(0.01)
        process.kill()
        status = process.wait()
        saved = sorted(path.name for path in folder.glob("checkpoints/step-*"))
        self.part.row("killed", status=status, checkpoints=saved)
        self.way("resumed", settings, folder)
        self.way("not killed", settings)
        self.compare("resumed and not killed", "killed", "not killed")

    def compare(self, what: str, one: str, other: str) -> None:
        """A row on the weights of two students."""
        from safetensors.torch import load_file

        paths = [self.path(name) / "student" / "model.safetensors" for name in (one, other)]
        if not all(path.exists() for path in paths):
            self.part.row(what, error="one of the students is not there")
            return
        first, second = map(load_file, paths)
        largest = max(float((first[name] - second[name]).abs().max()) for name in first)
        self.part.row(what, same_bits=paths[0].read_bytes() == paths[1].read_bytes(), largest_difference=largest)

    def beside_the_cpu(self, scores: Any, on_cpu: dict[str, Any]) -> None:
        """The main job's scores on both devices; the CPU's time is not one, as other runs were beside it."""
        values = {key: on_cpu.get(key) for key in ("status", "tail", "precision")}
        self.part.row(f"{MAIN} beside the CPU's", here=scores, cpu=on_cpu.get("scores"), **values)
