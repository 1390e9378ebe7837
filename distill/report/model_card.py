"""The student's model card: what it is, how it is loaded, published and exported, its scores, and where it ends."""

import json
import re
from pathlib import PurePath
from typing import Any

from distill.report import page
from distill.report.facts import facts_table, rows_of_step
from distill.report.lookup import measures_of, sets_of, usable, value_at
from distill.report.page import Block, Code, Section, number
from distill.report.summary import comparison, findings, setting
from distill.report.use import CAUSAL, CLASSES, MASKED, SPANS, Use, use_of_student

# What transformers' classes are called behind the name of their family.
OF_HEADS = re.compile(r"(?<=\w)(LMHeadModel|For[A-Z]\w*)$")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
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
UNSAID = "Before it is published, say under which licence and for which languages, as license and language at its top."
AS_IT_STANDS = "In this folder, with this card:"
FROM_PYTHON = "Or from Python after the lines under Use, without this card:"
ONNX = "As ONNX files in fp32 and int8, with the size and the speed of each:"


def model_card(results: dict[str, Any]) -> str:
    """README.md of the exported student: front matter of the Hugging Face Hub, use, evaluation, training, limits."""
    use, title = _use(results), title_of_run(results)
    tags = ["distill", use.task, "distillation" if results.get("teacher") else use.training]
    library = "pytorch" if use.own_code else "transformers"
    # Of a milestone, which is saved before it is scored, there is none.
    scored = [name for name in measures_of(results) if name in METRICS and sets_of(results, name)]
    metrics = dict.fromkeys(METRICS[name] for name in scored)
    front = ["---", f"library_name: {library}", f"pipeline_tag: {use.task}", "tags:"]
    front += [f"- {tag}" for tag in dict.fromkeys(tags)]
    front += ["metrics:", *(f"- {name}" for name in metrics)] if metrics else []
    # JSON strings are YAML strings, whatever the name holds.
    front += [f"model_name: {json.dumps(title)}", "---", ""]
    notes: list[Block] = [[str(note) for note in results["notes"]]] if results.get("notes") else []
    command: list[Block] = [Code(str(results["command"]), language="bash")] if results.get("command") else []
    opening: list[Block] = [findings(results), setting(results)]
    sections = [
        Section("", [block for block in opening if block]),
        Section("Use", [Code(use.code, language="python")]),
        Section("Evaluation", [comparison(results)]),
        Section("Training", [*command, *facts_table("", _facts(results)), *notes]),
        Section("Limits", [_limits(results, use)]),
        Section("Publish and export", _elsewhere(results, use)),
    ]
    return "\n".join(front) + "\n" + page.markdown(title, sections)


def title_of_run(results: dict[str, Any]) -> str:
    """What came out of which kind of run, such as `DistilBert distilled from the embedded teacher`."""
    name = str(value_at(results, "student", "name") or "")
    family = OF_HEADS.sub("", name) or "Student"
    members = value_at(results, "teacher", "members")
    teacher = f"{len(members)} teachers" if members else _shown(value_at(results, "teacher", "name"))
    start = _shown(value_at(results, "student", "start", "from"))
    match kind_of_run(results):
        case "fine-tuned":
            title = f"{family} fine-tuned on {_examples(results)}" + (f", learning from {teacher} too" * bool(teacher))
        case "distilled":
            title = f"{family} distilled from {teacher or 'a teacher'}"
        case "twin":
            title = f"{family}, a twin without a teacher" + (f", from layers of {start}" * bool(start))
        case "continued":
            title = f"{family} trained further" + (f" from {start}" * bool(start))
        case "pre-trained":
            title = f"{family} pre-trained from scratch"
        case _:
            title = name or str(results.get("recipe") or "Student")
    step = results.get("milestone")
    return title + (f", after step {number(step)}" if usable(step) else "")


def kind_of_run(results: dict[str, Any]) -> str:
    """`fine-tuned`, `distilled`, `twin` (layers of a teacher, without it), `continued`, `pre-trained`, or nothing."""
    identity = results.get("identity") or {}
    if _use(results).task in (SPANS.task, CLASSES.task) or identity.get("objective.task") in ("spans", "classes"):
        return "fine-tuned"
    if results.get("teacher"):
        return "distilled"
    start = value_at(results, "student", "start", "kind") or identity.get("student.kind")
    return {"layers": "twin", "pretrained": "continued", "config": "pre-trained"}.get(str(start), "")


