"""The tokenizers of a run: which one makes its sequences, and what a teacher with another one does not go with."""

import copy
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from distill.config.settings import Config
from distill.data.batches import Collator
from distill.data.sequence_store import ids_of
from distill.data.sources._in_memory import settings_in_memory
from distill.evaluation.sets import EvaluationSet
from distill.models.kind import ModelKind
from distill.models.student import tokenizer_of
from distill.models.teacher import teacher_tokenizer
from distill.objective.terms import Term
from distill.runtime.errors import SettingError
from distill.tasks import Task
from distill.teacher.members import settings_by_member

logger = logging.getLogger(__name__)


def tokenizer_of_run(config: Config, task: Task) -> PreTrainedTokenizerBase:
    """The tokenizer that a run of these settings makes its sequences with; no model is loaded for it."""
    kind = task.teacher_kind(config.student)
    first = next(iter(settings_by_member(config).values()), None)  # several share one tokenizer
    shared = None if first is None else teacher_tokenizer(first.model, kind, first.setting)
    return find_tokenizer(config, task, shared)


def find_tokenizer(config: Config, task: Task, shared: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """What the sequences of the run are made with: the student's own tokenizer, else the teachers', else a new one.

    Conversations are written by the template of the teachers' tokenizer where the student's, of the same tokens, has
    none.
    """
    trained = config.student.tokenizer == "corpus"
    tokenizer = None if trained else tokenizer_of(config.student, task.kind) or shared
    if tokenizer is None:
        tokenizer = task.new_tokenizer(config.corpus, config.data)
        tokenizer.model_max_length = config.corpus.sequence_length
    template = None if shared is None or tokenizer.chat_template else shared.chat_template
    if shared and template and reads_conversations(config) and tokenizer.get_vocab() == shared.get_vocab():
        logger.info("the student's tokenizer has no chat template: conversations are written by the teacher's")
        tokenizer = copy.deepcopy(tokenizer)  # one in memory is the user's
        tokenizer.chat_template = template
    return tokenizer


def reads_conversations(config: Config) -> bool:
    """Whether any text of the corpus is conversations, in files or in memory."""
    sources = map(settings_in_memory, config.corpus.parts)
    return any(source.made_by is None and source.kind == "chat" for source in sources)


def add_ends_of_answers(student: Any, teacher: Any) -> None:
    """Let a student of conversations end its answers also at the teacher's tokens, where both have them.

    A model that has not been trained on conversations names the end of a text alone, and its answers would run on.
    """
    config, of_teacher = (getattr(model, "generation_config", None) for model in (student, teacher))
    ends = (getattr(one, "eos_token_id", None) for one in (config, of_teacher))
    own, others = (one if isinstance(one, list) else [one] for one in ends)
    both = [number for number in dict.fromkeys([*own, *others]) if number is not None]
    if config is not None and both and both != own:
        config.eos_token_id = both


def reads_same_tokens(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, kind: ModelKind) -> bool:
    """Whether the two give texts the same tokens: one has at most a few special tokens more at its end, such as [PAD].

    None of these may be among those that sequences are made with, but for the padding of causal models, which no model
    reads. `refuse_tokens_beyond` finds out whether the text has any.
    """
    shorter, longer = sorted((student, teacher), key=len)
    common, tokens = shorter.get_vocab(), longer.get_vocab()
    if common == tokens or not common.items() <= tokens.items():
        return bool(common == tokens)
    beyond = {number for token, number in tokens.items() if token not in common}
    special = {number for number, token in longer.added_tokens_decoder.items() if token.special}
    names = ("bos", "eos", "unk", "cls", "sep", "mask", *(() if kind.causal else ("pad",)))
    written = {getattr(longer, f"{name}_token_id") for name in names}
    return min(beyond) >= len(common) and beyond <= special and not beyond & written


def refuse_tokens_beyond(
    vocabulary: int, counts: np.ndarray, sets: Sequence[EvaluationSet], collator: Collator
) -> None:
    """Refuse text with tokens that only one of the two models has, which the other cannot read.

    Args:
        vocabulary: the tokens that both have, the first ones.
        counts: [V] how often the training text has each token.

    Raises:
        SettingError: it names the first such token of the text or of a set.
    """
    counted = {"corpus": np.flatnonzero(counts)}
    counted |= {f"evaluate.sets={data.name}": np.unique(ids_of(data.sequences)) for data in sets}
    for setting, numbers in counted.items():
        if len(beyond := numbers[(numbers >= vocabulary) & (numbers != collator.pad_id)]):
            raise SettingError(
                f"its text has the token {int(beyond[0])}, and teacher and student share the first {vocabulary} tokens "
                "alone",
                setting=setting,
                cure="take that token out of the text, or models with one tokenizer",
            )


def check_across_tokenizers(
    terms: dict[str, Term], config: Config, teacher: PreTrainedTokenizerBase, student: PreTrainedTokenizerBase
) -> None:
    """Refuse what needs a token of the teacher beside each of the student's, where they cut text up differently.

    Raises:
        SettingError: a term that does, layers of the teacher, several micro-batches in a forward, or several teachers.
    """
    differ = refuse_pairs_of_tokens(student, teacher, terms, config.student.from_layers)
    if (count := config.teacher.micro_batches) > 1:
        raise SettingError(
            f"teacher.micro_batches={count} is for a teacher that reads the same tokens, but {differ}: leave it out"
        )
    if config.teacher.members:
        raise SettingError(f"teacher.members averages over tokens, but {differ}: choose one teacher")


def refuse_pairs_of_tokens(
    one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, terms: dict[str, Term], from_layers: bool
) -> str:
    """Refuse terms that compare single tokens of a student and a teacher with these tokenizers, and layers of that.

    Terms of a task's own head are of such pairs however they are computed.

    Returns:
        How the tokenizers differ, as part of a message.
    """
    differ = f"the student has another vocabulary ({len(one)} tokens) than the teacher ({len(other)})"
    if from_layers:
        raise SettingError(
            f"student.init=layers takes the teacher's embeddings, but {differ}: set student.tokenizer=null"
        )
    across = {name for name, term in terms.items() if term.across_tokenizers and not term.teacher_reads.head}
    pairing = [name for name, term in terms.items() if term.needs_teacher and name not in across]
    if pairing:
        weights = " ".join(f"objective.{name}.weight=0" for name in pairing)
        is_of_task = any(terms[name].teacher_reads.extra for name in pairing)
        cure = "" if is_of_task else f"give {weights} objective.pooled.weight=1, which needs no pairs, or "
        raise SettingError(
            f"objective.{' and objective.'.join(pairing)} pair{'s' * (len(pairing) == 1)} tokens, but {differ}: {cure}"
            "choose models with one tokenizer, as DistilRoBERTa has that of RoBERTa"
        )
    return differ
