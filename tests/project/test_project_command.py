"""The command `python -m distill.project` from end to end, in this process: what it prints, and what it refuses."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from job import ROOT
from transformers import AlbertConfig, BertConfig

from distill.project.__main__ import answer, check_settings, main, parse, settings
from distill.project.workload import Workload, workload_of

RUN = ("+recipe=distilbert_gutenberg", "precision=bf16")


@pytest.fixture(scope="module")
def bert_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with bert-base's configuration, and nothing else."""
    folder = tmp_path_factory.mktemp("bert-base")
    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """As in the command, which shows no messages of what it composes, whatever another test has set up."""
    caplog.set_level(logging.WARNING, "distill")


def work_of(*arguments: str, tokens: float | None = None) -> Workload:
    config = settings(parse(list(arguments)))
    check_settings(config)
    return workload_of(config, tokens)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that it ends with."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def test_the_benchmarks_own_scale(bert_base: Path) -> None:
    """bert-base, its six layers, rows of 512 that all reach the head: counted from the configuration alone."""
    work = work_of("+recipe=distilbert_gutenberg", "scale=paper", f"teacher.path={bert_base}")
    teacher, student = work.teachers[0].shape, work.student
    assert teacher.parameters == 109_514_298 and student.parameters == 66_985_530
    assert teacher.encoder_operations == 2 * student.encoder_operations == 12 * 512 * (24 * 768**2 + 4 * 512 * 768)
    assert student.head_operations == 2 * 768 * (30522 + 768)
    assert (work.positions, work.batch_size, work.accumulate, work.row_bytes) == (512.0, 16, 50, 1024)


def test_a_student_without_a_teacher() -> None:
    """ALBERT-base as the published run had it, with the vocabulary that its tokenizer will have."""
    work = work_of("+recipe=albert_pretrain", "scale=aws", "precision=bf16")
    assert work.student.parameters == 11_813_810 and work.student.vocabulary == 30_000
    assert (work.student.layers, work.student.blocks, work.teachers) == (12, 1, ())
    assert work.positions == pytest.approx(0.15 * 512) and work.rows_of_step(64) == 4096
    assert (work.compression, work.overlaps, work.steps) == ("fp16", False, 125_000)


def test_settings_change_the_run(bert_base: Path, tmp_path: Path) -> None:
    plain = work_of(*RUN, tokens=1e6)
    assert plain.corpus_rows == 5000  # of the scale, fewer than the tokens' 7,656
    assert work_of(*RUN, "corpus.rows=null", tokens=1e6).corpus_rows == 7657
    assert plain.score_rows == 3 * 128 and not plain.score_assumed  # a fiftieth is held out, 157 rows; and two sets
    twin = work_of("+recipe=distilbert_gutenberg_twin", "precision=bf16")
    assert twin.teachers == () and twin.student == plain.student
    cached = work_of(*RUN, "teacher.cache.top_k=8", "objective.masking.static=true", "objective.cosine.weight=0")
    assert cached.row_bytes == plain.row_bytes + 0.3 * 128 * 34
    divided = work_of(*RUN, "backend=fsdp", "backend.sync=every", "backend.shard_teacher=false")
    assert (divided.shard_student, divided.shard_teacher, divided.sync) == (True, False, "every")
    assert work_of(*RUN, "optimizer=lamb").optimizer_streams == 11
    AlbertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128).save_pretrained(
        tmp_path
    )
    own = work_of("+recipe=bert_pretrain", "student=pretrained", f"student.path={tmp_path}")
    assert own.student.layers == 2 and own.student.vocabulary == 30_000
    several = [
        "teacher=several",
        f"+teacher.members.a={{path: {bert_base}}}",
        f"+teacher.members.b={{path: {bert_base}}}",
    ]
    assert len(work_of(*RUN, *several, "student.layers=[0]").teachers) == 2


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("half: {like: p5.48xlarge, gpus: 4, price: 20}\n")
    given = (*RUN, "nodes=1,2", "machine=half,p4d.24xlarge", f"machines={file}", "tokens=3e9", "corpus.rows=null")
    assert main([*given, "hours=1000", "budget=1e6"]) == 0
    printed = capsys.readouterr().out
    assert "teacher 3.0 M, 4 x 192; student 2.1 M, 2 x 192" in printed
    lines = [line.split() for line in printed.splitlines() if re.match(r"half |p4d", line)]
    assert [line[:3] for line in lines] == [["half", "1", "4"], ["half", "2", "8"], ["p4d.24xlarge", "1", "8"],
                                            ["p4d.24xlarge", "2", "16"]]  # fmt: skip
    assert "Fastest within 1000 hours and 1e+06 of budget: " in printed and "Cheapest within" in printed
    assert "Assumed of half: " in printed and "Ranges: " in printed and "train.rows_per_step=NUMBER" in printed


