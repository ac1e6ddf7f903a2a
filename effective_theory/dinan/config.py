"""What the theory is evaluated for and measured on; the docstring under a field is its help text.

Docstrings give the symbols of Dinan, Yaida & Zhang (2023), Part I.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from training.config import Count, PositiveInt, Section
from training.errors import UserError

# Strengths and rates of the theory have no upper bound: what float64 cannot hold is said where it
# is computed, with the numbers that lead there.
NonNegativeFloat = Annotated[float, Field(ge=0)]

Strategy = Annotated[float, Field(ge=0, le=1)]
Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh", "erf", "identity"]


class ModelConfig(Section):
    """A pre-LayerNorm encoder: a stem, `depth` pairs of attention and MLP blocks, a head."""

    stem: Literal["vision", "language"]
    """vision: patches and an untied head with a bias; language: words and a tied head."""
    width: PositiveInt = 512
    """n of the predictions, which kernels depend on at s > 0 only; networks: measure.widths."""
    heads: PositiveInt = 8
    """Heads H; must divide the width. The head dimension is C = n / H."""
    depth: Count = 2
    """Pairs of blocks; the paper's L is 2 depth + 2."""
    mlp_ratio: PositiveInt = 4
    """MLP multiplier M."""
    activation: Activation = "gelu"
    """sigma; gelu is the exact form of the paper and of torch."""
    norm_eps: NonNegativeFloat = 1e-5
    """The regularisation in every LayerNorm, (1.11)."""
    causal: bool = False
    """Mask later tokens, (1.18), as in a decoder."""
    pooling: bool = True
    """Average the outputs over tokens, (1.23); vision only."""
    outputs: PositiveInt = 256
    """n_out: classes for vision, the vocabulary for language."""
    s: Strategy = 0.0
    """Meta-principled strategy of footnotes 8 and 26: 0 neural-tangent, 1 maximal-update."""


def block_names(depth: int) -> tuple[str, ...]:
    """Names of the paper's blocks 1 to L = 2 depth + 2: stem, attention.0, mlp.0, ..., head."""
    middle = [f"{kind}.{index}" for index in range(depth) for kind in ("attention", "mlp")]
    return ("stem", *middle, "head")


def group(name: str) -> str:
    """The parameter group of a tensor "mlp.0.mlp_in", a key of InitConfig and RatesConfig."""
    return name.rsplit(".", 1)[-1]


class InitConfig(Section):
    """C_G, (1.25)-(1.33): variance of every group's entries, times its power of the width."""

    stem: NonNegativeFloat = 1.0
    """Of patches or words (patch, WE); a tied head has the same tensor."""
    position: NonNegativeFloat = 1.0
    """Of positions (PE)."""
    query: NonNegativeFloat = 1.0
    """Of Q."""
    key: NonNegativeFloat = 1.0
    """Of K."""
    value: NonNegativeFloat = 1.0
    """Of V."""
    attention_output: NonNegativeFloat = 1.0
    """Of U."""
    mlp_in: NonNegativeFloat = 1.0
    """Of W."""
    mlp_out: NonNegativeFloat = 1.0
    """Of X."""
    readout: NonNegativeFloat = 1.0
    """Of an untied head."""


class RatesConfig(InitConfig):
    """Lambda_G, (1.99)-(1.107): order-one factors on every group's rate."""

    readout_bias: NonNegativeFloat = 1.0
    """Of the untied head's bias."""


class DataConfig(Section):
    """Real inputs: scikit-learn's digits as patches, or letters of the World English Bible."""

    samples: PositiveInt = 2
    """Samples |D|; kernels are matrices over samples and tokens."""
    first: Count = 0
    """Number of the first sample."""
    patch_size: Literal[1, 2, 4, 8] = 4
    """Side of a patch of the 8 x 8 digits; T = (8 / patch_size)^2, n_patch = patch_size^2."""
    tokens: PositiveInt = 4
    """Letters per sample T, language only."""


