"""The config of an experiment that the strategies of Dinan, Yaida & Zhang (Part II) scale."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from training.config import Section
from training.settings import RunConfig

Probability = Annotated[float, Field(ge=0, le=1)]
OPTIMIZERS = ("adam", "sgd")  # for which the paper has rates


class StrategyConfig(Section):
    """Which scaling strategy gives every tensor its numbers (Dinan et al., Part II)."""

    strategy: Literal["standard", "neural_tangent", "hybrid", "maximal_update", "meta_principled"]
    """The paper's four (its BART is trained with standard and neural_tangent alone), or
    meta_principled with an `s` of its own."""
    s: Probability | None = None
    """0 is neural_tangent, 1/2 hybrid, 1 maximal_update (footnote 8)."""
    mlp_factor: Literal["drop", "keep"] = "drop"
    """keep has the theory's factors of M in (1.114), (1.115); the paper's runs drop them."""


class StrategyRunConfig(RunConfig):
    """One run of such an experiment."""

    prescription: StrategyConfig

    @model_validator(mode="after")
    def _the_paper_has_it(self) -> StrategyRunConfig:
        if self.optimizer.name not in OPTIMIZERS:
            raise ValueError(
                f"optimizer.name {self.optimizer.name}: Dinan et al. prescribe for adam and sgd "
                "alone; use one of them"
            )
        named = self.prescription.strategy != "meta_principled"
        if named is not (self.prescription.s is None):
            raise ValueError(
                "prescription.s goes with strategy meta_principled, which needs it; the other "
                "strategies fix it"
            )
        return self
