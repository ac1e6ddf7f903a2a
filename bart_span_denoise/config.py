"""Everything a run of bart_span_denoise is made of; the docstring under a field is its help."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from training.config import (
    WIDEST,
    Fraction01,
    Layers,
    PositiveFloat,
    PositiveInt,
    Section,
    Size,
)
from training.strategies import StrategyConfig, StrategyRunConfig


class ModelConfig(Section):
    """The encoder-decoder's shape; heads = width / head_dim."""

    width: Size
    """Embedding dimension n."""
    layers: Layers
    """Blocks of the encoder, and as many of the decoder."""
    head_dim: Size = 64
    """Head dimension C = n / H; must divide the width."""
    mlp_ratio: Size = 4
    """MLP multiplier M."""
    vocab_size: Size | None = None
    """Rows of the word embedding; by default the dictionary's. The paper has 50,265."""
    positions: Literal["paper", "fairseq"] = "paper"
    """paper: token t has row t of tokens_per_sample + 2; fairseq: its offset of two rows, which
    leaves two tokens less."""
    dropout: Fraction01 = 0.1
    """Dropout on embeddings and residual branches."""
    attention_dropout: Fraction01 = 0.1
    """Dropout on attention weights."""


class PrescriptionConfig(StrategyConfig):
    """The strategy, and what of it is exchanged to see what it does."""

    c_we: PositiveFloat | None = None
    """Variance C_WE that word embeddings start from; by default the strategy's: 0.0004 for
    standard, 1 for the others (II 2C)."""
    rescale: bool | None = None
    """Multiply logits by N_rescale = n^(-(1+s)/2), (1.34), s = 0 for standard, or by 1; by default
    the strategy's: false for standard, true for the others (II 2C)."""

    @model_serializer(mode="wrap")
    def _exchanged(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omits unset keys, which leave the strategy's own value, from the run id."""
        own = dump(self).items()
        return {k: v for k, v in own if k not in ("c_we", "rescale") or v is not None}


class NoiseConfig(Section):
    """Corruption; the defaults are what the paper's authors ran, see `bart_span_denoise.noise`."""

    unit: Literal["word", "token"] = "word"
    """What spans are made of."""
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share to corrupt."""
    fraction_mode: Literal["fairseq", "exact"] = "fairseq"
    """fairseq corrupts 26.8 % at 0.3, as overlapping spans are not made up for; exact the share."""
    poisson_lambda: Annotated[float, Field(ge=1, le=WIDEST)] = 3.0
    """Mean span length."""
    permute: bool = True
    """Put sentences in random order."""


class DataConfig(Section):
    """Text, its byte-level BPE and how samples are packed and corrupted."""

    source: Literal["embedded", "text", "binarised"] = "embedded"
    """embedded: World English Bible from pip, with a BPE trained on it; text: .txt, .jsonl(.gz),
    parquet; binarised: a folder made by fairseq-preprocess, train.bin and valid.bin (mmap)."""
    path: str | None = None
    """File or folder (text), or fairseq's folder with dict.txt (binarised)."""
    text_key: str = "text"
    """Column that holds the text, in jsonl and parquet."""
    bpe_encoder: str | None = None
    """GPT-2's encoder.json."""
    bpe_vocab: str | None = None
    """GPT-2's vocab.bpe."""
    bpe_dictionary: str | None = None
    """fairseq's dict.txt over that BPE (text; a binarised folder has its own)."""
    trained_vocab_size: Annotated[int, Field(ge=300, le=WIDEST)] = 1024
    """Symbols of the dictionary when no BPE is given, its five special ones among them."""
    tokens_per_sample: Size = 512
    """Most tokens of content in a sample; a start and an end token come on top."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of documents held out (embedded, text)."""
    max_train_tokens: PositiveInt | None = None
    """Stop reading training text after this many tokens (embedded, text)."""
    max_validation_tokens: PositiveInt | None = None
    """Stop reading validation text after this many tokens (embedded, text)."""
    cache_dir: str = "data/cache"
    """Where tokenised text is kept."""
    noise: NoiseConfig = NoiseConfig()
    """Corruption."""

    @model_validator(mode="after")
    def _source_has_what_it_needs(self) -> DataConfig:
        if (self.source == "embedded") is not (self.path is None):
            needs = "takes no path" if self.source == "embedded" else "needs data.path"
            raise ValueError(f"data.path: source {self.source} {needs}")
        files = (self.bpe_encoder, self.bpe_vocab, self.bpe_dictionary)
        binarised, given = self.source == "binarised", tuple(file is not None for file in files)
        if any(given) and given != (True, True, not binarised):
            wanted = "bpe_encoder and bpe_vocab (its dict.txt is in the folder)"
            wanted = wanted if binarised else "bpe_encoder, bpe_vocab and bpe_dictionary"
            raise ValueError(f"data.bpe_*: source {self.source} takes {wanted}, or none of them")
        if binarised and self.noise.unit == "word" and not any(given):
            raise ValueError(
                "data.noise.unit: word needs data.bpe_encoder and data.bpe_vocab, GPT-2's files "
                "with which the corpus was encoded; give both, or set data.noise.unit=token"
            )
        return self


class Config(StrategyRunConfig):
    """One run."""

    without_effect: ClassVar[tuple[str, ...]] = (
        *StrategyRunConfig.without_effect,
        "data.cache_dir",
    )

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
        if self.model.positions == "fairseq" and self.data.tokens_per_sample < 3:
            raise ValueError(
                "data.tokens_per_sample: with model.positions fairseq two are start and end; "
                "expected at least 3"
            )
        return self
