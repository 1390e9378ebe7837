"""What learns in a run, and what it learns from, on this rank's device: student and optimizer, teachers and caches."""

import logging
from dataclasses import dataclass

import numpy as np
import torch

from distill.config.settings import OptimizerConfig
from distill.data.order import Mixture
from distill.data.sequence_format import first_token
from distill.distributed import GradientSync, gradient_sync
from distill.distributed.shard import is_sharded
from distill.models.check import max_positions, require_memory_for_step
from distill.models.language_model import LAST, LanguageModel, head_alone, hidden_widths
from distill.models.precision import dtype_of
from distill.objective.build import check_losses
from distill.objective.trainable import Trainable
from distill.optim import updates as optim
from distill.optim.schedule import Schedule, length_in_steps, make_schedule
from distill.runs.run import Run
from distill.runs.setup import setup_student, setup_teacher
from distill.teacher.build_cache import Recorder, build
from distill.teacher.by_source import TeachersBySource
from distill.teacher.cache import Cache, CachedTeacher, find
from distill.teacher.live import LiveTeacher, RetokenizedTeacher
from distill.teacher.members import Member, settings_by_member, with_models
from distill.teacher.output import MeanTeacher, NoTeacher, Teacher
from distill.teacher.prompted import prompted
from distill.teacher.served import ServedRecorder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Learner:
    """The model that learns, and how its weights follow a gradient."""

    model: Trainable
    sync: GradientSync
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    settings: OptimizerConfig


def make_learner(run: Run) -> Learner:
    """What is trained, on this rank's device, with its gradients' exchange and its optimizer.

    Raises:
        SettingError: the schedule does not fit the length of the run, memory is sure not to hold a micro-batch, or a
            loss of the user's does not work.
    """
    config, batches, student, ranks = run.config, run.data.batches, run.pair.student, run.ranks
    settings, precision, checkpoints = config.optimizer, config.precision, config.student.gradient_checkpointing
    length = length_in_steps(config.train, batches.steps_per_epoch)
    schedule = make_schedule(config.schedule.make, length, optim.peak_lr(settings, batches.sequences_per_step))
    require_memory_for_step(student, precision.student, *batches.shape, ranks, checkpoints)
    trainable = setup_student(student, run.objective, precision, ranks, checkpoints)
    check_losses(run.objective, config.objective, ranks.device)  # with the terms' modules on their device
    sync = gradient_sync(ranks, trainable)
    return Learner(trainable, sync, optim.build(trainable, settings), schedule, settings)


