"""Everything a run of nanolm_c4 is made of; the docstring under a field is its help text."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from param_groups import Bordelon, Decay, Depth, EpsFollows, Everett, Muon, Prescription
from param_groups.families import of_families
from training.config import WIDEST, Layers, PositiveFloat, PositiveInt, Section, Size
from training.settings import ObservedLoopConfig, RunConfig

Alpha = Annotated[float, Field(ge=0.5, le=1)]


class ModelConfig(Section):
    """The decoder's shape; a file gives width or heads, and either is there to read."""

    width: Size | None = None
    """Residual width D, a multiple of head_dim; in its place heads may be given."""
    heads: Size | None = None
    """Attention heads, width / head_dim; given in place of width, they stay as head_dim varies."""
    layers: Layers
    """Blocks L."""
    head_dim: Size
    """Head dimension h (Bordelon et al.: N); must divide the width."""
    mlp_ratio: Size = 4
    """MLP width F as a multiple of D; bordelon has no default (the paper's is 1)."""
    context: Annotated[Size, Field(ge=2)]
    """Tokens per row T."""
    norms: bool = True
    """Normalise before attention, MLP and readout, as the papers do. Without norms (not with
    bordelon) nothing rescales the stream of residuals, and depth is seen."""
    tied: bool = False
    """The word embedding is the readout, too (mup, spectral): logits times base_width / width."""
    vocab_size: Size | None = None
    """Rows of embedding and readout; by default the tokeniser's size. The paper has 32,101."""

    @model_validator(mode="after")
    def _width_is_whole_heads(self) -> ModelConfig:
        if (self.width is None) == (self.heads is None):
            which = "neither" if self.width is None else "both"
            raise ValueError(
                f"expected one of model.width and model.heads, got {which}; width is heads times "
                "model.head_dim"
            )
        if self.width is not None and self.width % self.head_dim:
            raise ValueError(
                f"model.width {self.width} is not a multiple of model.head_dim {self.head_dim}"
            )
        width = self.width or self.heads * self.head_dim
        # A section is frozen; this is the end of its making.
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "heads", width // self.head_dim)
        return self

    @model_serializer(mode="wrap")
    def _with_width(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """One model is one config, and one run, whichever of the two a file gives."""
        idle = {"heads", *(("norms",) if self.norms else ()), *(() if self.tied else ("tied",))}
        return {key: value for key, value in dump(self).items() if key not in idle}


BORDELON, SPECTRAL = "bordelon", "spectral"


def unless_set() -> Any:
    """A key that came later: None by default, and left out then, so that run ids stay."""
    return Field(default=None, exclude_if=lambda value: value is None)


class PrescriptionSection(Section):
    """Which rule gives every tensor its numbers, and that rule's own keys; a class per rule."""

    parameterization: str
    outside: ClassVar[bool] = False  # whether the last norm has numbers of its own

    @model_validator(mode="before")
    @classmethod
    def _keys_are_the_rules_own(cls, data: Any) -> Any:
        """Names the rule whose key it is; a key of another rule may be null."""
        if not isinstance(data, dict):
            return data
        rule = data.get("parameterization")
        owners = {
            key: owner for owner, kind in reversed(OWNERS.items()) for key in kind.model_fields
        }
        for key, field in cls.model_fields.items():
            misspelt = data.keys() - owners.keys()  # which is said of an unknown key
            if field.is_required() and data.get(key) is None and not misspelt:
                raise ValueError(f"key 'prescription.{key}' is missing; {rule} needs a value")
        others = [key for key in data if key in owners and key not in cls.model_fields]
        for key in others:
            if data[key] is not None:
                raise ValueError(
                    f"prescription.{key} belongs to {owners[key]} and not to {rule}; leave it out"
                )
        return {key: value for key, value in data.items() if key not in others}

    def at(self, model: ModelConfig, optimizer: str) -> Prescription:
        """The prescription at a model's size."""
        raise NotImplementedError


class BordelonSection(PrescriptionSection):
    """Bordelon, Chaudhry and Pehlevan, section 2."""

    parameterization: Literal["bordelon"]
    alpha_attention: Alpha
    """bordelon: attention logits are multiplied by head_dim^(-this)."""
    alpha_depth: Alpha
    """Residual branches are multiplied by (layers / base_depth)^(-this), and rates in them follow;
    by default neither. bordelon: by beta0 layers^(-this)."""
    beta0: PositiveFloat
    """bordelon: constant on every residual branch."""
    gamma0: PositiveFloat
    """bordelon: logits are divided by it; large is rich training, small is lazy."""

    def at(self, model: ModelConfig, optimizer: str) -> Prescription:
        """Section 2 of the paper."""
        sizes = {"head_dim": model.head_dim, "heads": model.heads, "depth": model.layers}
        constants = self.model_dump(exclude={"parameterization"})
        return Bordelon(**sizes, optimizer=optimizer, zero_readout=True, **constants)


class BasedSection(PrescriptionSection):
    """What all rules but bordelon have: powers relative to a base width."""

    base_width: PositiveInt
    """Width at which all learning-rate exponents cancel. All rules but bordelon."""
    decay_exponent: Annotated[float, Field(ge=-2, le=1)] | None = unless_set()
    """A decay per step goes as (width / base_width)^this in matrices that sum over the width; by
    default 0, independent decay. -1 is torch's coupled decay under muP."""
    embedding_std: PositiveFloat | None = None
    """Scale of embedding and positions after the multiplier; by default 0.01, and 1 for mup."""
    qk_exponent: Annotated[float, Field(ge=-2, le=0)] | None = None
    """Attention logits are multiplied by h^this; by default -1/2, and -1 for mup, mean_field."""
    base_depth: PositiveInt | None = unless_set()
    """Blocks at which alpha_depth changes nothing; by default 1. All rules but bordelon."""


class EverettSection(BasedSection):
    """Everett et al., Table 1."""

    parameterization: Literal["standard", "ntk", "mup", "mean_field"]
    """Initialisation and multiplier; bordelon also rates, attention and residual branches."""
    alignment: Literal["full", "none", "global"]
    """Learning-rate exponents; global is one rate for all tensors. Everett et al.'s rules."""
    gamma_embedding: PositiveFloat = 1.0
    """Constant on the embedding type's rate."""
    gamma_hidden: PositiveFloat = 1.0
    """Constant on the hidden type's rate."""
    gamma_readout: PositiveFloat = 1.0
    """Constant on the readout's rate."""
    gamma_units: Literal["tensor", "effective"] | None = unless_set()
    """What the constants multiply: a tensor's rate (the default, and the paper's), or the rate of
    multiplier times tensor at base_width, which equivalent parameterisations share."""
    embedding_exponent: Annotated[float, Field(ge=-2, le=2)] | None = unless_set()
    """Rates of embeddings go as (width / base_width)^this beside the rule; by default 0."""
    eps_per_layer: bool = False
    """Scale epsilon with each layer type's gradient."""
    alpha_depth: Alpha | None = unless_set()
    """Residual branches are multiplied by (layers / base_depth)^(-this), and rates in them follow;
    by default neither. bordelon: by beta0 layers^(-this)."""

    @model_validator(mode="after")
    def _base_depth_acts(self) -> EverettSection:
        if self.base_depth is not None and self.alpha_depth is None:
            raise ValueError(
                "prescription.base_depth acts with prescription.alpha_depth alone; give both or "
                "neither"
            )
        return self

    @property
    def outside(self) -> bool:
        """A rule for the depth leaves the last norm alone."""
        return self.alpha_depth is not None

    def at(self, model: ModelConfig, optimizer: str) -> Prescription:
        """Table 1, and what the keys put around it."""
        around = {"decay_exponent", "eps_per_layer", "alpha_depth", "base_depth"}
        table = self.model_dump(exclude=around)
        rule: Prescription = Everett(
            width=model.width, optimizer=optimizer, depth=model.layers, **table
        )
        if self.alpha_depth is not None:
            rule = Depth(rule, model.layers, self.base_depth or 1, self.alpha_depth)
        if self.eps_per_layer:
            rule = EpsFollows(rule)
        return Decay(rule, self.decay_exponent) if self.decay_exponent else rule


class SpectralSection(BasedSection):
    """Muon beside muP's AdamW, for optimizer.name muon."""

    parameterization: Literal["spectral"]
    convention: Literal["spectral", "original", "match_rms"] | None = unless_set()
    """spectral: what multiplies Muon's updates, sqrt(out/in) by default."""
    rate_exponent: Annotated[float, Field(ge=-2, le=2)] | None = unless_set()
    """spectral: Muon's rates go as (width / base_width)^this; by default 0, -1/2 for match_rms."""
    adam_factor: PositiveFloat | None = unless_set()
    """spectral: rates of AdamW's tensors over optimizer.lr at base_width; by default 1."""

    def at(self, model: ModelConfig, optimizer: str) -> Prescription:
        """muP, Muon around it, and the depth around both."""
        table = self.model_dump(include={"base_width", "embedding_std", "qk_exponent"})
        own = self.model_dump(include={"convention", "rate_exponent", "adam_factor"})
        rule: Prescription = Muon(Everett("mup", model.width, depth=model.layers, **table), **own)
        if self.base_depth is not None:
            rule = Depth(rule, model.layers, self.base_depth)
        return Decay(rule, self.decay_exponent) if self.decay_exponent else rule


# In the order in which a key that several have is said to belong to one.
OWNERS: dict[str, type[PrescriptionSection]] = {
    BORDELON: BordelonSection,
    "Everett et al.'s rules": EverettSection,
    SPECTRAL: SpectralSection,
}
PrescriptionConfig = Annotated[
    EverettSection | BordelonSection | SpectralSection, Field(discriminator="parameterization")
]


class DataConfig(Section):
    """Text, tokeniser and cache."""

    source: Literal["embedded", "local", "c4"] = "embedded"
    """embedded: World English Bible from pip; local: .txt, .jsonl(.gz), parquet; c4: the hub's."""
    path: str | None = None
    """File or folder of `local` text."""
    text_key: str = "text"
    """Column that holds the text, in jsonl and parquet."""
    tokenizer: str | None = None
    """SentencePiece model file; by default one is trained on the corpus."""
    tokenizer_vocab_size: Annotated[int, Field(ge=64, le=WIDEST)] = 1024
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

    @model_validator(mode="after")
    def _local_text_has_its_path(self) -> DataConfig:
        if self.source == "local" and self.path is None:
            raise ValueError("data.path is missing: the file or folder of the local source's text")
        return self


class Config(RunConfig):
    """One run."""

    without_effect: ClassVar[tuple[str, ...]] = (*RunConfig.without_effect, "data.cache_dir")

    model: ModelConfig
    prescription: PrescriptionConfig
    data: DataConfig
    training: ObservedLoopConfig

    @model_validator(mode="after")
    def _muon_has_its_rule(self) -> Config:
        if (self.optimizer.name == "muon") != (self.prescription.parameterization == SPECTRAL):
            raise ValueError(
                "optimizer.name muon and prescription.parameterization spectral go together; got "
                f"{self.optimizer.name} and {self.prescription.parameterization}"
            )
        return self

    @model_validator(mode="after")
    def _a_tie_has_its_rule(self) -> Config:
        rule = self.prescription.parameterization
        if self.model.tied and rule not in ("mup", SPECTRAL):
            raise ValueError(
                f"model.tied true: {rule} has no numbers for a tensor that embeds and reads out; "
                "take prescription.parameterization mup or spectral"
            )
        return self

    @model_validator(mode="after")
    def _bordelon_is_complete(self) -> Config:
        if self.prescription.parameterization != BORDELON:
            return self
        if not self.model.norms:
            raise ValueError("model.norms false: bordelon's rule is for models with norms")
        if "mlp_ratio" not in self.model.model_fields_set:
            raise ValueError(
                "key 'model.mlp_ratio' is missing; bordelon has no default, and the paper's is 1"
            )
        if self.optimizer.name not in (known := of_families("sgd", "adam")):
            raise ValueError(
                f"optimizer.name {self.optimizer.name}: bordelon has rates for "
                f"{', '.join(known)}; choose one of them"
            )
        return self
