"""The frozen models of a run: its only teacher, or several, each with settings of its own.

One teacher among several is read by the same functions as an only one: they take `TeacherSettings`, with the names
that the command line has for them.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from distill.config.base import flatten
from distill.config.settings import Config, FrozenModelConfig, PrecisionConfig, TeacherCacheConfig
from distill.distributed.rank_identity import OF_A_HOST
from distill.models.kind import ModelKind
from distill.models.teacher import lacks_head, load_teacher, teacher_tokenizer
from distill.runtime.completions import Server
from distill.runtime.errors import SettingError
from distill.runtime.redaction import redact

ONLY = ""  # the name of a teacher that is no member of several


@dataclass(frozen=True)
class TeacherSettings:
    """What is set of one teacher of a run."""

    name: str  # among `teacher.members`; ONLY for the only one
    model: FrozenModelConfig  # what loads it
    weight: float  # its weight in the mean of all; they add up to 1
    precision: PrecisionConfig  # of which `teacher` is its format
    micro_batches: int
    cache: TeacherCacheConfig

    @property
    def setting(self) -> str:
        return setting_of(self.name)

    @property
    def server(self) -> Server | None:
        """Where it is served; None of one that runs here."""
        one = self.model
        if not one.served or one.url is None or one.model is None:
            return None
        return Server(self.setting, one.url, one.model, one.requests, one.timeout, one.api_key_env)

    @property
    def code(self) -> str | None:
        """A digest of the user's code that makes it, and of the arguments of that; None where it has neither.

        Its weights alone do not say what it answers. Left out are secrets, as a run is resumed with a new key, and what
        each host has its own values of, such as a device.
        """
        make = self.model.custom
        if make is None or make.in_memory is not None:
            return None if make is None else make.code
        arguments = flatten({name: value for name, value in make.arguments.items() if name not in make.optional})
        of_run = sorted(name for name in arguments if name.rpartition(".")[2] not in OF_A_HOST)
        parts = [make.code, [(name, redact(repr(arguments[name]))) for name in of_run]]
        return hashlib.sha256(repr(parts).encode()).hexdigest() if any(parts) else None


@dataclass(frozen=True)
class Member:
    """A teacher of a run: a model that was loaded, or what stands for one."""

    name: str  # among `teacher.members`; ONLY for the only one
    weight: float  # its weight in the mean of all; they add up to 1
    model: Any  # as `load_teacher` has it; None: what it says comes from elsewhere, see `with_models`
    title: str  # what the report calls it
    context: tuple[int, ...] = ()  # tokens that it reads in front of each document, and the student does not
    has_head: bool = True  # that was trained: not of a pre-trained model and another task, nor of an encoder alone
    of_sources: bool = False  # whether it teaches some sources of a mixture alone

    @property
    def setting(self) -> str:
        return setting_of(self.name)


def with_models(members: list[Member]) -> list[Member]:
    """Those whose model is here: it is checked, gives layers, is scored, runs live or makes a cache."""
    return [member for member in members if member.model is not None]


def setting_of(name: str) -> str:
    """What error lines call the teacher with this name."""
    return "teacher" if name == ONLY else f"teacher.members.{name}"


def settings_by_member(config: Config) -> dict[str, TeacherSettings]:
    """What is set of each teacher, by name; empty without a teacher."""
    shared, precision = config.teacher, config.precision
    if shared.is_none:
        return {}
    if not shared.members:
        return {ONLY: TeacherSettings(ONLY, shared, 1.0, precision, shared.micro_batches, shared.cache)}
    total = sum(member.weight for member in shared.members.values())
    return {
        name: TeacherSettings(
            name,
            member,
            member.weight / total,
            precision.changed(teacher=member.precision or precision.teacher),
            shared.micro_batches if member.micro_batches is None else member.micro_batches,
            shared.cache if member.cache is None else member.cache,
        )
        for name, member in shared.members.items()
    }


def load_members(
    config: Config, kind: ModelKind, mapped: bool = False, reads_head: bool = True, gpu: torch.device | None = None
) -> tuple[list[Member], PreTrainedTokenizerBase | None]:
    """All teachers of the run, and the tokenizer that they have in common: [], None where there is none.

    Args:
        mapped: as `load_pretrained` has it.
        gpu: as `load_teacher` has it.
        reads_head: whether the logits of the only teacher are read; else it may be a model without that head.

    Raises:
        SettingError: one does not load, or has another vocabulary than the first.
    """
    members: list[Member] = []
    shared: PreTrainedTokenizerBase | None = None
    for name, alone in settings_by_member(config).items():
        has_head = reads_head or name != ONLY or not lacks_head(alone.model, kind)
        if alone.server is None:
            model, tokenizer, title = load_teacher(alone.model, kind, mapped, alone.setting, has_head, gpu)
        else:
            tokenizer = teacher_tokenizer(alone.model, kind, alone.setting)
            model, title = None, f"{alone.server.model} on a server"
        shared = shared or tokenizer
        if shared.get_vocab() != (vocabulary := tokenizer.get_vocab()):
            problem = f"its vocabulary ({len(vocabulary)} tokens) is not that of {members[0].setting} ({len(shared)})"
            cure = "choose teachers with one tokenizer, whose probabilities can be averaged token by token"
            raise SettingError(problem, setting=alone.setting, cure=cure)
        context = tuple(tokenizer.encode(alone.model.context or "", add_special_tokens=False))
        of_sources = name != ONLY and config.teacher.members[name].sources is not None
        members.append(Member(name, alone.weight, model, title, context, has_head, of_sources))
    return members, shared


def title_of(members: list[Member]) -> str:
    """What the report calls all of them together; empty for none."""
    if len(members) == 1:
        return members[0].title
    parts = [f"{member.name} ({member.title}, weight {member.weight:.3g})" for member in members]
    return f"the mean of {', '.join(parts[:-1])} and {parts[-1]}" if parts else ""