class TheoryConfig(Section):
    """How the Gaussian expectations are computed."""

    attention_draws: Annotated[int, Field(ge=256)] | None = None
    """Of query-key products; none: 65536, above samples^2 T^3 = 2^14 fewer, at least 1024."""
    seed: Count = 0
    """Seed of those draws."""

    def draws(self, size: int, tokens: int) -> int:
        """attention_draws; its default for kernels (size, size) bounds the time, ~ size^2 tokens.

        Powers of two are best for the sequence that the draws come from.
        """
        if self.attention_draws is not None:
            return self.attention_draws
        affordable = max(1, 2**30 // (size**2 * tokens))
        return min(65536, max(1024, 1 << affordable.bit_length() - 1))


class MeasureConfig(Section):
    """Random networks that the theory is compared with."""

    widths: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (64, 128, 256, 512, 1024)
    """Widths n, each a multiple of model.heads."""
    seeds: tuple[Annotated[int, Field(ge=2)], ...] = (2000, 1200, 600, 600, 300)
    """Networks per width, at least two for an error."""
    outputs: PositiveInt = 2
    """Components of the outputs whose gradients are taken, per network."""


class Config(Section):
    """One comparison of theory and networks."""

    model: ModelConfig
    init: InitConfig = InitConfig()
    rates: RatesConfig = RatesConfig()
    data: DataConfig = DataConfig()
    theory: TheoryConfig = TheoryConfig()
    measure: MeasureConfig = MeasureConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        model, widths, seeds = self.model, self.measure.widths, self.measure.seeds
        if model.width % model.heads:
            raise ValueError(
                f"model.width {model.width} is not a multiple of model.heads {model.heads}"
            )
        if len(widths) != len(seeds):
            raise ValueError(
                f"measure.seeds has {len(seeds)} numbers for {len(widths)} measure.widths; give "
                "one number of networks for every width"
            )
        if len(set(widths)) != len(widths):
            raise ValueError(f"measure.widths {list(widths)} has a width twice")
        if model.stem == "language" and model.pooling:
            raise ValueError("model.pooling is for vision; set it to false for language")
        if model.stem == "language" and model.outputs < ALPHABET:
            raise ValueError(
                f"model.outputs {model.outputs} is the vocabulary of a language model and must "
                f"hold the {ALPHABET} letters of its text"
            )
        for key, reason in _UNREAD[model.stem].items():
            section, name = key.split(".")
            values = getattr(getattr(self, section), name)
            default = type(getattr(self, section)).model_fields[name].default
            if values != default:
                raise ValueError(
                    f"{key} {values}: stem {model.stem} {reason}; leave it at {default}"
                )
        return self

    def check_measurement(self) -> None:
        """UserError if networks cannot be measured as configured; theory needs none of it."""
        model, measure = self.model, self.measure
        for width in measure.widths:
            if width % model.heads:
                raise UserError(
                    f"measure.widths {width} is not a multiple of model.heads {model.heads}"
                )
            if measure.outputs > width:
                raise UserError(
                    f"measure.outputs {measure.outputs} asks for more components than the width "
                    f"{width} of measure.widths has; lower it"
                )
        if measure.outputs > self.free_outputs:
            which = f"model.outputs {model.outputs}"
            if model.stem == "language":
                which = f"{self.free_outputs}, the outputs that are no letters of the input"
            raise UserError(
                f"measure.outputs {measure.outputs} must be at most {which}; raise model.outputs "
                "or lower measure.outputs"
            )

    @property
    def free_outputs(self) -> int:
        """Outputs without contact terms: all, or for a tied head those that no input has."""
        letters = ALPHABET if self.model.stem == "language" else 0
        return self.model.outputs - letters

    @property
    def tokens(self) -> int:
        """Tokens per sample T."""
        if self.model.stem == "language":
            return self.data.tokens
        return (8 // self.data.patch_size) ** 2


ALPHABET = 27  # a-z and the space

_TIED = "ties its head to the words, whose key is"
_UNREAD = {
    "vision": {"data.tokens": "has (8 / data.patch_size)^2 tokens"},
    "language": {
        "init.readout": f"{_TIED} init.stem",
        "rates.readout": f"{_TIED} rates.stem",
        "rates.readout_bias": "has a head without bias",
        "data.patch_size": "has letters, data.tokens of them",
    },
}
"""Keys that a stem has no use for, and why."""
