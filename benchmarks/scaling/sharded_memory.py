"""Peak memory of each rank with a teacher that is divided between 1, 2 and 4 processes, and what larger ones take.

    python benchmarks/scaling/sharded_memory.py                  # 1.1 B parameters, 2.2 GB on disk while it runs
    python benchmarks/scaling/sharded_memory.py --command        # and the peak of each rank of `python -m distill`
    python benchmarks/scaling/sharded_memory.py --processes ""   # the arithmetic for 80 GB alone

A Llama of random bf16 weights is written shard by shard. Each rank then does what a run does: load, digest, division,
check, format, and a forward of the teacher with the logits of every eighth position. The peak of each phase is what
the system says (VmHWM, begun anew for each phase), pages of mapped files included; beside it stands what was no page of
a file. The floor is an interpreter with the libraries loaded, this rank's part of the weights, and embeddings, head and
one block whole, in the saved format. `single` is the same without division: one process that holds the model in fp32.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.common import save, table, title
from benchmarks.scaling.cluster import Cluster, end_rank
from benchmarks.scaling.cost_model.memory import KEPT, sharded_student_bytes, sharded_teacher_bytes
from distill.config.settings import BackendConfig, PrecisionConfig
from distill.distributed import join_ranks
from distill.models.check import check_model
from distill.models.identity import saved_digest
from distill.models.kind import CAUSAL
from distill.models.language_model import OutputSpec
from distill.models.load import load_pretrained, load_tokenizer
from distill.runs.setup import setup_teacher, shard_models
from distill.teacher.members import ONLY, Member

GB = 1e9
WIDEST = 3  # what a gated feed-forward layer holds at once: gate, its activation, and the other product


class Shape(NamedTuple):
    """A Llama: blocks, widths of the residual stream, of the feed-forward layer and of the keys, and vocabulary."""

    blocks: int
    width: int
    inner: int
    keys: int
    vocabulary: int

    @property
    def root(self) -> int:
        """Parameters outside of the blocks: embeddings, output embedding and the last norm."""
        return 2 * self.vocabulary * self.width + self.width

    @property
    def block(self) -> int:
        """Parameters of a block: queries and output, keys and values, feed-forward layer, two norms."""
        attention = 2 * self.width * (self.width + self.keys)
        return attention + 3 * self.width * self.inner + 2 * self.width

    @property
    def whole(self) -> int:
        return self.root + self.blocks * self.block


SHAPES = {
    "0.3 B": Shape(4, 2048, 5632, 256, 32_000),
    "1.1 B": Shape(22, 2048, 5632, 256, 32_000),  # that of TinyLlama
    "7 B": Shape(32, 4096, 11_008, 4096, 32_000),  # Llama 2
    "70 B": Shape(80, 8192, 28_672, 1024, 128_256),  # Llama 3
    "405 B": Shape(126, 16_384, 53_248, 1024, 128_256),
}


def teacher_bytes(shape: Shape, ranks: int, tokens: int, weight: int = 2) -> float:
    """The most that a GPU holds of a frozen, divided model and its forward.

    The inside of a block is its input, its output and what its feed-forward layer holds.

    Args:
        tokens: of one forward on one GPU.
        weight: bytes of a number, of weights and activations alike.
    """
    inside = tokens * (2 * shape.width + WIDEST * shape.inner)
    return sharded_teacher_bytes(shape.whole, shape.root, shape.block, inside, ranks, weight)


def student_bytes(shape: Shape, ranks: int, tokens: int, every: bool) -> float:
    """The most that a GPU holds of a trained, divided model that computes in bf16.

    Args:
        tokens: of one micro-batch on one GPU.
    """
    kept = KEPT * tokens * shape.blocks * shape.width
    return sharded_student_bytes(shape.whole, shape.root, shape.block, kept, ranks, every)


def make_teacher(folder: Path, shape: Shape) -> None:
    """Write a model of random weights, one file for each block, so that no more than a block is ever in memory."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.inner,
        num_hidden_layers=shape.blocks, num_attention_heads=shape.width // 64, num_key_value_heads=shape.keys // 64,
        head_dim=64, max_position_embeddings=2048, tie_word_embeddings=False, dtype=torch.bfloat16,
        architectures=["LlamaForCausalLM"], pad_token_id=None, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        empty = LlamaForCausalLM(config).state_dict()
    files: dict[str, str] = {}
    for name in empty:
        part = name.split(".")[2] if name.startswith("model.layers.") else "root"
        files[name] = f"model-{part}.safetensors"
    generator = torch.Generator().manual_seed(0)
    for file in sorted(set(files.values())):
        named = {name: _random(value.shape, generator) for name, value in empty.items() if files[name] == file}
        save_file(named, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 2 * shape.whole}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    _tokenizer(shape.vocabulary).save_pretrained(folder)


