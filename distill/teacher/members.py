"""The frozen models of a run: its only teacher, or several, each with settings of its own.

One teacher among several is read by the same functions as an only one: they get the settings of a run that had that
teacher alone, and their errors are put into the names of the member's settings.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from distill.config.settings import Config, MemberConfig, TeacherConfig
from distill.models.check import longest_row
from distill.models.kernels import int8
from distill.models.kind import ModelKind
from distill.models.teacher import load_teacher
from distill.runtime.errors import SettingError

ONLY = ""  # the name of a teacher that is no member of several
OWN_SETTINGS = re.compile(rf"(?<![\w./])teacher\.(?=({'|'.join(each for each in MemberConfig.model_fields)})\b)")


@dataclass(frozen=True)
class Member:
    """A teacher as it was loaded: frozen, in evaluation mode, in fp32."""

    name: str  # among `teacher.members`; ONLY for the only one
    weight: float  # its share in the mean of all; they add up to 1
    model: Any
    title: str  # what the report calls it

    @property
    def setting(self) -> str:
        return setting_of(self.name)


def setting_of(name: str) -> str:
    """What error lines call the teacher with this name."""
    return "teacher" if name == ONLY else f"teacher.members.{name}"


def settings_by_member(config: Config) -> dict[str, Config]:
    """The run's settings as they would be with each of its teachers alone, by name; empty without a teacher."""
    if config.teacher.kind == "several":
        return {name: _alone(config, member) for name, member in config.teacher.members.items()}
    return {} if config.teacher.kind == "none" else {ONLY: config}


def shares(config: Config) -> dict[str, float]:
    """The weight of each teacher in the mean of all, by name; they add up to 1."""
    weights = {name: member.weight for name, member in config.teacher.members.items()}
    if config.teacher.kind != "several":
        return dict.fromkeys(settings_by_member(config), 1.0)
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


@contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Errors that name settings of an only teacher, raised inside, name those of this member instead."""
    try:
        yield
    except SettingError as error:
        if name == ONLY:
            raise
        own = setting_of(name)
        line = OWN_SETTINGS.sub(f"{own}.", str(error))
        line = re.sub(r"\bprecision\.teacher\b", f"{own}.precision", re.sub(r"^teacher:", f"{own}:", line))
        raise SettingError(line) from error


def load_members(
    config: Config, kind: ModelKind, device: torch.device, mapped: bool = False
) -> tuple[list[Member], PreTrainedTokenizerBase | None]:
    """All teachers of the run, and the tokenizer that they share: [], None where there is none.

    Raises:
        SettingError: one does not load, takes no rows of this length, or has another vocabulary than the first.
    """
    members: list[Member] = []
    shared: PreTrainedTokenizerBase | None = None
    for name, own in settings_by_member(config).items():
        with errors_of(name):
            if own.precision.teacher == "int8":
                int8.check(device)
            model, tokenizer, title = load_teacher(own.teacher, kind, mapped)
        member = Member(name, shares(config)[name], model, title)
        assert tokenizer is not None
        if shared is not None:
            _check_member(member, tokenizer, members[0], shared, config.corpus.sequence_length)
        shared = shared or tokenizer
        members.append(member)
    return members, shared


def title_of(members: list[Member]) -> str:
    """What the report calls all of them together; empty for none."""
    if len(members) == 1:
        return members[0].title
    parts = [f"{member.name} ({member.title}, weight {member.weight:.3g})" for member in members]
    return f"the mean of {', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def _check_member(
    member: Member, tokenizer: PreTrainedTokenizerBase, first: Member, shared: PreTrainedTokenizerBase, length: int
) -> None:
    if (here := shared.get_vocab()) != (there := tokenizer.get_vocab()):
        differing = sum(here.get(token) != number for token, number in there.items())
        raise SettingError(
            f"{member.setting}: its vocabulary ({len(there)} tokens) is not that of {first.setting} ({len(here)} "
            f"tokens, {differing} differ), and probabilities are averaged token by token: choose teachers with one "
            "tokenizer, or learn from one after the other (student=pretrained goes on from a saved student)"
        )
    if (limit := longest_row(member.model)) is not None and length > limit:
        raise SettingError(
            f"corpus.sequence_length={length} exceeds the {limit} positions of {member.setting}: lower it"
        )


def _alone(config: Config, member: MemberConfig) -> Config:
    shared = config.teacher
    teacher = TeacherConfig(
        kind=member.kind,
        path=member.path,
        revision=member.revision,
        trust_remote_code=member.trust_remote_code,
        tokenizer=member.tokenizer,
        custom=member.custom,
        micro_batches=shared.micro_batches if member.micro_batches is None else member.micro_batches,
        cache=shared.cache if member.cache is None else member.cache,
    )
    precision = config.precision.changed(teacher=member.precision or config.precision.teacher)
    return config.changed(teacher=teacher, precision=precision)
