"""How a student is loaded and used elsewhere, by the name of its class: the lines that its model card shows."""

from typing import NamedTuple

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from distill.runs.facts import Origin

FOLDER = "."  # the card is in the model's folder
AUTO = "AutoTokenizer"
OF_REPOSITORY = "transformers_modules."  # begins the module of a class whose code came with a model


class Use(NamedTuple):
    """The part of a model card that depends on the kind of model."""

    task: str  # of a pipeline, and the Hub's name of what the model is for
    training: str  # the Hub's name of training without a teacher
    does: str
    auto_class: str
    example: str
    custom_code: str = ""  # instead, for a class that is not one of transformers
    tokenizer: str = AUTO  # the class that gives its tokenizer back
    brings_code: bool = False  # whether the folder holds the code of its class, which runs where the user trusts it

    @property
    def code(self) -> str:
        if self.custom_code:
            return self.custom_code
        trust = ", trust_remote_code=True" if self.brings_code else ""
        return f"""
from transformers import {self.auto_class}, {self.tokenizer}{", pipeline" if "pipeline(" in self.example else ""}

folder = "."  # this folder
model = {self.auto_class}.from_pretrained(folder{trust})
tokenizer = {self.tokenizer}.from_pretrained(folder{trust})
{self.example}
""".strip()


MASKED = Use(
    "fill-mask",
    "masked-language-modeling",
    "It predicts masked tokens.",
    "AutoModelForMaskedLM",
    """fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
print(fill(f"It was a long {tokenizer.mask_token} before they spoke again."))""",
)
CAUSAL = Use(
    "text-generation",
    "causal-language-modeling",
    "It continues a text.",
    "AutoModelForCausalLM",
    """generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
print(generate("It was a long time before", max_new_tokens=20))""",
)
CHAT = CAUSAL._replace(
    does="It answers in a conversation.",
    example="""messages = [{"role": "user", "content": "What colour is snow?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
tokens = model.generate(**inputs, max_new_tokens=20)[0, inputs["input_ids"].shape[1] :]
print({"role": "assistant", "content": tokenizer.decode(tokens, skip_special_tokens=True)})""",
)
FEATURES = "feature-extraction"
VECTORS = {
    "mean": "(states * mask).sum(1) / mask.sum(1)",
    "cls": "states[:, 0]",
    "last": "states[range(len(states)), mask.sum(1)[:, 0] - 1]",
    "max": "states.masked_fill(mask == 0, -float('inf')).amax(1)",
    "mean_sqrt_len": "(states * mask).sum(1) / mask.sum(1) ** 0.5",
    "weighted_mean": "(states * (weights := mask * mask.cumsum(1))).sum(1) / weights.sum(1)",
    "states": "states",
}
SPANS = Use(
    "question-answering",
    "extractive-question-answering",
    "It finds the answer to a question in a text.",
    "AutoModelForQuestionAnswering",
    """inputs = tokenizer("Where did they stay?", "They stayed at an inn by the sea.", return_tensors="pt")
outputs = model(**inputs)
start, end = int(outputs.start_logits.argmax()), int(outputs.end_logits.argmax())
print(tokenizer.decode(inputs.input_ids[0, start : end + 1]))""",
)
CLASSES = Use(
    "text-classification",
    "text-classification",
    "It predicts the class of a text, or a value for it.",
    "AutoModelForSequenceClassification",
    """classify = pipeline("text-classification", model=model, tokenizer=tokenizer)
print(classify("A text to be classified."))""",
)
OF_CLASSES = (
    (CAUSAL, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    (SPANS, MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES),
    (CLASSES, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
)


# Of classes that transformers lacks, by their names.
ENDINGS = (("ForQuestionAnswering", SPANS), ("ForSequenceClassification", CLASSES))


def use_of_student(origin: Origin | None, name: str) -> Use:
    """The use of a student; of a class of the user's with the lines that load just that.

    Args:
        origin: None where the record has none.
        name: of its class.
    """
    if origin is not None and origin.model_class.startswith(OF_REPOSITORY):
        of_head = next((use for ending, use in ENDINGS if name.endswith(ending)), MASKED)
        return (CAUSAL if origin.causal else of_head)._replace(brings_code=True)
    if origin is None or origin.made_by is None:
        of_class = next((use for use, names in OF_CLASSES if name in names.values()), MASKED)
        return of_class._replace(tokenizer=(origin.tokenizer if origin else None) or AUTO)
    use = CAUSAL if origin.causal else MASKED
    module, _, attribute = (origin.model_class if origin.has_config else origin.made_by).rpartition(".")
    imports = [f"from {module} import {attribute}", "from transformers import PreTrainedTokenizerFast"]
    lines = ["", f'tokenizer = PreTrainedTokenizerFast.from_pretrained("{FOLDER}")']
    if origin.has_config:
        lines.append(f'model = {attribute}.from_pretrained("{FOLDER}")')
    else:
        imports.insert(0, "from safetensors.torch import load_model")
        made = f"model = {attribute}({'...' if origin.call is None else origin.call})"
        lines.append(made + ("  # with the settings of the run, see below" if "..." in made else ""))
        lines.append(f'load_model(model, "{FOLDER}/model.safetensors")')
    return use._replace(custom_code="\n".join([*imports, *lines]))


def encoding(use: Use, encodes: str) -> Use:
    """The use of a student of which no head was trained.

    Args:
        use: of its class.
        encodes: as `Origin.encodes`.
    """
    of_text = "a state for each token of a text" if encodes == "states" else "a vector for a text"
    masked = "mask = inputs.attention_mask.unsqueeze(-1)  # without padding\n" * ("mask" in VECTORS[encodes])
    example = f"""texts = ["They stayed at an inn by the sea.", "They left."]
inputs = tokenizer(texts, padding=True, return_tensors="pt")
states = model.base_model(**inputs).last_hidden_state
{masked}print({VECTORS[encodes]})"""
    does = f"It gives {of_text}; its head, which would predict tokens, was not trained."
    return use._replace(task=FEATURES, does=does, example=example)
