"""Everything a run of vit_imagenet is made of; the docstring under a field is its help text."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from training.config import Count, Layers, NonNegativeFloat, PositiveFloat, Section, Size
from training.strategies import Probability, StrategyConfig, StrategyRunConfig


class ModelConfig(Section):
    """The Vision Transformer's shape; heads = width / head_dim, tokens = (image / patch)^2."""

    width: Size
    """Embedding dimension n."""
    layers: Layers
    """Encoder blocks."""
    head_dim: Size = 64
    """Head dimension C = n / H; must divide the width."""
    mlp_ratio: Size = 4
    """MLP multiplier M."""
    patch_size: Size
    """Side of a patch in pixels; n_patch = 3 patch_size^2."""
    image_size: Size
    """Side of an image in pixels; a multiple of patch_size."""
    classes: Size
    """Output dimension n_out; the data's number of classes."""
    head_bias: bool = True
    """Biases in the head block; false is the experiment of footnote 44."""

    @model_serializer(mode="wrap")
    def _head(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omits head_bias at its default, so that it does not enter the run id."""
        return {k: v for k, v in dump(self).items() if k != "head_bias" or not self.head_bias}


class AugmentationConfig(Section):
    """What training images go through; evaluation has only its resize and centre crop."""

    crop_scale: tuple[Probability, Probability] = (0.08, 1.0)
    """Smallest and largest share of the image's area that a random crop takes."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest aspect ratio of that crop."""
    flip: Probability = 0.5
    """Probability of a horizontal flip."""
    rand_augment: str | None = "rand-m9-mstd0.5-inc1"
    """RandAugment in timm's spelling; null for none."""
    mixup: NonNegativeFloat = 0.8
    """Alpha of Mixup's Beta distribution; 0 for none."""
    cutmix: NonNegativeFloat = 1.0
    """Alpha of CutMix's Beta distribution; 0 for none."""
    cutmix_share: Probability = 0.5
    """How often a group gets CutMix rather than Mixup, where both are on."""
    mix_group: Annotated[int, Field(ge=2, multiple_of=2)] = 64
    """Images that share one draw of Mixup or CutMix, each mixed with another of them."""
    erasing: Probability = 0.25
    """Probability of erasing one rectangle with random pixels."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Probability taken from the label and spread over all classes."""

    @model_validator(mode="after")
    def _ranges_rise(self) -> AugmentationConfig:
        for name in ("crop_scale", "crop_ratio"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(
                    f"data.augmentation.{name} [{low}, {high}]: expected a lower and an upper "
                    "bound above 0"
                )
        return self


class DataConfig(Section):
    """Images, their source and how they are read."""

    source: Literal["embedded", "drawn", "folder", "shards"] = "embedded"
    """embedded: handwritten digits from scikit-learn; drawn: 50,000 drawn images of vit_cifar5m's
    kind; folder: PATH/train/CLASS/*.JPEG and PATH/val/CLASS/*.JPEG; shards: tar or parquet files,
    read through `datasets`."""
    path: str | None = None
    """Folder of the images (folder) or of the shards, train*.tar and val*.tar or *.parquet, also
    in its data/ or after a prefix."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of each class held out (embedded, drawn)."""
    eval_resize: Size = 256
    """Evaluation images are resized to this shorter side before the centre crop."""
    max_unreadable: Count = 10
    """Images that may be unreadable before the run ends, in each process."""
    cache_dir: str = "data/cache"
    """Where `datasets` keeps its Arrow files."""
    augmentation: AugmentationConfig = AugmentationConfig()
    """What training images go through."""

    @model_validator(mode="after")
    def _source_has_what_it_needs(self) -> DataConfig:
        if self.source in ("folder", "shards") and self.path is None:
            raise ValueError(f"data.path is missing: the folder of the {self.source} source")
        if self.source in ("embedded", "drawn") and self.path is not None:
            raise ValueError(f"data.path: source {self.source} takes no path; set data.source")
        return self


class PrescriptionConfig(StrategyConfig):
    """Which scaling strategy gives every tensor its numbers, and factors on two rates of it."""

    position_lr: PositiveFloat = 1.0
    """A factor on the positional embedding's rate; n with standard is II 1E's reading of
    neural-tangent."""
    head_bias_lr: PositiveFloat = 1.0
    """A factor on the rate of the head's bias, which neural-tangent raises, too (footnote 44)."""

    @model_serializer(mode="wrap")
    def _factors(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omits factors of 1, so that they do not enter the run id."""
        return {k: v for k, v in dump(self).items() if not (k.endswith("_lr") and v == 1.0)}


class Config(StrategyRunConfig):
    """One run."""

    without_effect: ClassVar[tuple[str, ...]] = (
        *StrategyRunConfig.without_effect,
        "data.cache_dir",
        "data.max_unreadable",
    )
    constants: ClassVar = {"data.streaming": False, "data.lanes": 32, "data.decoder": "pil"}

    model: ModelConfig
    prescription: PrescriptionConfig
    data: DataConfig

    @model_validator(mode="after")
    def _factors_have_their_tensor(self) -> Config:
        if not self.model.head_bias and self.prescription.head_bias_lr != 1.0:
            raise ValueError(
                "prescription.head_bias_lr: model.head_bias is false, so that no head bias is there"
            )
        return self

    @model_validator(mode="after")
    def _sizes_divide(self) -> Config:
        model = self.model
        for whole, part in (("width", "head_dim"), ("image_size", "patch_size")):
            if getattr(model, whole) % getattr(model, part):
                raise ValueError(
                    f"model.{whole} {getattr(model, whole)} is not a multiple of model.{part} "
                    f"{getattr(model, part)}"
                )
        if self.data.eval_resize < model.image_size:
            raise ValueError(
                f"data.eval_resize {self.data.eval_resize} is less than model.image_size "
                f"{model.image_size}"
            )
        return self

    @model_validator(mode="after")
    def _micro_batches_are_whole_groups(self) -> Config:
        mixing, training = self.data.augmentation, self.training
        if not (mixing.mixup or mixing.cutmix):
            return self
        for key in ("batch_size", "micro_batch_size"):
            images = getattr(training, key)
            if images is not None and images % mixing.mix_group:
                raise ValueError(
                    f"training.{key} {images} does not consist of whole groups of "
                    f"data.augmentation.mix_group {mixing.mix_group}; change one of them"
                )
        return self
