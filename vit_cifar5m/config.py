"""Everything a run of vit_cifar5m is made of; the docstring under a field is its help text."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from param_groups.families import of_families
from training.config import Layers, PositiveFloat, PositiveInt, Section, Size
from training.settings import ObservedLoopConfig, RunConfig

Exponent = Annotated[float, Field(ge=0.5, le=1)]

# The update rules for which the paper has rates; atan2 is Adam with an epsilon that scales itself.
OPTIMIZERS = of_families("sgd", "adam")


class ModelConfig(Section):
    """The Vision Transformer's shape; width n = head_dim x heads, tokens = (32 / patch)^2."""

    head_dim: Size
    """Head dimension N."""
    heads: Size
    """Heads H of every block."""
    layers: Layers
    """Blocks L, each of attention and MLP."""
    patch_size: Size = 4
    """Side of a patch in pixels; divides image_size."""
    image_size: Literal[32] = 32
    """Side of an image in pixels: all three sources have 32."""
    classes: Size = 10
    """Output dimension; the data's number of classes."""

    @property
    def width(self) -> int:
        """n = N H, the width of the residual stream and of the MLP."""
        return self.head_dim * self.heads

    @model_validator(mode="after")
    def _patches_fill_the_image(self) -> ModelConfig:
        if self.image_size % self.patch_size:
            raise ValueError(
                f"model.patch_size {self.patch_size} does not divide model.image_size "
                f"{self.image_size}; use 1, 2, 4, 8, 16 or 32"
            )
        return self


class PrescriptionConfig(Section):
    """How initialisation, multipliers and rates scale with N, H, L (Bordelon et al., Table 1)."""

    alpha_attention: Exponent
    """Attention logits are q.k N^(-alpha_attention), (3). Only 1 has a limit N -> infinity."""
    alpha_depth: Exponent
    """Residual branches are multiplied by beta0 L^(-alpha_depth), (1)."""
    beta0: PositiveFloat
    """Size of the residual branches."""
    gamma0: PositiveFloat
    """Divides the output, (5): the larger, the more features move for a given change of the output.
    sgd's rate has gamma0^2: the output moves by order 1 and features by gamma0. adam's rate does
    not know gamma0: features move alike and the output by 1/gamma0; for order 1, scale optimizer.lr
    by gamma0."""
    zero_readout: bool = False
    """Start from a readout of zero, as the paper's language model does."""


class SourceConfig(Section):
    """Where images come from."""

    source: Literal["embedded", "cifar5m", "cifar10"] = "embedded"
    """embedded: drawn as they are asked for; cifar5m: the six published npz files, in `path`;
    cifar10: the batches of the published binary version, in `path`."""
    path: str | None = None
    """Folder of the files (cifar5m, cifar10)."""
    cache_dir: str = "data/cache"
    """Where unpacked files are kept (cifar5m)."""

    @model_validator(mode="after")
    def _source_has_its_path(self) -> SourceConfig:
        if self.source != "embedded" and self.path is None:
            raise ValueError(f"data.path is missing: the folder of the {self.source} source")
        if self.source == "embedded" and self.path is not None:
            raise ValueError("data.path: source embedded takes no path; set data.source")
        return self


class DataConfig(SourceConfig):
    """Images, their source and how many of them."""

    train_images: PositiveInt | None = None
    """Images to train on, from the first on; by default all that the files have. embedded has up
    to 2,000,000,000, by default as many as the run asks for and at least 5,000,000; an epoch's
    order takes 4 bytes of memory per image in every process."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of the data's order, and of the drawn images of embedded; by default the run's `seed`.
    Runs of several seeds then differ in their initial weights alone."""
    validation_images: PositiveInt = 2048
    """Images held out for evaluation, from the first on."""
    repeat: bool = False
    """Allow a run to see images more than once; by default one that would is refused."""


class Config(RunConfig):
    """One run."""

    without_effect: ClassVar[tuple[str, ...]] = (*RunConfig.without_effect, "data.cache_dir")

    model: ModelConfig
    prescription: PrescriptionConfig
    data: DataConfig
    training: ObservedLoopConfig

    @property
    def order_seed(self) -> int:
        """What the data's order follows from; `seed` then decides the initial values alone."""
        return self.seed if self.data.seed is None else self.data.seed

    @model_validator(mode="after")
    def _the_paper_has_rates(self) -> Config:
        if self.optimizer.name not in OPTIMIZERS:
            raise ValueError(
                f"optimizer.name {self.optimizer.name}: Bordelon et al. prescribe rates for "
                f"{', '.join(OPTIMIZERS)}; use one of them"
            )
        return self
