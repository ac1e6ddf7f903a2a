"""The table of stock models: shipped rules, parameters, and what the coordinate check says.

    python benchmarks/stock_models.py [--out param_groups/models.md] [--processes 2] [MODEL ...]

Parameters and rules are of the library's own size (on the meta device, untied), verdicts of small
models of widths 64 to 512 (measure/stock.py), 3 seeds, 4 steps of Adam. About ten minutes on two
cores; nothing is downloaded.
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

from measure.coordinate_check import summary
from param_groups import assign, rules_for
from param_groups.check import stock
from param_groups.check.measuring import measure
from param_groups.check.slopes import fit
from param_groups.stock import rules as shipped
from training.files import write_text

HEAD = """# Stock models

Written by `python benchmarks/stock_models.py --out param_groups/models.md`. Parameters and the
number of rules that match are of the library's own size, untied, built on the meta device. The
verdicts are those of `python -m measure.coordinate_check --model MODEL` on small models of widths
64 to 512: *muP* and *standard* with Everett et al.'s rates for full alignment, and *one rate* for
all tensors of a standard model, which is what one trains with without a plan. LayerScale starts at
1 in the check, since branches of 1e-6 move too little in a few steps; Gemma's `embed_scale` is 1.
The one failure of *standard*, siglip's, is a slope whose error is too large to decide with three
seeds.

| model | parameters | tensors | rules | muP | standard | one rate |
|---|---|---|---|---|---|---|
"""


def row(name: str) -> str:
    """One line of the table."""
    torch.set_num_threads(1)
    with torch.device("cpu" if "convnext" in name else "meta"):  # its LayerScale is read
        model = shipped.stock(name)
    rules = rules_for(model)
    tensors = assign(model, rules)
    count = sum(tensor.parameter.numel() for tensor in tensors)
    cells = [f"`{name}`", f"{count:,}", str(len(tensors)), str(len(rules))]
    cells += [summary(fit(measure(stock.check(name, rule)))) for rule in stock.RULES]
    note = stock.planned(name, "mup", stock.BASE_WIDTH)[2]
    cells[4] += f" ({note})" if note else ""
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Prints the table, or writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=stock.MODELS, metavar="MODEL")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    lines = []
    with ProcessPoolExecutor(args.processes) as pool:
        for line in pool.map(row, args.models):
            print(line, flush=True)
            lines.append(line)
    if args.out:
        write_text(args.out, HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
