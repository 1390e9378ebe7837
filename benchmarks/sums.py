"""On-policy distillation against other ways, on sums whose answers are checked exactly.

    python -m benchmarks.sums                       # six ways, three seeds, equal updates and equal seconds
    python -m benchmarks.sums on-policy --seeds 1   # one way

A Llama of four layers learns sums of two numbers of three digits, answers written from the last digit on, from many
examples. A student of its first and last layer has learned from a hundred for 50 steps (the start of all ways), and
learns on from the same hundred: from their answers (fine-tuning), from answers that the teacher writes to them
(sequence-level), from the teacher's distributions on their answers (supervised), on its own answers (on-policy), on
both in turn (mixed), or on its own with fewer and fewer first tokens of the text (seeded). A row has the fraction of
2,000 other sums that the student answers without a mistake.
"""

import json
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.common import Results, digest_of, execute, parser_of

CHARACTERS = [*"0123456789+="]
TEACHER = "{hidden_size:128,num_hidden_layers:4,num_attention_heads:4,num_key_value_heads:4,intermediate_size:384}"
MANY, FEW, UNSEEN = 200_000, 100, 2_000  # sums of the teacher, of the student, to check
EVERY = (
    "+recipe=distilgpt2_gutenberg corpus=jsonl corpus.prompt=prompt corpus.field=completion corpus.sequence_length=16 "
    "evaluate=heldout evaluate.sets=[] precision=fp32 train.sequences_per_step=64 train.batch_size=64 "
    "optimizer.lr=1e-3 train.epochs=null"
)
NEW = "objective=clm teacher=none student=new student.architecture=llama student.dropout=0"
FROM_TEACHER = "objective=gkd objective.on_policy.max_new_tokens=6 objective.on_policy.group_size=64"
WAYS = {
    "fine-tuning": "objective=clm teacher=none",
    "sequence-level": "objective=clm teacher=none",
    "supervised": f"{FROM_TEACHER} objective.on_policy.fraction=0",
    "mixed": f"{FROM_TEACHER} objective.on_policy.fraction=0.5",
    "seeded": f"{FROM_TEACHER} objective.on_policy.fraction=1 objective.on_policy.seeded_tokens={{start:4,end:0}}",
    "on-policy": f"{FROM_TEACHER} objective.on_policy.fraction=1",
}


def sums(path: Path, count: int, seed: int, unseen: bool = False) -> Path:
    """Examples with prompt and completion; a tenth of all pairs of numbers is `unseen` by training."""
    rng, lines = random.Random(seed), list[str]()
    while len(lines) < count:
        one, other = rng.randrange(1000), rng.randrange(1000)
        if ((7 * one + 13 * other) % 10 == 0) == unseen:
            example = {"prompt": f"{one:03}+{other:03}=", "completion": str(one + other)[::-1]}
            lines.append(json.dumps(example))
    path.write_text("\n".join(lines) + "\n")
    return path


