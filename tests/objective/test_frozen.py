"""Frozen means frozen: training reads a live teacher, through all kinds of losses, and changes nothing in it."""

from pathlib import Path
from typing import Any

from tiny import Fit, make_model, make_rows, objective_config
from torch import nn

from distill.models.language_model import LanguageModel

TERMS: dict[str, dict[str, Any]] = {
    "hidden_mse": {"weight": 1.0},
    "hidden_cosine": {"weight": 1.0},
    "attention_scores": {"weight": 1.0},
    "relations": {"weight": 1.0, "relation_heads": 4},
    "pooled": {"weight": 1.0},
    "pooled_cosine": {"kind": "pooled", "weight": 1.0, "pooling": "cls", "distance": "cosine"},
    "patient": {"weight": 1.0},
}


def content(model: nn.Module) -> dict[str, bytes]:
    """Every tensor of a model, buffers included, byte by byte."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: each.detach().numpy().tobytes() for name, each in tensors.items()}


def train(folder: Path, tokenizer: Any, teacher: Any, student: Any, **more: Any) -> Fit:
    settings = objective_config(cosine=float("patient" in more), **more)
    fit = Fit(folder, tokenizer, make_rows(20, shortest=5), teacher, student, settings)
    fit.run()
    return fit


def test_training_leaves_the_teacher_as_it_was(tokenizer: Any, tmp_path: Path) -> None:
    teacher = make_model("bert", 4, dropout=0.3).requires_grad_(False)
    before, attributes = content(teacher), dict(vars(teacher.config))
    equal = make_model("bert", 2, seed=5, dropout=0.1).train()
    narrow = make_model("bert", 2, seed=5, hidden_size=20, dropout=0.1).train()
    projecting = {name: given for name, given in TERMS.items() if name != "patient"}
    for number, (student, terms) in enumerate(((equal, TERMS), (narrow, projecting))):
        old = content(student)
        fit = train(tmp_path / str(number), tokenizer, teacher, student, **terms)
        assert fit.logs[-1]["step"] == 6 and fit.logs[-1]["skipped"] == 0
        assert all(fit.logs[-1][f"loss/{name}"] > 0 for name in terms)
        assert content(student) != old, "a training that changes nothing shows nothing"
        for name, module in fit.terms.modules().items():
            assert all(p.grad is not None and bool(p.grad.any()) for p in module.parameters()), name
        assert (len(fit.terms.modules()) > 0) == (student is narrow)
    assert content(teacher) == before and content(LanguageModel(teacher)) != {}
    assert dict(vars(teacher.config)) == attributes
    assert not any(module.training for module in teacher.modules())
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in teacher.modules())
