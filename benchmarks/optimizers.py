"""A step of LAMB beside one of AdamW in torch's fused kernel, for the parameters of ALBERT-base and BERT-base.

Both get the groups of a run and the same gradients, and take turns in one process; medians. The bar is 1.3 times
AdamW's step. `by traffic` is the ratio of what the formulas cannot do without, in passes over all parameters: AdamW
reads weight, gradient and both moments and writes three of them back, 7 passes; LAMB reads the weights for their norms,
keeps the updates until the norms are known, and then reads the updates and reads and writes the weights, 10 passes.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from machine import save, table, title
from torch import nn
from transformers import AlbertConfig, AlbertForPreTraining, BertConfig, BertForPreTraining

from distill.config.compose import optimizer_config
from distill.optim import updates as optim
from distill.runtime.threads import limit_spinning

BAR = 1.3
TRAFFIC = {"adamw": 7, "lamb": 10}
ALBERT = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
MODELS = {
    "albert-base": lambda: AlbertForPreTraining(AlbertConfig(embedding_size=128, **ALBERT)),
    "bert-base": lambda: BertForPreTraining(BertConfig()),
    "tiny": lambda: BertForPreTraining(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)),
}


class Case:
    """A model's parameters with random gradients, and one optimizer for them."""

    def __init__(self, name: str, kind: str, device: str) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = MODELS[name]().to(device)
        for parameter in self.model.parameters():
            parameter.grad = 1e-3 * torch.randn_like(parameter)
        self.optimizer = optim.build(self.model, optimizer_config({"kind": kind, "lr": 1e-6}))
        self.device = device

    def seconds(self) -> float:
        """Of one step."""
        began = self._now()
        self.optimizer.step()
        return self._now() - began

    def _now(self) -> float:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    cases = {kind: Case(name, kind, options.device) for kind in TRAFFIC}
    times: dict[str, list[float]] = {kind: [] for kind in cases}
    for number in range(options.rounds + 1):
        for kind, case in cases.items():
            taken = case.seconds()
            if number:  # the first one makes the state
                times[kind].append(taken)
    medians = {kind: statistics.median(taken) for kind, taken in times.items()}
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in cases["lamb"].model.parameters()),
        "seconds": medians,
        "all": times,
        "ratio": medians["lamb"] / medians["adamw"],
        "traffic": TRAFFIC["lamb"] / TRAFFIC["adamw"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="albert-base,bert-base", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    limit_spinning()  # as a run does
    if options.threads:
        torch.set_num_threads(options.threads)
    results = [measure(name, options) for name in options.models.split(",")]
    print(f"{title()}; milliseconds of a step; the bar is {BAR} times AdamW's\n")
    rows = [
        [
            f"{r['model']}, {r['parameters'] / 1e6:.1f} M parameters",
            *(f"{1000 * r['seconds'][kind]:.2f}" for kind in TRAFFIC),
            f"{r['ratio']:.2f}",
            f"{r['traffic']:.2f}",
        ]
        for r in results
    ]
    print(table(["model", "AdamW, fused", "LAMB", "times AdamW's", "by traffic"], rows))
    save(options.json, results)


if __name__ == "__main__":
    main()
