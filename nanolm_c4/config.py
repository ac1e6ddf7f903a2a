"""Everything a run of nanolm_c4 is made of; the docstring under a field is its help text."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from training.config import PositiveFloat, PositiveInt, RunConfig, Section


class ModelConfig(Section):
    """The decoder's shape; heads = width / head_dim."""

    width: PositiveInt
    """Residual width D."""
    layers: PositiveInt
    """Blocks L."""
    head_dim: PositiveInt
    """Head dimension h; must divide the width."""
    mlp_ratio: PositiveInt = 4
    """MLP width F as a multiple of D."""
    context: PositiveInt
    """Tokens per row T."""
    vocab_size: PositiveInt | None = None
    """Rows of embedding and readout; by default the tokeniser's size. The paper has 32,101."""


class PrescriptionConfig(Section):
    """Which rule gives every tensor its numbers (Everett et al., Table 1)."""

    parameterization: Literal["standard", "ntk", "mup", "mean_field"]
    """Initialisation and multiplier."""
    alignment: Literal["full", "none", "global"]
    """Learning-rate exponents; global is one rate for all tensors."""
    base_width: PositiveInt
    """Width at which all learning-rate exponents cancel."""
    gamma_embedding: PositiveFloat = 1.0
    """Constant on the embedding type's rate."""
    gamma_hidden: PositiveFloat = 1.0
    """Constant on the hidden type's rate."""
    gamma_readout: PositiveFloat = 1.0
    """Constant on the readout's rate."""
    eps_per_layer: bool = False
    """Scale epsilon with each layer type's gradient."""
    embedding_std: PositiveFloat | None = None
    """Scale of embedding and positions after the multiplier; by default 0.01, and 1 for mup."""
    qk_exponent: Annotated[float, Field(ge=-2, le=0)] | None = None
    """Attention logits are multiplied by h^this; by default -1/2, and -1 for mup, mean_field."""


class DataConfig(Section):
    """Text, tokeniser and cache."""

    source: Literal["embedded", "local", "c4"] = "embedded"
    """embedded: World English Bible from pip; local: .txt, .jsonl(.gz), parquet; c4: the hub."""
    path: str | None = None
    """File or folder of `local` text, or a folder with C4's downloaded files."""
    text_key: str = "text"
    """Column that holds the text, in jsonl and parquet."""
    tokenizer: str | None = None
    """SentencePiece model file; by default one is trained on the corpus."""
    tokenizer_vocab_size: Annotated[int, Field(ge=64)] = 1024
    """Size of the tokeniser that is trained when none is given."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of documents held out (embedded, local; C4 has its own validation split)."""
    evaluation: Literal["truncate", "split"] = "truncate"
    """One row per validation document (NanoDO), or as many rows as hold all of it."""
    max_train_tokens: PositiveInt | None = None
    """Stop reading training text after this many tokens."""
    max_validation_tokens: PositiveInt | None = None
    """Stop reading validation text after this many tokens."""
    cache_dir: str = "data/cache"
    """Where tokenised text is kept."""


class Config(RunConfig):
    """One run."""

    without_effect: ClassVar[tuple[str, ...]] = (*RunConfig.without_effect, "data.cache_dir")

    model: ModelConfig
    prescription: PrescriptionConfig
    data: DataConfig

    @model_validator(mode="after")
    def _heads_are_whole(self) -> Config:
        if self.model.width % self.model.head_dim:
            raise ValueError(
                f"model.width {self.model.width} is not a multiple of model.head_dim "
                f"{self.model.head_dim}"
            )
        return self