def _random(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def _tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Bytes, and tokens that no text has, up to the size of the vocabulary."""
    pieces = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"<unused {i}>" for i in range(size - len(pieces))]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


class Peaks:
    """The most memory that this process had in each phase: all of it, and without pages of files; in bytes."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        over, anonymous = threading.Event(), [_status("RssAnon")]

        def sample() -> None:
            while not over.wait(0.005):
                anonymous.append(_status("RssAnon"))

        sampler, began = threading.Thread(target=sample), time.perf_counter()
        sampler.start()
        try:
            yield
        finally:
            over.set()
            sampler.join()
        seconds = time.perf_counter() - began
        self.found[name] = {
            "resident": _status("VmHWM"), "anonymous": max(anonymous), "at rest": _status("VmRSS"), "seconds": seconds,
        }  # fmt: skip


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name}:"))


def _rank(options: argparse.Namespace) -> None:
    """What one rank does with its teacher; rank 0 prints the peaks of all."""
    torch.set_num_threads(1)
    peaks, length = Peaks(), options.tokens
    with peaks.phase("interpreter"):
        name = options.rank
        ranks = join_ranks(BackendConfig(name=name, device="cpu", timeout=600.0, shard_student=False))
    divided = ranks.shards_teacher
    with peaks.phase("load"):
        model = load_pretrained("teacher.path", options.folder, CAUSAL, mapped=divided).requires_grad_(False).eval()
    with peaks.phase("digest"):
        saved_digest(options.folder, model, load_tokenizer("teacher.path", options.folder, CAUSAL), options.cache)
        ranks.barrier()
    with peaks.phase("divide and check"):
        if divided:
            member = Member(ONLY, 1.0, model, "teacher")
            shard_models(ranks, [member], None, {"teacher": CAUSAL}, length)
        else:
            check_model(model, "teacher", CAUSAL)
        ranks.barrier()
    teacher = setup_teacher(model, PrecisionConfig(teacher="bf16"), ranks)
    ids = torch.randint(options.vocabulary, (options.rows, length))
    spec = OutputSpec(True, torch.arange(0, ids.numel(), 8))
    for name in ("forward", "second forward"):
        with peaks.phase(name), torch.no_grad():
            found = teacher({"input_ids": ids}, None, spec)
            assert found.head_rows is not None and teacher.logits(found.head_rows, options.vocabulary).isfinite().all()
            ranks.barrier()
    everyone = ranks.gather(peaks.found)
    end_rank(ranks, everyone)


def _wrapped(command: list[str]) -> None:
    """Run a command and print the most memory that it had, in bytes, as the last line."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(1)
    Path(os.environ["PEAKS"], os.environ["RANK"]).write_text(str(1024 * usage.ru_maxrss))


def command_peaks(folder: Path, cache: Path, processes: int, backend: str, options: argparse.Namespace) -> list[int]:
    """The peak of each rank of a real run of one step with that teacher, scored before it ends; in bytes."""
    books = cache / "books"
    books.mkdir(exist_ok=True)
    words = ("the", "of", "and", "to", "in", "that", "it", "was", "his", "her", "with", "as", "had")
    text = (f"{words[i * i % 13]} {words[i % 11]}" + ("." if i % 7 == 0 else "") for i in range(60_000))
    (books / "book.txt").write_text("\n".join(text))
    run = cache / f"run-{backend}-{processes}"
    settings = [
        "+recipe=distilgpt2_gutenberg", f"corpus.path={books}", f"data.cache={cache / 'tokens'}", "data.workers=1",
        f"corpus.sequence_length={options.tokens}", "corpus.cross_documents=false", "corpus.max_sequences=64",
        "corpus.heldout=0.2", f"teacher.path={folder}", "precision=bf16", "student=gpt2",
        "student.config={n_embd:64,n_layer:2,n_head:2}",
        "objective.cosine.weight=0",
        f"train.batch_size={options.rows}", "train.accumulate=1", "train.epochs=null", "train.steps=1",
        "evaluate=heldout", "evaluate.max_sequences=8",
        f"backend={backend}", "backend.device=cpu", "backend.timeout=600", f"hydra.run.dir={run}",
        *["backend.shard_student=false"] * (backend == "fsdp"),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as peaks, Cluster(processes, limit=1800) as cluster:
        wrap = [sys.executable, str(Path(__file__).resolve()), "--wrapped"]
        cluster.run([*wrap, sys.executable, "-m", "distill", *settings], PEAKS=peaks)
        return [int(Path(peaks, str(rank)).read_text()) for rank in range(processes)]


def phase_peaks(folder: Path, cache: Path, processes: int, backend: str, options: argparse.Namespace) -> Any:
    """Of each rank its peaks by phase."""
    shape = SHAPES[options.shape]
    given: list[object] = ["--rank", backend, "--folder", folder, "--cache", cache, "--tokens", options.tokens]
    given += ["--rows", options.rows, "--vocabulary", shape.vocabulary]
    with Cluster(processes, limit=1800) as cluster:
        return cluster.run_json("scaling/sharded_memory.py", *given)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of the first table."""
    kinds = [("fsdp", int(number)) for number in options.processes.split(",") if number]
    kinds += [("single", 1)] * options.single
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.temporary) as name:
        folder, cache = Path(name, "teacher"), Path(name, "cache")
        folder.mkdir()
        cache.mkdir()
        if kinds:
            make_teacher(folder, SHAPES[options.shape])
        for backend, processes in kinds:
            fresh = Path(name, f"cache-{backend}-{processes}")  # so that each computes the digest
            fresh.mkdir()
            ranks = phase_peaks(folder, fresh, processes, backend, options)
            row: dict[str, Any] = {"backend": backend, "processes": processes, "ranks": ranks}
            if options.command:
                row["command"] = command_peaks(folder, cache, processes, backend, options)
            found.append(row)
            print(f"{backend} {processes}: {json.dumps(row)}", file=sys.stderr, flush=True)
    return found


