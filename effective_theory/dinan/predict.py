"""Every prediction for kernels, tangent kernels and gradients, without a network.

    python -m effective_theory.dinan.predict --config FILE.yaml [key=value ...]

With --json one object: `config` (resolved), `blocks` (names in order), `G`, `G_se`, `theta`,
`theta_se` ({block: matrix}), `F` ({block: matrix}, without the head), `groups` ({block: {group:
matrix}}, summing to `theta`), `parts` ({block: {tensor: matrix}}, likewise), `tensors` ({tensor:
numbers}: `sgd_factor` lambda_G, `gradient` the rms of dz/dtheta and `gradient_scaling` its power
of the width, `adamw_factor` lambda_G |g|, `closed_form` (1.108)-(1.116), `ratio` of these two),
and, for a tied head, `contact` (`outputs`, and `leading` with one matrix per output).
Matrices are lists of rows in order (sample, token); the head's are (sample, sample) if pooled.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from effective_theory.dinan.config import Config
from effective_theory.dinan.inputs import inputs
from effective_theory.dinan.kernels import Kernels, contact_terms, forward
from effective_theory.dinan.tangent import Tangent, adamw_factors, magnitudes, tangent
from training.config import describe, load
from training.errors import one_line_errors


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the predictions for a config."""
    parser = argparse.ArgumentParser(
        prog="python -m effective_theory.dinan.predict",
        description="Predicts kernels, neural tangent kernels and gradients at leading order.",
        epilog="config keys, to set as key=value:\n" + describe(Config),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config")
    parser.add_argument("--json", action="store_true", help="one JSON object, see the module")
    args = parser.parse_intermixed_args(argv)
    with one_line_errors():
        config = load(Config, args.config, args.overrides)
        x = inputs(config)
        kernels = forward(config, x)
        derived = tangent(config, x, kernels)
        if args.json:
            print(json.dumps(_as_json(config, x, kernels, derived), allow_nan=False))
        else:
            print(_as_text(config, x, kernels, derived))


def _as_json(config: Config, x: Tensor, kernels: Kernels, derived: Tangent) -> dict[str, Any]:
    def lists(tensors: dict[str, Tensor]) -> dict[str, list]:
        return {name: tensor.tolist() for name, tensor in tensors.items()}

    result = {
        "config": config.model_dump(mode="json"),
        "blocks": list(kernels.blocks),
        "G": lists(kernels.G),
        "G_se": lists(kernels.G_se),
        "F": lists(kernels.F),
        "theta": lists(derived.theta),
        "theta_se": lists(derived.theta_se),
        "groups": {block: lists(derived.groups(block)) for block in kernels.blocks},
        "parts": {block: lists(derived.parts[block]) for block in kernels.blocks},
        "tensors": _tensors(config, derived),
    }
    contact = contact_terms(config, x, kernels)
    if contact is not None:
        result["contact"] = {"outputs": contact.outputs, "leading": contact.leading.tolist()}
    return result


def _tensors(config: Config, derived: Tangent) -> dict[str, dict[str, float]]:
    gradients, factors = magnitudes(config, derived), adamw_factors(config, derived)
    return {
        name: {
            "sgd_factor": derived.rates[name],
            "gradient": gradients[name],
            "gradient_scaling": factors[name].gradient_scaling,
            "adamw_factor": factors[name].predicted,
            "closed_form": factors[name].closed_form,
            "ratio": factors[name].ratio,
        }
        for name in gradients
    }


def _as_text(config: Config, x: Tensor, kernels: Kernels, derived: Tangent) -> str:
    model = config.model
    lines = [
        f"{model.stem}: {x.shape[0]} samples x {x.shape[1]} tokens, n = {model.width}, "
        f"H = {model.heads}, s = {model.s:g}",
        "",
        "kernels and neural tangent kernels, means over the diagonal and their errors",
        f"{'block':14}{'G':>12}{'error':>10}{'Theta':>14}{'error':>10}",
    ]
    for block in kernels.blocks:
        g, theta = (
            float(kernel.diagonal().mean()) for kernel in (kernels.G[block], derived.theta[block])
        )
        errors = [float(e[block].diagonal().max()) for e in (kernels.G_se, derived.theta_se)]
        lines.append(f"{block:14}{g:12.6f}{errors[0]:10.1e}{theta:14.6f}{errors[1]:10.1e}")
    lines += [
        "",
        "gradients of one output and AdamW's factors, compared with (1.108)-(1.116)",
        "lambda: SGD's factor; |g|: rms over the tensor's entries; scaling: the widths' powers in",
        "|g|; lambda |g|: AdamW's factor, then its closed form; ratio: of these two",
    ]
    columns = ("lambda", "|g|", "scaling", "lambda |g|", "closed form", "ratio")
    lines.append(f"{'tensor':32}" + "".join(f"{name:>13}" for name in columns))
    for name, row in _tensors(config, derived).items():
        lines.append(f"{name:32}" + "".join(f"{value:13.5g}" for value in row.values()))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
