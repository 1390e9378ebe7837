"""Writes what a run did for people to read: report.html and report.md, the same as Markdown."""

from pathlib import Path
from typing import Any

from distill.data.duplicates import described
from distill.report import page, plots
from distill.report.facts import facts_table as _facts
from distill.report.facts import rows_of_step as _rows
from distill.report.history import history_blocks
from distill.report.layers import layer_blocks
from distill.report.lookup import axis_of, label_of, measures_of, models_of, titles_of_terms, usable, value_at
from distill.report.page import NONE, Block, Code, Section, Table, Tiles, number, percent, time_of
from distill.report.plots import Picture
from distill.report.profile import profile_blocks
from distill.report.summary import comparison, findings, setting, tiles
from distill.runtime.files import atomic

FEW_POSITIONS = 1000  # of pseudo-perplexity
MOST_NAMED = 5  # left-out files that are listed by name


def write(folder: Path, results: dict[str, Any], metrics: list[dict[str, Any]], config_yaml: str) -> None:
    """Write plots/*.png, report.html and report.md into `folder`.

    `results` and `metrics` are what results.json and metrics.jsonl hold. Where a number is missing or None there is a
    dash, or its row, table or figure is left out.
    """
    pictures = plots.draw(folder, results, metrics)
    sections = [
        Section("", _headline(results)),
        Section("Size, speed and quality", _models(results, pictures)),
        Section(f"{axis_of(results).capitalize()} by {axis_of(results)}", history_blocks(results, pictures)),
        Section("Layers to start from", layer_blocks(results)),
        Section("How training went", _training(results, pictures)),
        Section("Where the time goes", profile_blocks(folder, results)),
        Section("What it was trained and tested on", _data(results)),
        Section("To run it again", _again(results, config_yaml)),
    ]
    sections = [section for section in sections if section.blocks]
    title = f"{results.get('recipe') or 'Run'}: " + ("distillation report" if results.get("teacher") else "report")
    for name, text in (("report.html", page.html(title, sections)), ("report.md", page.markdown(title, sections))):
        with atomic(folder / name) as new:
            new.write_text(text, encoding="utf-8")


def _headline(results: dict[str, Any]) -> list[Block]:
    unfinished = "" if results.get("finished", True) else "This run has not finished: the numbers are those so far."
    first = tiles(results)
    notes = [str(note) for note in results.get("notes") or []]
    blocks: list[Block] = [findings(results), unfinished, Tiles(first) if first else "", setting(results), notes]
    return [block for block in blocks if block]


def _models(results: dict[str, Any], pictures: dict[str, Picture]) -> list[Block]:
    table = comparison(results)
    if not table.rows:
        return []
    table.note = " ".join(
        f"{measure['title']} is {measure['explanation']}; "
        f"{'lower' if measure.get('lower_is_better', True) else 'higher'} is better."
        for measure in measures_of(results).values()
        if measure.get("explanation")
    )
    if results.get("agreement"):
        table.note += " First choice and KL divergence compare student and teacher wherever a token is to be predicted."
    table.note += _few_positions(results)
    titles = {"student": "Student" if results.get("teacher") else "Model"}
    names = [
        f"{titles.get(model, model.capitalize())}: {name}."
        for model in models_of(results)
        if (name := _name(results, model))
    ]
    folder, remarks = value_at(results, "twin", "folder"), value_at(results, "twin", "remarks")
    if results.get("twin"):
        alike = "" if remarks else ", with the same beginning and the same data,"
        where = f" (run folder {folder})." if folder else "."
        names += [f"The twin is the same student{alike} trained without a teacher{where}", *(remarks or [])]
    picture = [pictures["comparison"]] if "comparison" in pictures else []
    return [*([" ".join(names)] if names else []), table, *picture]


def _few_positions(results: dict[str, Any]) -> str:
    """A sentence where a set has so few positions for pseudo-perplexity that its value says little by itself."""
    sets = results.get("evaluation")
    names = sets if isinstance(sets, dict) else ()
    counts = {name: value_at(results, "evaluation", name, "pseudo_positions") for name in names}
    few = [f"{count:,} on {name}" for name, count in counts.items() if usable(count) and 0 < count < FEW_POSITIONS]
    if not few:
        return ""
    return (
        f" Pseudo-perplexity scored few positions here ({', '.join(few)}), so that its values are rough; a larger "
        "evaluate.pseudo_perplexity.share scores more."
    )


def _name(results: dict[str, Any], model: str) -> str | None:
    return None if model == "twin" else value_at(results, model, "name")