def measured_table(results: list[dict[str, Any]], shape: Shape) -> str:
    """The largest peak of any rank, by phase, beside the floor; in GB."""
    phases = list(results[0]["ranks"][0])
    command = "command" in results[0]
    head = ["ranks", *phases, "the most", "of it no page of a file", "floor", *["`python -m distill`"] * command]
    rows = []
    for each in results:
        peaks = [max(rank[phase]["resident"] for rank in each["ranks"]) for phase in phases]
        anonymous = max(rank[phase]["anonymous"] for rank in each["ranks"] for phase in phases)
        single = each["backend"] == "single"
        weight = 4 if single else 2
        around = 0 if single else shape.root + shape.block
        floor = peaks[0] + weight * (shape.whole / each["processes"] + around)
        row = [*peaks, max(peaks), anonymous, floor, *([max(each["command"])] if command else [])]
        rows.append([f"{each['backend']} {each['processes']}", *(f"{value / GB:.2f}" for value in row)])
    return table(head, rows)


def teacher_table(tokens: int) -> str:
    """What a frozen teacher takes of each GPU; in GB."""
    ranks = (8, 16, 64)
    rows = []
    for name in ("7 B", "70 B", "405 B"):
        shape = SHAPES[name]
        parts = [2 * shape.whole, 2 * shape.root, 2 * shape.block]
        values = [*parts, *(teacher_bytes(shape, number, tokens) for number in ranks)]
        rows.append([name, *(f"{value / GB:.1f}" for value in values)])
    return table(["teacher", "weights", "outside of blocks", "a block", *(f"N = {number}" for number in ranks)], rows)


def student_table(tokens: int) -> str:
    """What a divided student takes of each GPU; in GB."""
    ranks = (8, 16, 64)
    rows = []
    for name in ("1.1 B", "7 B", "70 B"):
        for every in (False, True):
            values = [student_bytes(SHAPES[name], number, tokens, every) for number in ranks]
            rows.append([f"{name}, sync={'every' if every else 'window'}", *(f"{value / GB:.1f}" for value in values)])
    return table(["student", *(f"N = {number}" for number in ranks)], rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.1 B", choices=SHAPES)
    parser.add_argument("--processes", default="1,2,4", help="numbers of ranks; empty: only the arithmetic")
    parser.add_argument("--single", action=argparse.BooleanOptionalAction, default=True, help="one process as well")
    parser.add_argument("--command", action="store_true", help="also run `python -m distill` for a step")
    parser.add_argument("--rows", type=int, default=8, help="of a forward")
    parser.add_argument("--tokens", type=int, default=128, help="of a row")
    parser.add_argument("--temporary", type=Path, help="where the teacher is written; default: that of temporary files")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    for hidden in ("--rank", "--folder", "--cache"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--vocabulary", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    if sys.argv[1:2] == ["--wrapped"]:
        return _wrapped(sys.argv[2:])
    options = _options()
    if options.rank:
        return _rank(options)
    results = measure(options)
    print(title())
    if results:
        shape = SHAPES[options.shape]
        print(f"\n{shape.whole / 1e9:.2f} B parameters, {options.rows} x {options.tokens} positions; GB\n")
        print(measured_table(results, shape))
    print("\nA frozen teacher in bf16 on GPUs, forwards of 16,384 tokens each; GB per GPU\n")
    print(teacher_table(16_384))
    print("\nA trained student with AdamW, computing in bf16, micro-batches of 2,048 tokens each; GB per GPU\n")
    print(student_table(2048))
    save(options.json, results)


if __name__ == "__main__":
    main()
