"""The student's model card: what it is, how it is loaded, published and exported, its scores, and its limits.

It names no path of the machine, and its front matter is the Hub's own.
"""

import re
from collections.abc import Iterator
from pathlib import PurePath

from distill.report import page
from distill.report.page import Block, Code, Section, facts, facts_table, prose, prose_lines
from distill.report.summary import comparison, findings, reproduced_by, sequences_of_step, setting
from distill.report.use import Use, use_of_student
from distill.report.words import is_number, number
from distill.runs.facts import Published
from distill.runs.record import Record
from distill.runtime.redaction import redacted

# An absolute path. Its folders may have spaces in their names, but not behind the end of a sentence, nor before the
# slash of a unit, such as tokens/s; what follows the last slash ends at a space. A URL is none: its slashes follow a
# colon.
WORD = r"""[^\s,;()\]}"'/]+"""
SPACED = rf"""{WORD}(?:(?<![.:!?]) (?!~/){WORD})+/(?=[\w.~][\w.-])"""
ABSOLUTE = re.compile(rf"""(?<![^\s(\[{{="',:])(?:file://)?~?/(?=[\w.~])(?:{WORD}/|{SPACED})*(?:{WORD})?""")
# The Hub's names of metrics by those of measures.
METRICS = {
    "perplexity": "perplexity",
    "exact": "exact_match",
    "f1": "f1",
    "macro_f1": "f1",
    "accuracy": "accuracy",
    "matthews": "matthews_correlation",
    "pearson": "pearsonr",
    "spearman": "spearmanr",
}
# What transformers' classes are called behind the name of their family.
OF_HEADS = re.compile(r"(?<=\w)(LMHeadModel|For[A-Z]\w*)$")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
KINDS = {"layers": "baseline", "pretrained": "continued", "random": "pre-trained", "neighbours": "pre-trained"}


def model_card(record: Record) -> str:
    """README.md of the exported student: front matter of the Hugging Face Hub, use, evaluation, training, limits."""
    record = shareable(record)
    use, title = use_of_run(record), title_of_run(record)
    training = facts_table("", facts("card", record, sequences_of_step(record.backend)))
    sections = [
        Section("", [findings(record), setting(record)]),
        Section("Use", [Code(use.code, language="python")]),
        Section("Evaluation", [comparison(record)]),
        Section("Training", [*reproduced_by(record.command), training, record.notes]),
        Section("Limits", [_limits(record, use)]),
        Section("Publish and export", _elsewhere(record, use)),
    ]
    return f"---\n{front_matter(record, use, title)}---\n\n{page.markdown(title, sections)}"


def front_matter(record: Record, use: Use, title: str) -> str:
    """What the Hub reads, as YAML: library and task, models and data by their names there, licence, metrics, scores.

    A model that is no more than a folder, or a licence that nobody states, has no entry.
    """
    from huggingface_hub import EvalResult, ModelCardData

    scored = {name: record.sets_of(name) for name in record.measures}
    scores = [
        EvalResult(use.task, data, record.label_of(data), METRICS.get(name, name), value, metric_name=measure.title)
        for name, measure in record.measures.items()
        for data in scored[name]
        if is_number(value := record.student.score(name, data))
    ]
    data = ModelCardData(
        model_name=title,
        library_name="pytorch" if use.own else "transformers",
        pipeline_tag=use.task,
        tags=[*dict.fromkeys(["distill", use.task, "distillation" if record.teacher else use.training])],
        base_model=[*dict.fromkeys(source.hub for source in _sources(record) if source.hub)] or None,
        license=stated[0] if len(stated := licenses(record)) == 1 else None,
        datasets=record.corpus.hub or None,
        metrics=[*dict.fromkeys(METRICS[name] for name in scored if scored[name] and name in METRICS)] or None,
        eval_results=scores or None,  # of a snapshot, which is saved before it is scored, there are none
    )
    return f"{data.to_yaml()}\n"


def title_of_run(record: Record) -> str:
    """What came out of which kind of run, such as `DistilBert distilled from the deep bundled teacher`."""
    student, members = record.student, record.teacher.members if record.teacher else {}
    family = OF_HEADS.sub("", student.name or "") or "Student"
    teacher = f"{len(members)} teachers" if members else model_name(record.teacher.name if record.teacher else None)
    start = model_name(student.start.source)
    examples, name = _examples(record), student.name or record.recipe or "Student"
    title = prose("title", kind_of_run(record), family, teacher, start, examples, name)
    return title + (f", after step {number(record.snapshot)}" if record.snapshot is not None else "")


