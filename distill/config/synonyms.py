"""What other libraries call a setting: an unknown name is refused with the one that it has here."""

from collections.abc import Iterable

from distill.runtime.errors import did_you_mean

# By the last part of its name: what to give in its place.
SYNONYMS = {
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_epsilon": "optimizer.eps",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "max_grad_norm": "optimizer.clip",
    "grad_clip": "optimizer.clip",
    "gradient_clip_val": "optimizer.clip",
    "optim": "optimizer=adamw or optimizer=lamb",
    "lr_scheduler": "schedule=linear, or another option of schedule",
    "lr_scheduler_type": "schedule=linear, or another option of schedule",
    "scheduler": "schedule=linear, or another option of schedule",
    "warmup_ratio": "schedule.warmup",
    "warmup_steps": "schedule.warmup_steps",
    "num_warmup_steps": "schedule.warmup_steps",
    "epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "max_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "steps": "train.steps",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "max_train_steps": "train.steps",
    "batch_size": "train.batch_size",
    "train_batch_size": "train.batch_size",
    "per_device_train_batch_size": "train.batch_size",
    "micro_batch_size": "train.batch_size",
    "global_batch_size": "train.sequences_per_step",
    "accumulate": "train.accumulate",
    "gradient_accumulation_steps": "train.accumulate",
    "gradient_checkpointing": "student.gradient_checkpointing",
    "activation_checkpointing": "student.gradient_checkpointing",
    "accumulate_grad_batches": "train.accumulate",
    "logging_steps": "train.log_every",
    "save_steps": "train.save_every",
    "save_total_limit": "train.keep",
    "eval_steps": "evaluate.every_steps",
    "max_length": "corpus.sequence_length",
    "max_seq_length": "corpus.sequence_length",
    "max_seq_len": "corpus.sequence_length",
    "seq_length": "corpus.sequence_length",
    "seq_len": "corpus.sequence_length",
    "block_size": "corpus.sequence_length",
    "max_train_samples": "corpus.max_sequences",
    "train_file": "corpus.path",
    "dataset": "corpus.path",
    "data_path": "corpus.path",
    "dataset_name": "corpus=hub corpus.hub",
    "preprocessing_num_workers": "data.workers",
    "dataloader_num_workers": "train.workers",
    "num_workers": "train.workers",
    "mlm_probability": "objective.masking.mlm_probability",
    "mask_probability": "objective.masking.mlm_probability",
    "whole_word_mask": "objective.masking.whole_words",
    "alpha": "objective.soft.weight",
    "alpha_ce": "objective.soft.weight",
    "alpha_mlm": "objective.mlm.weight",
    "alpha_clm": "objective.clm.weight",
    "alpha_cos": "objective.cosine.weight",
    "temperature": "objective.temperature",
    "model_name_or_path": "student.path or teacher.path",
    "student_name_or_path": "student.path",
    "teacher_name_or_path": "teacher.path",
    "teacher_model": "teacher.path",
    "num_hidden_layers": "student.config.num_hidden_layers",
    "hidden_size": "student.config.hidden_size",
    "fp16": "precision=fp16",
    "bf16": "precision=bf16",
    "mixed_precision": "precision=bf16, or another option of precision",
    "torch_dtype": "precision=bf16, or another option of precision",
    "torch_compile": "precision.compile",
    "nproc_per_node": "backend.processes",
    "world_size": "backend.processes",
    "no_cuda": "backend.device=cpu",
    "report_to": "tracker=wandb or tracker=tensorboard",
    "output_dir": "hydra.run.dir",
    "resume_from_checkpoint": "resume",
    "random_seed": "seed",
    "early_stopping": "train.patience with train.keep_best",
    "early_stopping_patience": "train.patience with train.keep_best",
    "load_best_model_at_end": "train.keep_best",
    "kl": "objective.soft",
    "kld": "objective.soft",
    "kl_div": "objective.soft",
    "kd": "objective.soft",
    "forward_kl": "objective.soft",
    "distillation": "objective.soft",
    "logits": "objective.soft or objective.logit_mse",
    "ce": "objective.clm, objective.mlm or objective.classes",
    "cross_entropy": "objective.clm, objective.mlm or objective.classes",
    "lm": "objective.clm or objective.mlm",
    "sft": "objective.clm",
    "cos": "objective.cosine",
    "hidden": "objective.hidden_mse",
    "mse": "objective.logit_mse or objective.hidden_mse",
    "attention": "objective.attention_scores or objective.relations",
}
# What people look for that is not there yet, and what serves until then.
LEFT_OUT = {
    **dict.fromkeys(
        ("lmbda", "seq_kd", "gkd", "on_policy", "max_new_tokens"),
        "there is no distillation on texts that the student writes yet: let the teacher write them by distill predict, "
        "or take objective.jsd on the texts that there are",
    ),
    **dict.fromkeys(
        ("lora", "peft", "peft_config", "lora_r", "lora_alpha", "use_peft"),
        "there is no setting for adapters: give a function that puts them into a model as student._target_",
    ),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization", "quantization_config", "bnb_config"),
        "models are read in full precision: give precision=bf16, or a GGUF file as teacher.path",
    ),
}
PAGE = "docs/explanation/left-out.md"


def suggestion(setting: str, options: Iterable[str], before: str = "") -> str:
    """As `did_you_mean`, for a setting: what it is called here where another library has that name, else the nearest.

    Args:
        options: the names of its group; `before` is put in front of each.
    """
    name = setting.rpartition(".")[2].strip("+~-").lower().replace("-", "_")
    if (reason := LEFT_OUT.get(name)) is not None:
        return f" ({reason}; {PAGE} says why)"
    if (here := SYNONYMS.get(name)) is not None and here != setting:
        return f" (did you mean {here}?)"
    return did_you_mean(setting.rpartition(".")[2], options, before)
