"""How many of a draft's tokens its teacher accepts in speculative decoding, after training on-policy and otherwise.

    DISTILL_DATA=DATA python -m benchmarks.headline rows narrower --seeds 1       # the pair, if it is not there
    DISTILL_DATA=DATA python -m benchmarks.acceptance TEACHER DRAFT               # its folders, below runs/headline
    DISTILL_DATA=DATA python -m benchmarks.acceptance TEACHER DRAFT optimizer.lr=1e-4    # settings go to every way

The draft is SmolLM2's student. Each way trains it further, as long as the others and by the same divergence:
on books (off-policy), on completions of books that it writes itself (on-policy), or on both in turn (mixed). Seed 1
gives them other sequences than those that the draft has read with seed 0.

Speculative decoding keeps a token x that the draft q proposes with the probability min(1, p(x) / q(x)), in the mean the
sum over x of min(p(x), q(x)) (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"). Its
texts are distributed as the teacher p writes, so the mean is taken over texts of the teacher: completions of 128
beginnings from books that nobody has learned from, the same for all ways. A row has it in percent with its 95 %
interval over the prompts, and how far it is beyond the start and `off-policy`, text by text.
"""

import gzip
import json
import math
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import Results, digest_of, execute, parser_of
from distill.models.loaded import LoadedModel, load_model

WRITES = "objective=gkd objective.jsd.beta=0 objective.on_policy.prompt_tokens=32 objective.on_policy.max_new_tokens=64"
WAYS = {
    "off-policy": "",
    "mixed": f"{WRITES} objective.on_policy.fraction=0.5",
    "on-policy": f"{WRITES} objective.on_policy.fraction=1",
}
AGAIN = (
    "+recipe=distil_smollm2 student=pretrained student.layers=null student.intermediate_size=null student.refit=false "
    "student.frozen=[embeddings] corpus.fallback=true seed=1 evaluate.samples=0 evaluate.sets=[books] "
    "evaluate.max_sequences=8"
)
PROMPTS, CHARACTERS, NEW_TOKENS = 128, 150, 64


def write_prompts(path: Path) -> Path:
    """Beginnings of paragraphs of unseen books."""
    paragraphs = list[str]()
    for book in sorted((Path(os.environ["DISTILL_DATA"]) / "gutenberg" / "heldout").glob("*.txt.gz")):
        text = gzip.decompress(book.read_bytes()).decode("utf-8", "replace").replace("\r\n", "\n")
        found = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
        paragraphs += [one for one in found if len(one) > 3 * CHARACTERS]
    chosen = random.Random(0).sample(paragraphs, PROMPTS)
    lines = [json.dumps({"text": one[:CHARACTERS].rpartition(" ")[0]}) for one in chosen]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_texts(teacher: Path, work: Path) -> list[dict[str, str]]:
    """The prompts with what the teacher writes behind them, at temperature 1."""
    if not (output := work / f"texts-{digest_of([str(teacher.resolve())])}.jsonl").is_file():
        files = [f"model={teacher}", f"input={write_prompts(work / 'prompts.jsonl')}", f"output={output}"]
        command = [sys.executable, "-m", "distill", "generate", *files, f"max_new_tokens={NEW_TOKENS}"]
        subprocess.run(command, check=True)
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


@torch.no_grad()
def probabilities(model: LoadedModel, ids: Tensor, first: int) -> Tensor:
    """[n, V], of each token of the completion, which begins at `first`."""
    logits: Tensor = model.model(input_ids=ids[None]).logits[0, first - 1 : -1]
    return logits.float().softmax(-1)


def accepted(teacher: LoadedModel, draft: LoadedModel, texts: list[dict[str, str]]) -> list[float]:
    """Of each text, the percentage of the draft's tokens that the teacher keeps on average."""
    found = list[float]()
    for text in texts:
        prompt, completion = (teacher.tokenizer(text[part]).input_ids for part in ("prompt", "completion"))
        ids = torch.tensor([*prompt, *completion])
        p, q = (probabilities(model, ids, len(prompt)) for model in (teacher, draft))
        found.append(100 * float(torch.minimum(p, q).sum(-1).mean()))
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval."""
    return statistics.mean(values), 1.96 * statistics.stdev(values) / math.sqrt(len(values))


def main() -> None:
    parser = parser_of(__doc__, "acceptance")
    parser.add_argument("teacher", type=Path, help="the run that the draft had for its teacher")
    parser.add_argument("draft", type=Path, help="the run that all ways go on from")
    parser.add_argument("words", nargs="*", metavar="WAY or SETTING=VALUE", help=f"ways: {', '.join(WAYS)}")
    parser.add_argument("--minutes", type=float, default=10.0, help="of training, for each way")
    parser.add_argument("--work", type=Path, default=Path("runs/acceptance"), help="folder of the runs")
    options = parser.parse_args()
    settings = [word for word in options.words if "=" in word]
    ways = [word for word in options.words if "=" not in word] or list(WAYS)
    if unknown := {*ways} - {*WAYS}:
        parser.error(f"there is no {min(unknown)}; choose among {', '.join(WAYS)}")
    if "DISTILL_DATA" not in os.environ:
        parser.error("set DISTILL_DATA to a folder with gutenberg/heldout")
    results, work = Results(options.out), options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    pair = [f"teacher.path={options.teacher.resolve()}", f"student.path={options.draft.resolve()}"]
    teacher, texts = load_model(options.teacher), write_texts(options.teacher, work)
    first: dict[str, list[float]] = {}
    for way in ("start", *ways):
        folder = options.draft
        if way != "start":
            arguments = [*AGAIN.split(), *WAYS[way].split(), *pair, f"train.minutes={options.minutes}", *settings]
            execute(folder := work / f"{way}-{digest_of(arguments)}", arguments)
        found = accepted(teacher, load_model(folder), texts)
        row = dict(zip(("accepted", "plus_minus"), interval(found), strict=True))
        for other, of_other in first.items():
            gained, error = interval([one - before for one, before in zip(found, of_other, strict=True)])
            row |= {f"beyond {other}": gained, f"beyond {other}, plus_minus": error}
        if way in ("start", "off-policy"):
            first[way] = found
        results.row(way=way, **row, by_text=found)
    results.where()


if __name__ == "__main__":
    main()
