"""How fast a step is, in four modes: `python -m benchmarks.step MODE --help`, from the root of a checkout.

plain        beside a plain step with full logits, and the floor
peers        beside TRL's and DistillKit's
objective    the losses of two heads alone
perplexity   pseudo-perplexity beside the plain loop and minicons
"""

import argparse
from importlib import import_module

from benchmarks.common import Results, add_out

MODES = {
    "plain": "beside_plain",
    "peers": "beside_peers",
    "objective": "objective",
    "perplexity": "pseudo_perplexity",
}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.step", description=__doc__, formatter_class=raw)
    modes = parser.add_subparsers(dest="mode", required=True)
    modules = {mode: import_module(f"benchmarks.step.{name}") for mode, name in MODES.items()}
    for mode, module in modules.items():
        own = modes.add_parser(mode, description=module.__doc__, formatter_class=raw)
        add_out(own, f"step-{mode}")
        module.add_options(own)
    options = parser.parse_args()
    results = Results(options.out)
    modules[options.mode].run(options, results)
    results.where()


if __name__ == "__main__":
    main()