def save_tokenizer(folder: Path) -> Path:
    """A token for each character."""
    words = {word: number for number, word in enumerate(["<pad>", "</s>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()  # without it blanks stand between the digits of an answer
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    return folder


def written(model: Path, prompts: Path, output: Path) -> list[dict[str, str]]:
    """The likeliest answers of a model to the prompts of a file, in a file of their own."""
    if not output.is_file():
        options = ["max_new_tokens=6", "temperature=0", "group_size=500"]
        files = [f"model={model}", f"input={prompts}", f"output={output}"]
        command = [sys.executable, "-m", "distill", "generate", *files, *options]
        subprocess.run(command, check=True, capture_output=True)
    return [json.loads(line) for line in output.read_text().splitlines()]


@dataclass(frozen=True)
class Sums:
    """Runs and files in one folder; what is there is not made again."""

    work: Path
    until: dict[str, str]  # what a way is trained until, by the name of what is equal
    teacher_steps: int

    def run(self, name: str, settings: str) -> Path:
        """The folder of a finished run."""
        arguments = [*EVERY.split(), *settings.split(), f"data.cache={self.work / 'cache'}"]
        execute(folder := self.work / f"{name}-{digest_of(arguments)}", arguments)
        return folder

    def right(self, run: Path) -> float:
        """The fraction of unseen sums that the student of a run answers without a mistake."""
        asked = self.examples("unseen", UNSEEN, 3, unseen=True)
        answers = {line["prompt"]: line["completion"] for line in written(run, asked, run / "answers.jsonl")}
        examples = [json.loads(line) for line in asked.read_text().splitlines()]
        return statistics.mean(answers.get(one["prompt"]) == one["completion"] for one in examples)

    def examples(self, name: str, count: int, seed: int, unseen: bool = False) -> Path:
        path = self.work / f"{name}.jsonl"
        return path if path.is_file() else sums(path, count, seed, unseen)

    def teacher(self) -> Path:
        many, tokenizer = self.examples("many", MANY, 1), save_tokenizer(self.work / "tokenizer")
        new = f"{NEW} student.config={TEACHER} student.tokenizer={tokenizer}"
        return self.run("teacher", f"{new} corpus.path={many} train.steps={self.teacher_steps}")

    def start(self, seed: int) -> Path:
        """The student that all ways begin with."""
        few = self.examples(f"few-{seed}", FEW, 10 + seed)
        layers = f"objective=clm teacher=pretrained teacher.path={self.teacher()} student=layers student.layers=[0,3]"
        return self.run(f"start-{seed}", f"{layers} student.dropout=0 corpus.path={few} seed={seed} train.steps=50")

    def way(self, name: str, seed: int, equal: str) -> Path:
        teacher, few = self.teacher(), self.examples(f"few-{seed}", FEW, 10 + seed)
        if name == "sequence-level":
            answers = self.work / f"written-{teacher.name}-{seed}.jsonl"
            written(teacher, few, answers)
            few = answers
        pair = f"student=pretrained student.path={self.start(seed)} corpus.path={few} seed={seed}"
        of_teacher = "" if "teacher=none" in WAYS[name] else f"teacher=pretrained teacher.path={teacher}"
        return self.run(f"{name}-{seed}", f"{WAYS[name]} {pair} {of_teacher} {self.until[equal]}")


def main() -> None:
    parser = parser_of(__doc__, "sums")
    parser.add_argument("ways", nargs="*", help=f"of {', '.join(WAYS)}; all where none is given")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--teacher-steps", type=int, default=6000, help="of the teacher's own training")
    parser.add_argument("--steps", type=int, default=300, help="of each way at equal updates")
    parser.add_argument("--minutes", type=float, default=0.5, help="of each way at equal seconds")
    parser.add_argument("--work", type=Path, default=Path("runs/sums"), help="folder of the runs")
    options = parser.parse_args()
    if unknown := {*options.ways} - {*WAYS}:
        parser.error(f"there is no {min(unknown)}; choose among {', '.join(WAYS)}")
    options.work.mkdir(parents=True, exist_ok=True)
    until = {"updates": f"train.steps={options.steps}", "seconds": f"train.minutes={options.minutes}"}
    results, sets = Results(options.out), Sums(options.work.resolve(), until, options.teacher_steps)
    results.row(way="teacher", right=sets.right(sets.teacher()))
    results.row(way="start", right=statistics.mean(starts := [sets.right(sets.start(n)) for n in range(options.seeds)]))
    for equal in sets.until:
        for name in options.ways or WAYS:
            runs = [sets.way(name, seed, equal) for seed in range(options.seeds)]
            right = [sets.right(run) for run in runs]
            steps = [json.loads((run / "results.json").read_text())["training"]["steps"] for run in runs]
            gained = [one - start for one, start in zip(right, starts, strict=True)]
            results.row(
                way=name,
                equal=equal,
                right=statistics.mean(right),
                gained=statistics.mean(gained),
                steps=statistics.mean(steps),
                right_by_seed=right,
            )
    results.where()


if __name__ == "__main__":
    main()