def test_without_nodes_the_table_goes_to_4096_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "machine=p5.48xlarge", "train.rows_per_step=4096"]) == 0
    printed = capsys.readouterr().out
    found = [int(line.split()[2].replace(",", "")) for line in printed.splitlines() if line.startswith("p5.48xlarge")]
    assert found == [8 * 2**power for power in range(10)]
    assert "More GPUs take more rows" not in printed


def test_what_does_not_fit_is_said_with_its_cure(bert_base: Path) -> None:
    large = f"+recipe=distilbert_gutenberg scale=paper teacher.path={bert_base} precision=fp16 tokens=1e9"
    printed = answer(parse([*large.split(), "machine=p3.16xlarge", "nodes=4", "train.batch_size=256"]))
    line = next(line for line in printed.splitlines() if line.startswith("memory: "))
    assert "on 4 x p3.16xlarge a GPU needs" in line and "and has 14.5" in line
    assert "would fit with train.batch_size=" in line and "Nothing of this fits into memory." in printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("nodes=0",), "nodes=0 is no number of nodes: give 1 or more"),
        (("nodes=2,x",), "nodes=2,x is no number of nodes"),
        (("machine=p6",), "machine=p6 is not known: choose one of p3.16xlarge"),
        (("machines=/no/such.yaml",), "machines=/no/such.yaml cannot be read"),
        (("hours=-1",), "hours=-1 is no such number: give one above 0"),
        (("budget=much",), "budget=much is no such number"),
        (("corpus.rows=null",), "tokens=NUMBER, or set corpus.rows or train.steps"),
        (("train.stepz=3",), "train.stepz is not known (did you mean train.steps"),
        (("--force",), "--force is no option of this command"),
        (("teacher=pretrained", "teacher.path=/no/model"), "teacher.path=/no/model has no configuration to read"),
        (("teacher=custom", "teacher._target_=x.y", "teacher.tokenizer=z"), "teacher.kind=custom: what a callable"),
        (("machine=p3.16xlarge",), "machine=p3.16xlarge has no rate for bf16, only for fp32, fp16: set precision=fp16"),
        (("train.epochs=null",), "give the run an end"),
    ],
)
def test_wrong_input_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in refusal(capsys, *RUN, *arguments)


def test_a_machine_with_a_missing_field(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "machines.yaml"
    file.write_text("mine: {title: Mine, gpus: 8}\n")
    assert "mine has no memory: add it (GB of each GPU)" in refusal(capsys, *RUN, f"machines={file}")


def test_a_chain_and_no_recipe_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a chain of runs: project its stages" in refusal(capsys, "+recipe=albert_chain")
    assert "there is no recipe/nonsense" in refusal(capsys, "+recipe=nonsense")
    assert main([]) == 2 and main(["--help"]) == 0
    assert "usage: python -m distill.project" in capsys.readouterr().out


def test_the_readme_names_what_the_command_takes() -> None:
    section = (ROOT / "README.md").read_text().partition("## Before you rent")[2].partition("\n## ")[0]
    assert section
    for name in ("nodes=", "machine=", "machines=", "tokens=", "hours=", "budget="):
        assert name in section


def published() -> Any:
    return __import__("projection")


def test_published_hours_lie_within_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """ALBERT-base on 8 V100s to 64 (144, 75, 38 and 20 hours): the usual case is within 25 %, the range holds them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for check in published().albert_checks():
        assert check.found.hours.least <= check.hours <= check.found.hours.most, check
        assert check.found.hours.usual == pytest.approx(check.hours, rel=0.25), check


def test_the_distilbert_benchmark_from_four_of_its_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    rows = {case: (model, minutes) for case, model, minutes, given in published().distilbert_checks() if not given}
    assert rows["8 nodes, Horovod"][0] == pytest.approx(37, rel=0.02)
    assert rows["8 nodes, Horovod, multi-ring"][0] == pytest.approx(32, rel=0.08)
