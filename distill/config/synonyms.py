"""What other libraries call a setting: an unknown name is refused with the one that it has here."""

from collections.abc import Iterable

from distill.runtime.errors import did_you_mean

# What to give in place of names that a setting, a loss or an option has elsewhere.
HERE = {
    "optimizer.lr": "learning_rate lr",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.betas": "adam_beta1 adam_beta2",
    "optimizer.clip": "max_grad_norm grad_clip gradient_clip_val",
    "schedule=linear, or another option of schedule": "lr_scheduler lr_scheduler_type scheduler",
    "schedule.warmup": "warmup_ratio",
    "schedule.warmup_steps": "warmup_steps num_warmup_steps",
    "train.epochs": "epochs num_epochs max_epochs num_train_epochs",
    "train.steps": "steps num_steps max_steps",
    "train.batch_size": "batch_size train_batch_size per_device_train_batch_size micro_batch_size",
    "train.sequences_per_step": "global_batch_size",
    "train.accumulate": "gradient_accumulation_steps accumulate_grad_batches",
    "train.save_every": "save_steps",
    "train.async_checkpoints": "async_mode async_save",
    "train.patience with train.keep_best": "early_stopping early_stopping_patience",
    "train.keep_best": "load_best_model_at_end",
    "train.workers": "num_workers dataloader_num_workers",
    "evaluate.every_steps": "eval_steps",
    "corpus.sequence_length": "max_length max_seq_length seq_length seq_len block_size",
    "corpus.path": "train_file data_path dataset",
    "corpus=hub corpus.hub": "dataset_name",
    "objective.masking.mlm_probability": "mlm_probability",
    "objective.temperature": "temperature",
    "objective=gkd objective.on_policy.fraction": "lmbda gkd on_policy",
    "objective.on_policy.max_new_tokens": "max_new_tokens max_completion_length",
    "objective.soft.weight": "alpha alpha_ce",
    "objective.soft": "kl kld kl_div kd distillation",
    "objective.clm, objective.mlm or objective.classes": "ce cross_entropy",
    "objective.hidden_mse": "hidden",
    "student.path or teacher.path": "model_name_or_path",
    "teacher.path": "teacher_model teacher_name_or_path",
    "student.config.num_hidden_layers": "num_hidden_layers",
    "student.config.hidden_size": "hidden_size",
    "student.gradient_checkpointing": "gradient_checkpointing",
    "precision=bf16, or another option of precision": "bf16 fp16 mixed_precision torch_dtype",
    "precision.compile": "torch_compile",
    "precision.attention": "attn_implementation",
    "precision.tf32": "allow_tf32",
    "precision.deterministic": "full_determinism use_deterministic_algorithms",
    "backend.processes": "world_size nproc_per_node",
    "tracker=wandb or tracker=tensorboard": "report_to",
    "hydra.run.dir": "output_dir",
    "resume": "resume_from_checkpoint",
}
# What there is not yet, and what serves until then.
LEFT_OUT = {
    "the teacher does not write while the student trains: let it write a corpus before, by distill generate": "seq_kd",
    "there is no setting for adapters: give a function that puts them into a model as student._target_": (
        "lora peft peft_config lora_r lora_alpha use_peft"
    ),
    "a model is quantized after it is read: set precision.quantize_teacher=int8 (teachers alone)": (
        "load_in_4bit load_in_8bit quantization quantization_config"
    ),
}
PAGE = "docs/explanation/left-out.md"


def suggestion(setting: str, options: Iterable[str], before: str = "") -> str:
    """As `did_you_mean`, for a setting: what it is called here where another library has that name, else the nearest.

    Args:
        options: the names of its group; `before` is put in front of each.
    """
    name = setting.rpartition(".")[2].strip("+~-").lower().replace("-", "_")
    for reason, names in LEFT_OUT.items():
        if name in names.split():
            return f" ({reason}; {PAGE} says why)"
    for here, names in HERE.items():
        if name in names.split() and here != setting:
            return f" (did you mean {here}?)"
    return did_you_mean(setting.rpartition(".")[2], options, before)
