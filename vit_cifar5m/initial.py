"""Many heads at initialisation, no training (Bordelon et al., Figure 3): three tables.

    python -m vit_cifar5m.initial [--preset laptop|paper] [key=value ...] [--out FOLDER]
        [--ship FOLDER]

kernels: networks of H = kernels.heads heads, the square distance of their residual-stream kernels
(eq. 6, between all tokens of all samples) to the limit H -> infinity, after every layer. The mean
over the networks of the widest H stands in for the limit; its own scatter is subtracted, and each
of these networks is compared with the mean of the others. Both are unbiased, so that one network's
number may come out below zero. What is left is how far the widest H itself is from the limit on
average, of order H^-2.
attention: moments over heads of the attention logits A of the last block, over all places of all
samples, as all places have the same law; and the density of A over heads where the last token of
the first sample attends to the first, in units of the predicted deviation N^(1/2 - alpha).

Images are the first that the source holds out of training. Writes initial_kernels.csv (a row per
network and layer), initial_attention.csv (a row per network) and initial_density.csv (a row per
size and bin, all networks together) to results/vit_cifar5m/initial_PRESET;
`python -m plots bordelon/initial_heads` draws them. With `--ship plots/data/bordelon` they are kept
there, too. In float32 on the GPU if there is one, sums in float64.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from training import runs
from training.config import (
    Layers,
    PositiveFloat,
    PositiveInt,
    Section,
    Size,
    describe,
    parse_overrides,
    set_keys,
    validate,
)
from training.errors import UserError, one_line_errors
from vit_cifar5m import distances
from vit_cifar5m.config import Exponent, ModelConfig, SourceConfig

if TYPE_CHECKING:
    import torch

    from measure.representations import Capture

Sizes = Annotated[list[Size], Field(min_length=1)]
TABLES = ("initial_kernels", "initial_attention", "initial_density")
# Of A in units of its predicted deviation; what lies beyond counts as the outermost bins'.
EDGES = [k / 4 for k in range(-20, 21)]


class KernelsConfig(Section):
    """Networks whose residual streams are compared (Fig. 3a)."""

    head_dim: Size = 4
    """Head dimension N."""
    layers: Layers = 8
    """Blocks L."""
    heads: Annotated[list[Size], Field(min_length=2)]
    """Heads H of the networks; the most stand in for the limit."""
    networks: Annotated[int, Field(ge=2)]
    """Networks of each H."""
    reference_networks: Annotated[int, Field(ge=2)]
    """Networks of the largest H."""


class AttentionConfig(Section):
    """Networks whose attention logits are looked at over heads (Fig. 3b, c)."""

    head_dims: Sizes
    """Head dimensions N."""
    heads: Sizes
    """Heads H."""
    alphas: Annotated[list[Exponent], Field(min_length=1)] = [0.5, 1.0]
    """Exponents alpha of the attention logits q.k N^(-alpha)."""
    layers: Layers = 1
    """Blocks; the last one's logits are taken. All blocks see normalised streams: one law."""
    networks: Annotated[int, Field(ge=2)]
    """Networks of each N, H and alpha."""


class Settings(Section):
    """Everything the command computes."""

    kernels: KernelsConfig
    attention: AttentionConfig
    alpha_attention: Exponent = 0.5
    """alpha of the kernels' networks (Fig. 4; Fig. 3 does not say)."""
    alpha_depth: Exponent = 1.0
    """Residual branches are multiplied by beta0 L^(-alpha_depth) (Fig. 6; Fig. 3 does not say)."""
    beta0: PositiveFloat = 4.0
    """Size of the residual branches (Fig. 4, 6; Fig. 3 does not say)."""
    patch_size: Literal[1, 2, 4, 8, 16, 32] = 4
    """Side of a patch in pixels."""
    samples: PositiveInt = 8
    """Images, the first that the source holds out of training."""
    seed: Annotated[int, Field(ge=0, lt=2**40)] = 0
    """Seed of the networks."""
    data: SourceConfig = SourceConfig()

    @model_validator(mode="after")
    def _sizes_occur_once(self) -> Settings:
        for key in ("kernels.heads", "attention.heads", "attention.head_dims", "attention.alphas"):
            section, _, name = key.partition(".")
            values = getattr(getattr(self, section), name)
            if len(set(values)) < len(values):
                raise ValueError(f"{key} {values}: a value stands there twice; name each once")
        return self