def kind_of_run(record: Record) -> str:
    """`fine-tuned`, `distilled`, `baseline` (layers of a teacher alone), `continued`, `pre-trained`, or nothing."""
    identity = record.identity
    if {use_of_run(record).kind, identity.get("objective.task")} & {"spans", "classes"}:
        return "fine-tuned"
    if record.teacher:
        return "distilled"
    return KINDS.get(str(record.student.start.init), "")


def use_of_run(record: Record) -> Use:
    """How the student is loaded and used."""
    name = record.student.name or record.recipe or "student"
    return use_of_student(record.student.origin, name, record.corpus.chat_template is not None)


def _examples(record: Record) -> str:
    """What a fine-tuned model has learned: the data set, as the description of the examples names it."""
    described = record.corpus.name or "labelled examples"
    name = described.partition(" of ")[2].partition(";")[0] or described
    version = re.search(r"\(v(\d\.\d)\)$", name)
    if version and re.search(r"squad|^(train|dev)-v\d", name, re.I):
        return f"SQuAD v{version[1]}"
    return name


def _limits(record: Record, use: Use) -> list[str]:
    start = model_name(record.student.start.source)
    is_teacher = start == model_name(record.teacher.name if record.teacher else None)
    return prose_lines("limits", record, use, kind_of_run(record) == "fine-tuned", "" if is_teacher else start)


def _elsewhere(record: Record, use: Use) -> list[Block]:
    """How the student is published on the Hub, and how it becomes ONNX where that is possible."""
    recipe, origin = record.recipe or "", record.student.origin
    is_its_name = HUB_NAME.fullmatch(recipe) and not record.changed_groups
    target = f"YOUR_NAME/{recipe if is_its_name else 'MODEL'}"
    upload = Code(f"hf auth login\nhf upload {target} .", language="bash")
    blocks: list[Block] = [before_publishing(record), "In this folder, with this card:", upload]
    if not use.own or (origin is not None and origin.has_config):
        lines = Code(f'model.push_to_hub("{target}")\ntokenizer.push_to_hub("{target}")', language="python")
        blocks += ["Or from Python after the lines under Use, without this card:", lines]
    if not (use.own or use.brings_code or use.kind == "vectors"):
        onnx = "Distill writes it as ONNX files in fp32 and int8, with the size and the speed of each:"
        blocks += [onnx, Code("distill export model=FOLDER", language="bash")]
    return blocks


def shareable(record: Record) -> Record:
    """The record with the last part alone of every absolute path, which means nothing elsewhere and names people."""
    teacher, student = record.teacher, record.student
    start = student.start.changed(source=model_name(student.start.source) or None)
    named = record.changed(
        teacher=teacher and teacher.changed(name=model_name(teacher.name)), student=student.changed(start=start)
    )
    return Record.from_json(redacted(named.to_json(), without_paths))


def model_name(name: str | None) -> str:
    """What a card calls a model: of a path the run or the folder alone, which means something elsewhere too."""
    text = name or ""
    if not text.startswith(("/", ".", "~")) and (text.count("/") < 2 or " " in text):
        return without_paths(text)  # a description, or OWNER/NAME of the Hub
    parts = [part for part in PurePath(text).parts if part not in ("student", "snapshots", "/")]
    if len(parts) > 1 and (step := re.fullmatch(r"step-(\d+)", parts[-1])):
        return f"{parts[-2]} after step {number(int(step[1]))}"
    return parts[-1] if parts else text


def without_paths(text: str) -> str:
    """A text in which of every absolute path the last part is left."""
    return ABSOLUTE.sub(lambda match: match[0].rstrip("/").rpartition("/")[2], text)


def licenses(record: Record) -> list[str | None]:
    """Those of the models that this one comes from, each once; None: one of them states none."""
    return [*dict.fromkeys(source.license for source in _sources(record))]


def before_publishing(record: Record) -> str:
    """What its user adds to the front matter, which no record has."""
    stated = [license for license in licenses(record) if license]
    return prose("before_publishing", stated, stated == licenses(record) and len(stated) == 1)


def _sources(record: Record) -> Iterator[Published]:
    """The models that a student comes from: its start, then its teachers."""
    start = record.student.start
    if start.source and (start.init != "layers" or record.teacher is None):
        yield start.published
    if record.teacher is not None:
        members = record.teacher.members or {"": record.teacher}
        yield from (member.published for member in members.values())
