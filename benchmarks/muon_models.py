"""Muon for the models that people have: does the check pass, and fail where a number is wrong?

    python -m benchmarks.muon_models --json benchmarks/results/cpu_muon_models.json

Small models of four widths under `Muon(Everett("mup", ...))`, random tokens or noise, each three
times: as planned; with Muon's rates as width^(1/2), which a rule for Adam's updates would give
them; and with the base width forgotten, so that AdamW's rates stay as the width grows. A tied model
takes `Tied`, and its factor on logits is left out in place of the last. The exit code is 1 where a
right plan fails or a wrong one passes.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from benchmarks import harness
from param_groups import Everett, Muon, Plan, Prescription, Tied, plan, rules_for
from param_groups.check import Check, judge, measure
from param_groups.check.slopes import decided, failed, summary
from param_groups.check.stock import batch_of, loss_of, sizes
from param_groups.stock.rules import stock

BASE, HEAD_DIM = 64, 8  # eight heads at the base width, so that eight may share a key


def gpt2(width: int, **more: Any) -> nn.Module:
    """Its queries, keys and values in one Conv1D."""
    return stock("hf:gpt2", **sizes("hf:gpt2", width), **more)


def nanogpt(width: int) -> nn.Module:
    """GPT-2's names over nn.Linear."""
    model = gpt2(width)
    for path, layer in [*model.named_modules()]:
        if type(layer).__name__ == "Conv1D":
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, nn.Linear(*layer.weight.shape))
    return model


def llama(heads_per_key: int, width: int) -> nn.Module:
    """With as many heads to a key at every width."""
    heads = width // HEAD_DIM
    keys = {"num_attention_heads": heads, "num_key_value_heads": heads // heads_per_key}
    return stock("hf:llama", **{**sizes("hf:llama", width), **keys, "head_dim": HEAD_DIM})


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "nanoGPT": nanogpt,
    "GPT-2": gpt2,
    "GPT-2, tied": functools.partial(gpt2, tie_word_embeddings=True),
    **{f"Llama, {n} heads to a key": functools.partial(llama, n) for n in (1, 4, 8)},
    # Eight experts in one stack, each of gate and up.
    "Mixtral": lambda n: stock("hf:mixtral", **sizes("hf:mixtral", n)),
    # Queries, keys and values in one tensor, two heads to a key; gate and up in another.
    "Phi-3": lambda n: stock("hf:phi3", **{**sizes("hf:llama", n), "pad_token_id": 0}),
    # Queries, keys and values in one tensor.
    "ViT (timm)": lambda n: stock("timm:vit_tiny_patch16_224", **sizes("timm:vit_small", n)),
}
WRONG = ("", "rates as width^(1/2)", "base width forgotten")


def planned(name: str, width: int, wrong: str = "") -> tuple[nn.Module, Plan]:
    """A model of `MODELS` and its plan, with one number wrong if so named."""
    model, tied = MODELS[name](width), "tied" in name
    base = width if wrong == WRONG[2] and not tied else BASE
    scale = 0.25 if tied else 1.0  # a tied token's own logit starts at up to 64 times this
    rule: Prescription = Everett("mup", width, base, qk_exponent=-0.5, embedding_std=scale)
    rule = Muon(Tied(rule) if tied else rule, rate_exponent=0.5 if wrong == WRONG[1] else 0.0)
    applied = {"logit_multiplier": BASE / width} if tied else {}
    if tied and wrong != WRONG[2]:
        model.lm_head.register_forward_hook(lambda _, inputs, logits: logits * BASE / width)
    rules = rules_for(gpt2(width) if name == "nanoGPT" else model)
    if name == "nanoGPT":  # GPT-2's names, over layers that store their outputs first
        rules = [replace(rule, layout=None) for rule in rules]
    numbers = {"lr": 2**-8, "absorb_multipliers": True, "applied": applied}
    return model, plan(model, rules, rule, **numbers)


def checked(name: str, wrong: str, args: argparse.Namespace) -> dict[str, Any]:
    """The outcome of a check in one line, and whether it is what it should be."""

    def task(width: int, seed: int) -> Check:
        model, made = planned(name, width, wrong)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        kind = "timm:vit" if name == "ViT (timm)" else "hf:gpt2"
        return Check(model, made, [batch_of(kind, seed)], loss_of)

    run = functools.partial(measure, task, args.widths, steps=args.steps)
    measured, slopes, seeds = decided(lambda seeds: run(seeds=seeds), args.seeds)
    numbers = judge(measured.plans)
    found = {"outcome": summary(slopes, numbers), "measured alone": summary(slopes)}
    found |= {"seeds": seeds, "as it should be": failed(slopes) is bool(wrong)}
    return {"model": name, "planted": wrong or None, **found}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512], metavar="N")
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS, metavar="NAME")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=2, help="at first; more where unclear")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Prints all checks as JSON."""
    args, rows = parse(argv), []
    for name in args.models:
        for wrong in WRONG:
            rows.append(checked(name, wrong, args))
            print(f"{name} {wrong}: {rows[-1]['outcome']}", file=sys.stderr)
    harness.show(args, "cpu", rows)
    if odd := [row["model"] for row in rows if not row["as it should be"]]:
        raise SystemExit(f"error: a right plan fails or a wrong one passes: {', '.join(odd)}")


if __name__ == "__main__":
    main()
