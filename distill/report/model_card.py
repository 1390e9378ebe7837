"""The student's model card: what it is, how it is loaded, published and exported, its scores, and its limits."""

import re
from typing import Any

from distill.report.card_facts import before_publishing, metadata, model_name, shareable
from distill.report.page import Block, Code, Section, facts_table, render
from distill.report.summary import comparison, findings, reproduced_by, sequences_of_step, setting
from distill.report.use import (
    AUTO,
    CAUSAL,
    CHAT,
    CLASSES,
    FEATURES,
    MASKED,
    SPANS,
    VECTORS,
    Use,
    encoding,
    use_of_student,
)
from distill.report.words import number
from distill.runs.facts import Student
from distill.runs.record import Record

# What transformers' classes are called behind the name of their family.
OF_HEADS = re.compile(r"(?<=\w)(LMHeadModel|For[A-Z]\w*)$")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
KINDS = {"layers": "baseline", "pretrained": "continued", "random": "pre-trained", "neighbours": "pre-trained"}
AS_IT_STANDS = "In this folder, with this card:"
FROM_PYTHON = "Or from Python after the lines under Use, without this card:"
ONNX = "Distill writes it as ONNX files in fp32 and int8, with the size and the speed of each:"


def model_card(record: Record) -> str:
    """README.md of the exported student: front matter of the Hugging Face Hub, use, evaluation, training, limits."""
    record = shareable(record)
    use, title = use_of_run(record), title_of_run(record)
    notes: list[Block] = [record.notes] if record.notes else []
    opening: list[Block] = [findings(record), setting(record)]
    sections = [
        Section("", [block for block in opening if block]),
        Section("Use", [Code(use.code, language="python")]),
        Section("Evaluation", [comparison(record)]),
        Section("Training", [*reproduced_by(record.command), *facts_table("", _facts(record)), *notes]),
        Section("Limits", [_limits(record, use)]),
        Section("Publish and export", _elsewhere(record, use)),
    ]
    return render(
        "card.md",
        library="pytorch" if use.custom_code else "transformers",
        use=use,
        tags=dict.fromkeys(["distill", use.task, "distillation" if record.teacher else use.training]),
        metadata=metadata(record, title, use.task),
        title=title,
        sections=sections,
    )


def title_of_run(record: Record) -> str:
    """What came out of which kind of run, such as `DistilBert distilled from the deep bundled teacher`."""
    student, members = record.student or Student(), record.teacher.members if record.teacher else {}
    family = OF_HEADS.sub("", student.name or "") or "Student"
    teacher = f"{len(members)} teachers" if members else model_name(record.teacher.name if record.teacher else None)
    start = model_name(student.start.source)
    match kind_of_run(record):
        case "fine-tuned":
            title = f"{family} fine-tuned on {_examples(record)}" + (f", learning from {teacher} too" * bool(teacher))
        case "distilled":
            title = f"{family} distilled from {teacher or 'a teacher'}"
        case "baseline":
            title = f"{family}, a baseline without a teacher" + (f", from layers of {start}" * bool(start))
        case "continued":
            title = f"{family} trained further" + (f" from {start}" * bool(start))
        case "pre-trained":
            title = f"{family} pre-trained from scratch"
        case _:
            title = student.name or record.recipe or "Student"
    return title + (f", after step {number(record.snapshot)}" if record.snapshot is not None else "")


def kind_of_run(record: Record) -> str:
    """`fine-tuned`, `distilled`, `baseline` (layers of a teacher alone), `continued`, `pre-trained`, or nothing."""
    identity = record.identity
    if use_of_run(record).task in (SPANS.task, CLASSES.task) or identity.get("objective.task") in ("spans", "classes"):
        return "fine-tuned"
    if record.teacher:
        return "distilled"
    start = (record.student.start.init if record.student else None) or identity.get("student.init")
    return KINDS.get(str(start), "")


def use_of_run(record: Record) -> Use:
    """How the student is loaded and used."""
    student = record.student or Student()
    use = use_of_student(student.origin, student.name or record.recipe or "student")
    if not use.custom_code and student.origin is not None and student.origin.encodes in VECTORS:
        return encoding(use, student.origin.encodes)
    is_chat = use.task == CAUSAL.task and not use.custom_code and record.corpus.chat_template is not None
    return CHAT._replace(brings_code=use.brings_code, tokenizer=use.tokenizer) if is_chat else use


def _examples(record: Record) -> str:
    """What a fine-tuned model has learned: the data set, as the description of the examples names it."""
    described = record.corpus.name or "labelled examples"
    name = described.partition(" of ")[2].partition(";")[0] or described
    version = re.search(r"\(v(\d\.\d)\)$", name)
    if version and re.search(r"squad|^(train|dev)-v\d", name, re.I):
        return f"SQuAD v{version[1]}"
    return name


def _facts(record: Record) -> list[tuple[str, Any]]:
    environment = record.environment
    software = {"distill": environment.distill, "torch": environment.torch, "transformers": environment.transformers}
    return [
        ("Corpus", record.corpus.name),
        ("Teacher", record.teacher.name if record.teacher else None),
        ("Steps", number(record.training.steps)),
        ("Tokens", number(record.training.tokens)),
        ("Sequences per step", sequences_of_step(record.backend)),
        ("Sequence length", number(record.corpus.sequence_length)),
        ("Software", ", ".join(f"{name} {version}" for name, version in software.items() if version)),
        ("Revision", environment.git_revision),
    ]


def _limits(record: Record, use: Use) -> list[str]:
    length = record.corpus.sequence_length
    expected = (
        "Expect lower scores on other kinds of text."
        if kind_of_run(record) == "fine-tuned"
        else "Expect vectors less like the teacher's on other kinds of text."
        if use.task == FEATURES
        else "Expect higher perplexity on other kinds of text, and predictions that repeat the corpus's views."
    )
    limits = [
        f"It was trained on {record.corpus.name} alone. {expected}" if record.corpus.name else expected,
        f"{use.does} It was evaluated only on the sets of the table above." if record.evaluation else use.does,
    ]
    if length is not None:
        limits.append(f"It was trained on sequences of {length} tokens; longer inputs were not tested.")
    if record.teacher:
        limits.append("It imitates the teacher, mistakes included, and the teacher's licence applies to it.")
    start = model_name(record.student.start.source if record.student else None)
    if start and start != model_name(record.teacher.name if record.teacher else None):
        limits.append(f"It began with weights of {start}, whose licence applies to it.")
    return limits


def _elsewhere(record: Record, use: Use) -> list[Block]:
    """How the student is published on the Hub, and how it becomes ONNX where that is possible."""
    recipe = record.recipe or ""
    is_its_name = HUB_NAME.fullmatch(recipe) and not record.changed_groups
    target = f"YOUR_NAME/{recipe if is_its_name else 'MODEL'}"
    upload = Code(f"hf auth login\nhf upload {target} .", language="bash")
    blocks: list[Block] = [before_publishing(record), AS_IT_STANDS, upload]
    origin = record.student.origin if record.student else None
    if not use.custom_code or (origin is not None and origin.has_config):
        lines = f'model.push_to_hub("{target}")\ntokenizer.push_to_hub("{target}")'
        blocks += [FROM_PYTHON, Code(lines, language="python")]
    if use._replace(tokenizer=AUTO) in (MASKED, CAUSAL, CHAT, CLASSES, SPANS):
        blocks += [ONNX, Code("distill export model=FOLDER", language="bash")]
    return blocks
