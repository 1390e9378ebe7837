"""The steps that `peers.py` compares Distill's with, in an environment that has TRL and need not have Distill.

All three run in the loop of TRL's GKDTrainer, that of transformers, with AdamW, clipping and a constant learning rate:

* `trl`: GKDTrainer with beta=0, the forward divergence from full logits, and no sequences of the student's own;
* `trl-chunked`: the loss of TRL's DistillationTrainer, which makes logits in tiles and makes them again in the backward
  pass. That trainer learns from sequences that the student generates, so its loss is called here on given ones;
* `distillkit`: DistillKit's `kl` on dense logits of a teacher that runs beside the student, written anew for this
  comparison after arcee-ai/DistillKit at a61c2e7 (`kl.py`, `trainer.py` and `signals.py` in `distillkit/`), which is on
  no package index and wants another TRL: both softmaxes in fp32, the divergence summed over the vocabulary, its mean
  over all positions. The student gets labels, so that transformers computes its cross-entropy too, which is not used.
"""

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn.functional import kl_div, log_softmax
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss

from benchmarks.step.turns import SEQUENCES, STUDENT, TEACHER, Job, Over, Turns

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class InOrder(GKDTrainer):
    """TRL's trainer on sequences in their order."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class Chunked(InOrder):
    """With the loss that makes no full logits."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        student, seen = (
            self.accelerator.unwrap_model(model),
            {name: inputs[name] for name in ("input_ids", "attention_mask")},
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=self.args.bf16):
            student_hidden = student.base_model(**seen, use_cache=False).last_hidden_state[:, :-1]
            with torch.no_grad():
                teacher_hidden = self.teacher_model.base_model(**seen, use_cache=False).last_hidden_state[:, :-1]
            heads = [each.get_output_embeddings().weight for each in (student, self.teacher_model)]
            counted = inputs["labels"][:, 1:] != -100
            loss, _, _ = _chunked_divergence_loss(
                student_hidden, teacher_hidden, *heads, counted, beta=0.0, num_items_in_batch=num_items_in_batch
            )
        return (loss, None) if return_outputs else loss


class DistillKit(InOrder):
    """With DistillKit's loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        seen = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        output = model(**seen, labels=inputs["input_ids"])
        with torch.no_grad():
            teacher_logits = self.teacher_model(**seen).logits
        log_q, log_p = log_softmax(output.logits.float(), -1), log_softmax(teacher_logits.float(), -1)
        divergences = kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)  # [B, S]
        loss = divergences.sum() / divergences.numel()
        return (loss, output) if return_outputs else loss


LOSSES = {"trl": InOrder, "trl-chunked": Chunked, "distillkit": DistillKit}


class AfterStep(TrainerCallback):
    """Lets a process take its turn after each step."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.turns.after_step()


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Sequences without padding, [B, S]; the first token of each is nobody's target."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    labels = ids.clone()
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def settings(job: Job, steps: int, folder: str) -> GKDConfig:
    """Those of Distill's step; what is turned off here would only cost time or memory."""
    return GKDConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=job.format == "bf16",
        beta=0.0,
        lmbda=0.0,
        temperature=1.0,
        max_steps=steps,
        per_device_train_batch_size=job.batch_size,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=job.clip,
        gradient_checkpointing=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )


def model_of(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def train(job: Job, turns: Turns) -> Any:
    """Train until `turns` ends it; the student."""
    torch.set_num_threads(job.threads)
    disable_progress_bar()
    rows = np.load(job.folder / SEQUENCES)
    student = model_of(job.folder / STUDENT, torch.float32)
    teacher = model_of(job.folder / TEACHER, FORMATS[job.format])
    with TemporaryDirectory() as folder:
        trainer = LOSSES[job.loss](
            model=student,
            teacher_model=teacher,
            args=settings(job, len(rows) // job.batch_size, folder),
            data_collator=collate,
            train_dataset=Dataset.from_dict({"input_ids": rows.tolist()}),
            processing_class=AutoTokenizer.from_pretrained(job.folder / TEACHER),
            callbacks=[AfterStep(turns)],
        )
        if job.loss == "distillkit":  # whose teacher computes in the format of its weights, without autocast
            trainer.teacher_model = teacher = model_of(job.folder / TEACHER, FORMATS[job.format]).eval()
        with suppress(Over):
            trainer.train()
    return student
