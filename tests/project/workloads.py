"""A run and a machine with round numbers, for tests that do their sums by hand."""

from typing import Any

from distill.project.exchange import Link
from distill.project.machines import Machine, MachineCases
from distill.project.model_shape import ModelShape
from distill.project.workload import Frozen, Workload


def shape(name: str = "student", layers: int = 4, **changed: Any) -> ModelShape:
    """1 M parameters, 0.8 M of them in blocks; a forward of a row takes 1 Gop, a position of the head 1 Mop."""
    known = {
        "name": name, "parameters": 1_000_000, "in_blocks": 800_000, "largest_block": 200_000, "blocks": layers,
        "layers": layers, "width": 100, "inner": 400, "heads": 2, "vocabulary": 1000, "encoder_operations": 1e9,
        "head_operations": 1e6,
    }  # fmt: skip
    return ModelShape(**{**known, **changed})  # type: ignore[arg-type]


TEACHER = Frozen(shape("teacher"), "bf16", 1, None)


def workload(**changed: Any) -> Workload:
    """4 micro-batches of 10 rows of 100 positions, 20 of which reach the head, under a live teacher: 100 steps."""
    known = {
        "teachers": (TEACHER,), "teacher_head": True, "student": shape(), "precision": "bf16", "length": 100,
        "positions": 20.0, "batch_size": 10, "accumulate": 4, "rows_per_step": None, "epochs": None, "steps": 100,
        "minutes": None, "corpus_rows": None, "row_bytes": 200.0, "backend": "ddp", "sync": "window",
        "compression": "none", "rings": 1, "shard_student": False, "shard_teacher": False, "overlaps": True,
        "optimizer_streams": 8, "save_every": 50, "save_bytes": 12e6, "score_epochs": False, "score_every": None,
        "score_rows": 0, "score_copies": 0.0, "score_assumed": False,
    }  # fmt: skip
    return Workload(**{**known, **changed})  # type: ignore[arg-type]


def machine(**changed: Any) -> Machine:
    """Nodes of 4 GPUs of 1 Tflop/s reached and 10 GB, with links of 10 and 1 GB/s, at 2 an hour."""
    known = {
        "name": "round", "title": "4 x GPU", "gpus": 4, "memory": 10e9, "reached": {"fp32": 1e11, "bf16": 1e12},
        "memory_rate": 1e12, "call": 0.0, "inside": Link(10e9, 0.0), "between": Link(1e9, 0.0), "overlap": 0.0,
        "trees": True, "storage": 1e9, "shared": None, "save": 1e9, "jitter": 0.0, "start": 36.0, "price": 2.0,
    }  # fmt: skip
    return Machine(**{**known, **changed})  # type: ignore[arg-type]


def same_cases(one: Machine) -> MachineCases:
    """A machine of which all is known."""
    return MachineCases(one, one, one, (), "")