def _use(results: dict[str, Any]) -> Use:
    name = str(value_at(results, "student", "name") or results.get("recipe") or "student")
    return use_of_student(value_at(results, "student", "origin"), name)


def _shown(name: Any) -> str:
    """What a card calls a model: of a path the run or the folder alone, which means something elsewhere too."""
    text = str(name or "")
    if not text.startswith(("/", ".", "~")) and text.count("/") < 2:
        return text  # words, or OWNER/NAME of the Hub
    parts = [part for part in PurePath(text).parts if part not in ("student", "milestones", "/")]
    if len(parts) > 1 and (step := parts[-1].removeprefix("step-")).isdecimal():
        return f"{parts[-2]} after step {number(int(step))}"
    return parts[-1] if parts else text


def _examples(results: dict[str, Any]) -> str:
    """What a fine-tuned model has learned: the data set, as the description of the examples names it."""
    described = str(value_at(results, "corpus", "name") or "labelled examples")
    name = described.partition(" of ")[2].partition(";")[0] or described
    version = re.search(r"\(v(\d\.\d)\)$", name)
    if version and re.search(r"squad|^(train|dev)-v\d", name, re.I):
        return f"SQuAD v{version[1]}"
    return name


def _facts(results: dict[str, Any]) -> list[tuple[str, Any]]:
    environment = results.get("environment") or {}
    versions = [f"{key} {environment[key]}" for key in ("distill", "torch", "transformers") if environment.get(key)]
    return [
        ("Corpus", value_at(results, "corpus", "name")),
        ("Teacher", value_at(results, "teacher", "name")),
        ("Steps", number(value_at(results, "training", "steps"))),
        ("Tokens", number(value_at(results, "training", "tokens"))),
        ("Rows per step", rows_of_step(results.get("backend") or {})),
        ("Sequence length", number(value_at(results, "corpus", "sequence_length"))),
        ("Software", ", ".join(versions)),
        ("Revision", environment.get("git_revision")),
    ]


def _limits(results: dict[str, Any], use: Use) -> list[str]:
    corpus = value_at(results, "corpus", "name")
    length = value_at(results, "corpus", "sequence_length")
    kind = kind_of_run(results)
    expected = (
        "Expect lower scores on other kinds of text."
        if kind == "fine-tuned"
        else "Expect higher perplexity on other kinds of text, and the corpus's views and words in what it predicts."
    )
    limits = [
        f"This run showed it {corpus or 'one corpus'} and nothing else. {expected}",
        f"{use.does} It has been tested on nothing but what the table above shows.",
    ]
    if usable(length):
        limits.append(f"It was trained on rows of {length} tokens; longer inputs were not tested.")
    if results.get("teacher"):
        limits.append("It has learnt the teacher's mistakes too, and the teacher's licence applies to it.")
    start = _shown(value_at(results, "student", "start", "from"))
    if start and start != _shown(value_at(results, "teacher", "name")):
        limits.append(f"It began with weights of {start}, whose licence applies to it.")
    return limits


def _elsewhere(results: dict[str, Any], use: Use) -> list[Block]:
    """How the student is published on the Hub, and how it becomes ONNX where that is possible."""
    recipe = str(results.get("recipe") or "")
    target = f"YOUR_NAME/{recipe if HUB_NAME.fullmatch(recipe) else 'MODEL'}"
    blocks: list[Block] = [UNSAID, AS_IT_STANDS, Code(f"hf auth login\nhf upload {target} .", language="bash")]
    if not use.own_code or value_at(results, "student", "origin", "has_config"):
        lines = f'model.push_to_hub("{target}")\ntokenizer.push_to_hub("{target}")'
        blocks += [FROM_PYTHON, Code(lines, language="python")]
    if use in (MASKED, CAUSAL):
        blocks += [ONNX, Code("pip install 'distill[onnx]'\ndistill export model=.", language="bash")]
    return blocks
