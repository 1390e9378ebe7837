"""The models that are to be scored, in groups of one vocabulary, and how they are loaded one after the other."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from distill.config.settings import Config
from distill.distributed import Ranks
from distill.evaluation.readers import MeanModel
from distill.models.check import check_packing, check_vocabulary, check_vocabulary_size, max_positions, set_padding
from distill.models.kind import ModelKind
from distill.models.load import load_pretrained, load_tokenizer, saved_config, size
from distill.models.loaded import SETTING
from distill.runs.located import Located
from distill.runtime.errors import SettingError
from distill.teacher.members import load_members, title_of

TEACHER = "the teacher"  # the name of its column

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """Models of one vocabulary: they are scored at the same positions, and their perplexities can be compared."""

    tokenizer: PreTrainedTokenizerBase
    models: tuple[Located, ...]
    teacher: Any | None = None  # where it has this vocabulary
    teacher_name: str = ""


def groups_of(config: Config, kind: ModelKind, models: Sequence[Located], ranks: Ranks) -> list[Group]:
    """The models by their vocabularies; the teacher, where there is one, belongs to the group with its own."""
    groups: list[Group] = []
    for model in models:
        tokenizer = load_tokenizer(SETTING, model.path, kind)
        size_by_config = getattr(saved_config(SETTING, model.path), "vocab_size", None)
        if isinstance(size_by_config, int):  # before any text is prepared
            check_vocabulary_size(size_by_config, f"{SETTING}={model.name}", tokenizer)
        number = _same_vocabulary(groups, tokenizer)
        if number is None:
            groups.append(Group(tokenizer, (model,)))
        else:
            groups[number] = replace(groups[number], models=(*groups[number].models, model))
    if config.teacher.is_none:
        return groups
    members, shared = load_members(config, kind, ranks.device)
    assert shared is not None
    for member in members:  # as a run does
        check_vocabulary(member.model, f"{member.setting} ({member.title})", shared)
        set_padding(member.model, shared)
        _check_rows(config, kind, member.model, member.setting)
    frozen = [member.model.to(ranks.device) for member in members]
    teacher = frozen[0] if len(frozen) == 1 else MeanModel(frozen, [member.weight for member in members])
    number = _same_vocabulary(groups, shared)
    if number is None:
        return [*groups, Group(shared, (), teacher, title_of(members))]
    groups[number] = replace(groups[number], teacher=teacher, teacher_name=title_of(members))
    return groups


def _same_vocabulary(groups: Sequence[Group], tokenizer: PreTrainedTokenizerBase) -> int | None:
    vocabulary = tokenizer.get_vocab()
    return next((n for n, group in enumerate(groups) if group.tokenizer.get_vocab() == vocabulary), None)


def _check_rows(config: Config, kind: ModelKind, model: Any, setting: str) -> None:
    """Refuse a model that is too short for the rows, or mixes up documents that share one.

    Raises:
        SettingError: so it is; it names `setting`.
    """
    length = config.corpus.sequence_length
    if (limit := max_positions(model)) is not None and length > limit:
        raise SettingError(f"corpus.sequence_length={length} exceeds the {limit} positions of {setting}: lower it")
    if kind.causal and config.corpus.cross_documents:
        check_packing(model, setting)


def load_models(config: Config, kind: ModelKind, group: Group, ranks: Ranks) -> Iterator[tuple[str, Any]]:
    """Name and model, the teacher first.

    Raises:
        SettingError: one does not load, does not know all tokens of its tokenizer, takes no rows of this length, or
            does not keep the documents of a row apart.
    """
    if group.teacher is not None:
        yield TEACHER, group.teacher
    for located in group.models:
        model = load_pretrained(SETTING, located.path, kind).requires_grad_(False).eval()
        check_vocabulary(model, f"{SETTING}={located.name}", group.tokenizer)
        set_padding(model, group.tokenizer)
        _check_rows(config, kind, model, f"{SETTING}={located.name}")
        logger.info(f"model={located.name}: {type(model).__name__}, {size(model)[0]:,} parameters")
        yield located.name, model.to(ranks.device)
        del model