class FrozenTeachers:
    """The teachers that the student learns from, on this rank's device, and the caches that stand for some of them.

    Attributes:
        caches: that the settings request, by the name of the teacher, each checked or still to be made.
    """

    def __init__(self, run: Run) -> None:
        """Find the caches and place the models. Raises SettingError for a cache that does not fit."""
        self.run, self.caches, self._settings = run, find_caches(run), settings_by_member(run.config)
        members = with_models(run.pair.teachers) if run.objective.needs_teacher else []
        self._models = {member.name: self._placed(member) for member in members}
        self._served = {name: recorder for name in self.caches if (recorder := self._recorder(name)) is not None}
        for recorder in self._served.values():
            run.ranks.agree(lambda: None if run.ranks.local_rank else recorder.check())  # noqa: B023

    def _placed(self, member: Member) -> LanguageModel:
        """The teacher as training runs it; one that a cache stands for as the report scores it alone."""
        settings, ranks, cache = self._settings[member.name], self.run.ranks, self.caches.get(member.name)
        if cache is None or not cache.ready or is_sharded(member.model):
            return setup_teacher(member.model, settings.precision, ranks)
        placed = ranks.place(member.model, dtype_of(settings.precision.teacher))
        return LanguageModel(placed, settings.precision.teacher, settings.precision.kernels == "plain")

    def _recorder(self, name: str) -> ServedRecorder | None:
        """What makes the cache of a teacher on a server."""
        server, run = self._settings[name].server, self.run
        if server is None:
            return None
        return ServedRecorder(self.caches[name], server, run.data.batches, run.objective.positions)

    def open(self) -> Teacher:
        """What the loop reads from: the only teacher, the mean of several, or none; all ranks call it.

        Caches that are missing are made, which may take hours; models that one stands for are let go.
        """
        pair, batches = self.run.pair, self.run.data.batches
        if pair.tokenizers is not None and self._models:
            (model,) = self._models.values()
            return RetokenizedTeacher(model, batches.sequences, *pair.tokenizers, max_positions(model.model))
        made, weights = list[Teacher](), list[float]()
        contexts = {member.name: member.context for member in pair.teachers}
        for name, member in self._settings.items():
            if name in self.caches:
                if name in self._served:
                    build(self._served[name], self.run.ranks)
                made.append(self._cached(name, self._models.pop(name, None)))
            elif name in self._models:
                live = LiveTeacher(self._models[name], member.micro_batches)
                made.append(prompted(live, contexts[name], first_token(pair.tokenizer), name))
            else:
                continue
            weights.append(member.weight)
        if not made:
            return NoTeacher()
        if len(made) == 1:  # which teaches all sources, where it names any
            return made[0]
        by_source = any(one.sources is not None for one in self.run.config.teacher.members.values())
        return self._by_source(made) if by_source else MeanTeacher(made, weights)

    def _by_source(self, made: list[Teacher]) -> TeachersBySource:
        """Teachers of which each has the sequences of some sources of the mixture alone."""
        order, members = self.run.data.batches.order, self.run.config.teacher.members.values()
        assert isinstance(order, Mixture), "the rules refuse other corpora"
        teaches = [[one.sources is None or name in one.sources for name in order.names] for one in members]
        weights = np.array(teaches) * np.array([[one.weight] for one in members])
        return TeachersBySource(made, weights, order.offsets)

    def _cached(self, name: str, model: LanguageModel | None) -> CachedTeacher:
        """One teacher from its cache, which is made first where there is none; without a model it is complete."""
        run, cache, head, read = self.run, self.caches[name], None, "soft targets are"
        (member,) = (one for one in run.pair.teachers if one.name == name)
        if model is not None:
            positions = run.objective.state_positions if cache.layout.states else run.objective.positions
            temperature = run.objective.top_k_temperature
            build(Recorder(cache, model, run.data.batches, positions, temperature, run.ranks.device), run.ranks)
            if not is_sharded(model.model):
                for placed in (model.model, member.model):  # the two may have their weights in common
                    placed.to("cpu")  # a GPU has better use for the room; scores take it there and back
        if cache.layout.states:  # the head as a live teacher has it, whether the cache was made now or before
            precision = self._settings[name].precision.changed(compile=False, attention="auto")
            head, read = setup_teacher(head_alone(member.model), precision, run.ranks), "the teacher's last states are"
        logger.info(f"  {read} read from the cache {cache.folder}, which other runs and machines can use")
        return CachedTeacher(cache, run.ranks, head)


def find_caches(run: Run) -> dict[str, Cache]:
    """The caches of teachers that the settings request, by the name of the teacher.

    A cache serves any device and number format, as these differ by rounding alone and machines choose among them: the
    key names neither.
    """
    config, pair, data, objective = run.config, run.pair, run.data, run.objective
    content = {
        "tokens": data.tokens.digest,
        "masks": data.batches.collator.identity,
        "seed": None if pair.kind.causal else config.seed,  # it draws masks
        "soft_positions": "all" if objective.visits_all_rows else "masked",
        "temperature": objective.top_k_temperature,
        "vocabulary": pair.vocabulary,
    }
    caches, models = {}, {member.name: member.model for member in pair.teachers}
    for name, member in settings_by_member(config).items():
        if member.cache.wanted:
            identity = {**content, "teacher": pair.digests[member.setting], "int8": False}  # draws follow from the key
            positions = objective.positions
            if member.cache.hidden_states:
                positions = objective.state_positions
                where = "all" if objective.reads_whole_states else content["soft_positions"]
                (width,) = hidden_widths(models[name], (LAST,))
                identity |= {"hidden_states": width, "temperature": None, "soft_positions": where}
            if (form := config.precision.quantize_teacher) is not None:
                identity["quantized"] = form
            identity |= {"code": member.code} if member.code is not None else {}
            setting = f"{member.setting}.cache"
            caches[name] = find(member.cache, identity, data.batches, positions, config.data.cache, setting)
    return caches