# Sizes of the figure where it gives them: N = 4, L = 8 and H of 10^1 to 10^3 in (a), N = 1 and 16
# and H = 32 .. 256 in (b, c). The rest is ours.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "kernels": {
            "heads": [16, 32, 64, 128, 256, 512, 1024],
            "networks": 20,
            "reference_networks": 20,
        },
        "attention": {
            "head_dims": [1, 2, 4, 8, 16, 32],
            "heads": [32, 64, 128, 256],
            "networks": 16,
        },
    },
    "laptop": {
        "kernels": {"heads": [4, 8, 16, 32, 64, 128], "networks": 24, "reference_networks": 24},
        "attention": {"head_dims": [1, 2, 4, 8, 16], "heads": [32, 64, 128], "networks": 12},
        "patch_size": 8,
    },
}


# Networks


def network_seed(seed: int, shape: ModelConfig, alpha: float, network: int) -> int:
    """A different seed for every network: with one seed, networks of two sizes would start from
    the same numbers and not be independent."""
    name = f"{seed}/{shape.head_dim}/{shape.heads}/{shape.layers}/{alpha}/{network}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")


class Networks:
    """Random networks of the settings, and what passes through them."""

    def __init__(self, settings: Settings) -> None:
        import torch

        from vit_cifar5m import data

        self.settings = settings
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        held_out = data.held_out(settings.data, settings.samples, "samples")
        images, _ = data.collate([held_out[index] for index in range(settings.samples)])
        self.images = images.to(self.device)

    def captures(self, shape: ModelConfig, alpha: float, networks: int) -> Iterator[Capture]:
        """What passes through each network, one at a time."""
        from measure.representations import capture
        from param_groups import Bordelon, plan
        from vit_cifar5m.model import ROLES, VisionTransformer

        settings = self.settings
        # Initial functions depend neither on the optimiser nor, but for the output, on gamma0.
        rule = Bordelon(
            head_dim=shape.head_dim,
            heads=shape.heads,
            depth=shape.layers,
            optimizer="sgd",
            alpha_attention=alpha,
            alpha_depth=settings.alpha_depth,
            beta0=settings.beta0,
        )
        model = VisionTransformer(
            shape,
            attention_scale=rule.forward().attention_scale(shape.head_dim),
            residual_multiplier=rule.forward().residual_multiplier,
        ).to(self.device)
        planned = plan(model, ROLES, rule, lr=1.0)
        for network in range(networks):
            seed = network_seed(settings.seed, shape, alpha, network)
            planned.initialise(model, seed)
            yield capture(model, self.images, lambda m, x: m(x))

    def shape(self, head_dim: int, heads: int, layers: int) -> ModelConfig:
        """A model on the settings' patches."""
        return ModelConfig(
            head_dim=head_dim, heads=heads, layers=layers, patch_size=self.settings.patch_size
        )


# Tables

Rows = list[dict[str, Any]]


def kernel_rows(networks: Networks) -> Rows:
    """initial_kernels.csv: square distance to the limit, of each network and layer."""
    from measure.representations import distance_to_ensemble, leave_one_out, token_kernel

    config = networks.settings.kernels

    def kernels(heads: int, count: int) -> Iterator[list[torch.Tensor]]:
        """Each network's kernels by layer, (B T, B T) float64 on the CPU, the first block first."""
        shape = networks.shape(config.head_dim, heads, config.layers)
        for seen in networks.captures(shape, networks.settings.alpha_attention, count):
            yield [token_kernel(h).cpu() for h in seen.stream[1:]]

    *smaller, widest = sorted(config.heads)
    limits = list(zip(*kernels(widest, config.reference_networks), strict=True))
    sizes = [(sum(k) / len(k)).square().mean().item() for k in limits]  # of the kernels' mean
    errors = {  # (heads, network, layer): square distance, networks it is compared with
        (widest, network, layer): (error, len(of_layer) - 1)
        for layer, of_layer in enumerate(limits)
        for network, error in enumerate(leave_one_out(of_layer))
    }
    for heads in smaller:
        for network, by_layer in enumerate(kernels(heads, config.networks)):
            for layer, kernel in enumerate(by_layer):
                error = distance_to_ensemble(kernel, limits[layer])
                errors[heads, network, layer] = error, len(limits[layer])
    return [
        {
            "head_dim": config.head_dim,
            "layers": config.layers,
            "heads": heads,
            "network": network,
            "layer": layer + 1,
            "square_error": error,
            "reference_square": sizes[layer],
            "reference_heads": widest,
            "references": references,
        }
        for (heads, network, layer), (error, references) in sorted(errors.items())
    ]


