"""The steps that `beside_peers.py` compares Distill's with, in an environment that has TRL and need not have Distill.

Both run in the loop of TRL's GKDTrainer, that of transformers, with AdamW, clipping and a constant learning rate:

* `trl`: GKDTrainer with beta=0, the forward divergence from full logits, and no sequences of the student's own, or,
  on-policy, with lmbda=1, completions alone;
* `distillkit`: DistillKit's `kl` on dense logits of a teacher that runs beside the student, written anew for this
  comparison after arcee-ai/DistillKit at a61c2e7 (`kl.py`, `trainer.py` and `signals.py` in `distillkit/`), which is on
  no package index and wants another TRL: both softmaxes in fp32, the divergence summed over the vocabulary, its mean
  over all positions. The student gets labels, so that transformers computes its cross-entropy too, which is not used.
"""

from collections.abc import Callable
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

from benchmarks.step.turns import SEQUENCES, STUDENT, TEACHER, Over, PeerJob, Turns

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class InOrder(GKDTrainer):
    """TRL's trainer on sequences in their order."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class DistillKit(InOrder):
    """With DistillKit's loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        seen = seen_of(inputs)
        output = model(**seen, labels=inputs["input_ids"])
        with torch.no_grad():
            teacher_logits = self.teacher_model(**seen).logits
        log_q, log_p = log_softmax(output.logits.float(), -1), log_softmax(teacher_logits.float(), -1)
        divergences = kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)  # [B, S]
        loss = divergences.sum() / divergences.numel()
        return (loss, output) if return_outputs else loss


def seen_of(inputs: Any) -> dict[str, torch.Tensor]:
    """What a model reads of a batch."""
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


LOSSES = {"trl": InOrder, "distillkit": DistillKit}


class AfterStep(TrainerCallback):
    """Calls something after each step."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.call()


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Sequences without padding, [B, S]; the first token of each is nobody's target, and the first half a prompt."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    labels = ids.clone()
    labels[:, 0] = -100
    prompts = ids[:, : ids.shape[1] // 2].clone()
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return batch | {"prompts": prompts, "prompt_attention_mask": torch.ones_like(prompts)}


def trainer_of(
    kind: type[GKDTrainer], pair: tuple[Any, Any], rows: Any, tokenizer: Any, call: Callable[[], None], **settings: Any
) -> GKDTrainer:
    """A trainer of teacher and student on sequences [N, S]; what is turned off would only cost time or memory.

    Args:
        call: what is called after each step.
        settings: those that differ, output_dir and per_device_train_batch_size among them.
    """
    teacher, student = pair
    fixed = {"beta": 0.0, "lmbda": 0.0, "temperature": 1.0, "lr_scheduler_type": "constant", "weight_decay": 0.0}
    fixed |= {"gradient_checkpointing": False, "report_to": "none", "logging_strategy": "no", "save_strategy": "no"}
    fixed |= {"disable_tqdm": True, "max_steps": len(rows) // settings["per_device_train_batch_size"]}
    return kind(
        model=student,
        teacher_model=teacher,
        args=GKDConfig(**fixed | settings),
        data_collator=collate,
        train_dataset=Dataset.from_dict({"input_ids": rows.tolist()}),
        processing_class=tokenizer,
        callbacks=[AfterStep(call)],
    )


def model_of(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def train(job: PeerJob, turns: Turns) -> Any:
    """Train until `turns` ends it; the student."""
    torch.set_num_threads(job.threads)
    disable_progress_bar()
    pair = model_of(job.folder / TEACHER, FORMATS[job.format]), model_of(job.folder / STUDENT, torch.float32)
    rows, tokenizer = np.load(job.folder / SEQUENCES), AutoTokenizer.from_pretrained(job.folder / TEACHER)
    settings = {"use_cpu": True, "bf16": job.format == "bf16", "learning_rate": job.lr, "max_grad_norm": job.clip}
    settings |= {"lmbda": 1.0, "max_new_tokens": job.new_tokens} if job.new_tokens else {}
    with TemporaryDirectory() as folder:
        settings |= {"output_dir": folder, "per_device_train_batch_size": job.batch_size}
        trainer = trainer_of(LOSSES[job.loss], pair, rows, tokenizer, turns.after_step, **settings)
        if job.loss == "distillkit":  # whose teacher computes in the format of its weights, without autocast
            trainer.teacher_model = model_of(job.folder / TEACHER, FORMATS[job.format]).eval()
        with suppress(Over):
            trainer.train()
    return pair[1]
