"""How a student is loaded and used elsewhere, by the name of its class: the lines that its model card shows."""

from typing import NamedTuple

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from distill.report.page import render
from distill.runs.facts import Origin

AUTO = "AutoTokenizer"
OF_REPOSITORY = "transformers_modules."  # begins the module of a class whose code came with a model
# How a vector of a text follows from the states of its tokens.
VECTORS = {
    "mean": "(states * mask).sum(1) / mask.sum(1)",
    "cls": "states[:, 0]",
    "last": "states[range(len(states)), mask.sum(1)[:, 0] - 1]",
    "max": "states.masked_fill(mask == 0, -float('inf')).amax(1)",
    "mean_sqrt_len": "(states * mask).sum(1) / mask.sum(1) ** 0.5",
    "weighted_mean": "(states * (weights := mask * mask.cumsum(1))).sum(1) / weights.sum(1)",
    "states": "states",
}


class Use(NamedTuple):
    """The part of a model card that depends on the kind of model."""

    kind: str
    task: str  # of a pipeline, and the Hub's name of what the model is for
    training: str  # the Hub's name of training without a teacher
    does: str
    auto_class: str
    own: Origin | None = None  # instead, of a class that is not one of transformers
    tokenizer: str = AUTO  # the class that gives its tokenizer back
    brings_code: bool = False  # whether the folder holds the code of its class, which runs where the user trusts it
    vectors: str = ""  # of `VECTORS`

    @property
    def code(self) -> str:
        """The lines that load it and show what it does."""
        return render("use.txt", use=self).rstrip()


MASKED = Use("masked", "fill-mask", "masked-language-modeling", "It predicts masked tokens.", "AutoModelForMaskedLM")
CAUSAL = Use("causal", "text-generation", "causal-language-modeling", "It continues a text.", "AutoModelForCausalLM")
SPANS = Use(
    "spans",
    "question-answering",
    "extractive-question-answering",
    "It finds the answer to a question in a text.",
    "AutoModelForQuestionAnswering",
)
CLASSES = Use(
    "classes",
    "text-classification",
    "text-classification",
    "It predicts the class of a text, or a value for it.",
    "AutoModelForSequenceClassification",
)
# By the endings of classes' names, and the classes of transformers.
OF_CLASSES = (
    (CAUSAL, "ForCausalLM", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    (SPANS, "ForQuestionAnswering", MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES),
    (CLASSES, "ForSequenceClassification", MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
)


def use_of_student(origin: Origin | None, name: str, is_chat: bool = False) -> Use:
    """The use of a student; of a class of the user's with the lines that load just that.

    Args:
        origin: None where the record has none.
        name: of its class.
        is_chat: whether it has learned from conversations.
    """
    origin = origin or Origin()
    if origin.model_class.startswith(OF_REPOSITORY):
        of_head = next((use for use, ending, _ in OF_CLASSES[1:] if name.endswith(ending)), MASKED)
        use = (CAUSAL if origin.causal else of_head)._replace(brings_code=True)
    elif origin.made_by is not None:
        return (CAUSAL if origin.causal else MASKED)._replace(own=origin)
    else:
        of_class = next((use for use, _, names in OF_CLASSES if name in names.values()), MASKED)
        use = of_class._replace(tokenizer=origin.tokenizer or AUTO)
    if origin.encodes in VECTORS:
        of_text = "a state for each token of a text" if origin.encodes == "states" else "a vector for a text"
        does = f"It gives {of_text}; its head, which would predict tokens, was not trained."
        form = "torch.nn.functional.normalize({})" if origin.normalizes and origin.encodes != "states" else "{}"
        vectors = form.format(VECTORS[origin.encodes])
        return use._replace(kind="vectors", task="feature-extraction", does=does, vectors=vectors)
    return use._replace(kind="chat", does="It answers in a conversation.") if is_chat and use.kind == "causal" else use