def attention_rows(networks: Networks) -> tuple[Rows, Rows]:
    """initial_attention.csv and initial_density.csv."""
    import torch

    from measure.representations import attention_entries

    moments, density = [], []
    config = networks.settings.attention
    for alpha, head_dim, heads in itertools.product(config.alphas, config.head_dims, config.heads):
        place = {
            "alpha_attention": alpha,
            "head_dim": head_dim,
            "heads": heads,
            "layer": config.layers,
        }
        entries, shape = [], networks.shape(head_dim, heads, config.layers)
        for network, seen in enumerate(networks.captures(shape, alpha, config.networks)):
            moments.append({**place, "network": network, **_moments(seen)})
            # Every head's, where the last token of the first sample attends to the first.
            entries.append(attention_entries(seen.blocks[-1], 0, -1, 0).double().cpu())
        found = _density(torch.cat(entries), head_dim ** (0.5 - alpha))
        density += [{**place, "networks": config.networks, **row} for row in found]
    return moments, density


def _moments(seen: Capture) -> dict[str, float]:
    """Means over heads, places and samples: `variance` about the heads' mean, unbiased, and the
    moments about zero, the mean over networks."""
    from measure.representations import head_variance

    entries = seen.blocks[-1].entries()
    square = entries.double().square()
    return {
        "variance": head_variance(entries),
        "second_moment": square.mean().item(),
        "fourth_moment": square.square().mean().item(),
    }


def _density(entries: torch.Tensor, unit: float) -> Rows:
    """How many entries lie between two edges."""
    import torch

    inside = (entries / unit).clamp(EDGES[0], EDGES[-1])
    counts = torch.histogram(inside, torch.tensor(EDGES, dtype=torch.float64)).hist.tolist()
    return [
        {"low": low * unit, "high": high * unit, "count": int(count)}
        for (low, high), count in zip(itertools.pairwise(EDGES), counts, strict=True)
    ]


# The command


def compute(settings: Settings) -> dict[str, Rows]:
    """The three tables by name."""
    networks = Networks(settings)
    kernels, (moments, density) = kernel_rows(networks), attention_rows(networks)
    return dict(zip(TABLES, (kernels, moments, density), strict=True))


def ship(settings: Settings, paths: Sequence[Path], seconds: float, folder: Path) -> None:
    """Copies the tables to the folder that ships them, with where and from what they were made."""
    import torch

    from training.environment import describe as environment
    from training.files import write_json, write_text

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    origin = {
        "environment": environment(device),
        "seconds": round(seconds),
        "settings": settings.model_dump(mode="json"),
    }
    for path in paths:
        write_text(folder / path.name, path.read_text(encoding="utf-8"))
        write_json(folder / f"{path.stem}.json", origin)


def read_settings(preset: str, overrides: Sequence[str]) -> Settings:
    """A preset with key=value changes; UserError names a wrong key or value."""
    data = set_keys(PRESETS[preset], parse_overrides(overrides))
    return validate(Settings, data, f"preset {preset}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vit_cifar5m.initial",
        description=__doc__,
        epilog="keys, to set as key=value:\n" + describe(Settings),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="changes to the preset")
    add("--preset", choices=PRESETS, default="laptop", help="sizes (default laptop)")
    add("--out", type=Path, help="folder (default: results/vit_cifar5m/initial_PRESET)")
    add("--ship", type=Path, metavar="FOLDER", help="also keep the tables there")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """The command: exit code 0, or 2 for a user's mistake (one line)."""
    args = _parser().parse_intermixed_args(argv)
    start = time.perf_counter()
    with one_line_errors(OSError):
        settings = read_settings(args.preset, args.overrides)
        folder = args.out or runs.RESULTS / "vit_cifar5m" / f"initial_{args.preset}"
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--out: {folder} is not a folder; name one to write tables to")
        paths = [folder / f"{name}.csv" for name in TABLES]
        for path, rows in zip(paths, compute(settings).values(), strict=True):
            distances.write(path, list(rows[0]), rows)
        seconds = time.perf_counter() - start
        if args.ship:
            ship(settings, paths, seconds, args.ship)
    print(f"{seconds:.0f} s", file=sys.stderr)
    print("\n".join(map(str, paths)))


if __name__ == "__main__":
    main()