def _training(results: dict[str, Any], pictures: dict[str, Picture]) -> list[Block]:
    training, backend = results.get("training") or {}, results.get("backend") or {}
    epochs, rings = training.get("epochs"), backend.get("rings") or {}
    final = training.get("final_loss") or {}
    titles = titles_of_terms(results, {"history": [{"loss": final}]})
    losses = [f"{title} {number(final[term])}" for term, title in titles.items() if usable(final.get(term))]
    facts = [
        ("Steps", number(training.get("steps"))),
        ("Epochs", f"{epochs:.4g}" if usable(epochs) else None),
        ("Ended by", training.get("ended_by")),
        ("Tokens", number(training.get("tokens"))),
        ("Time", time_of(training.get("seconds"))),
        ("Throughput", _with_unit(training.get("tokens_per_second"), "tokens/s")),
        ("Waiting for data", _waiting(training.get("data_wait"))),
        ("Evaluation", _evaluation(training)),
        ("Final loss", ", ".join(losses)),
        ("Milestones", _milestones(results.get("milestones"))),
        ("Skipped steps", _skipped(training.get("skipped_steps"))),
        ("Left out for the loss scale", _left_out(training.get("overflow_steps"))),
        ("Backend", ", ".join(filter(None, [backend.get("name"), _with_unit(backend.get("ranks"), "rank(s)")]))),
        ("Collective", backend.get("collective")),
        ("Rows per step", _rows(backend)),
        ("Gradient syncs", number(backend.get("syncs"))),
        (
            "Rings",
            f"{rings['asked']} asked for, {number(rings.get('in_force'))} in force" if rings.get("asked") else None,
        ),
    ]
    drawn: list[Block] = [pictures[name] for name in ("loss", "optimizer", "throughput") if name in pictures]
    return drawn + _facts("Training", facts)


def _waiting(share: Any) -> str | None:
    return f"{percent(share, 1)} of the time" if usable(share) else None


def _evaluation(training: dict[str, Any]) -> str | None:
    """What scoring took, beside the training. Of a run that was resumed that is the scoring of its last process."""
    seconds, trained = training.get("evaluation_seconds"), training.get("seconds")
    if seconds is None or trained is None or not usable(seconds) or not usable(trained):
        return None
    return f"{time_of(seconds)}, {percent(seconds / max(seconds + trained, 1e-9))} of training and evaluation"


def _with_unit(value: Any, unit: str) -> str | None:
    return f"{number(value)} {unit}" if usable(value) else None


def _skipped(count: Any) -> str | None:
    if not usable(count):
        return None
    return f"{number(count)}: loss or gradient not finite, weights left as they were" if count else "none"


def _left_out(count: Any) -> str | None:
    return f"{number(count)} steps, whose gradient overflowed in fp16" if usable(count) and count else None


def _milestones(steps: Any) -> str | None:
    return f"milestones/step-N for N = {', '.join(map(str, steps))}" if steps else None


def _data(results: dict[str, Any]) -> list[Block]:
    corpus = results.get("corpus") or {}
    skipped = [str(item) for item in corpus.get("skipped") or []]
    more = f" and {len(skipped) - MOST_NAMED} more" if len(skipped) > MOST_NAMED else ""
    preparation = corpus.get("preparation") or {}
    prepared = [time_of(preparation.get("seconds")), _with_unit(preparation.get("tokens_per_second"), "tokens/s")]
    facts = [
        ("Name", corpus.get("name")),
        ("Documents", number(corpus.get("documents"))),
        ("Tokens", number(corpus.get("tokens"))),
        ("Rows", _with_unit(corpus.get("rows"), f"of {number(corpus.get('sequence_length'))} tokens")),
        ("Preparation", ", ".join(filter(None, prepared))),
        ("Left out", f"{len(skipped)}: {', '.join(skipped[:MOST_NAMED])}{more}" if skipped else None),
        (
            "Bad records left out",
            f"{number(corpus['bad'])} of {number(corpus['records'])}" if corpus.get("bad") else None,
        ),
        ("Duplicates", described(corpus["duplicates"]) if corpus.get("duplicates") else None),
    ]
    sets = results.get("evaluation") or {}
    keys, head = ["documents", "rows", "tokens", "positions"], ["", "Documents", "Rows", "Tokens", "Scored"]
    note = "The last column counts what is scored: next tokens of a causal model, rows of labelled examples."
    if "pseudo_perplexity" in measures_of(results):
        keys, head = [*keys, "pseudo_positions"], [*head[:-1], "Masked", "Masked singly"]
        note = "The last two columns count the scored positions."
    rows = [[label_of(results, key), *(number((of or {}).get(k)) for k in keys)] for key, of in sets.items()]
    tested = Table(head, rows, note, "Evaluation sets")
    return [*_facts("Corpus", facts), *_sources(results), *([tested] if rows else [])]


def _sources(results: dict[str, Any]) -> list[Block]:
    """The sources of a mixture: what there is of each, and what the run was fed."""
    fed = (results.get("training") or {}).get("sources") or {}
    found = (results.get("corpus") or {}).get("sources") or {}
    rows = []
    for name, source in found.items():
        seen = fed.get(name) or {}
        passes = f"{seen['passes']:.2f}" if "passes" in seen else NONE
        shown = (number(value) for value in (source["documents"], source["rows"], seen.get("rows"), seen.get("tokens")))
        rows.append([name, source["name"], percent(source["weight"], 1), *shown, passes])
    head = ["", "Text", "Share of rows", "Documents", "Rows", "Rows fed", "Tokens fed", "Passes"]
    note = "Tokens fed are the rows fed times the mean of the source, which is exact after whole passes."
    return [Table(head, rows, note, "Sources")] if rows else []


def _again(results: dict[str, Any], config_yaml: str) -> list[Block]:
    environment = [(str(key).replace("_", " "), value) for key, value in (results.get("environment") or {}).items()]
    config: list[Block] = [Code(config_yaml, "Resolved configuration", "yaml")] if config_yaml.strip() else []
    return [*_command(results), *_facts("Environment", environment), *config]


def _command(results: dict[str, Any]) -> list[Block]:
    return [Code(str(results["command"]), language="bash")] if results.get("command") else []
