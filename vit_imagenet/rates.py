"""A strategy of Dinan, Yaida & Zhang with other rates of the two tensors that II 1E speaks of."""

from __future__ import annotations

from dataclasses import dataclass, replace

from param_groups import Dinan, Numbers, Role, Tensor


@dataclass(frozen=True)
class DinanFactors(Dinan):
    """`Dinan`, with factors on the rates of the positional embedding and of the head's bias.

    Args, beside those of `Dinan`:
        position_lr, head_bias_lr: the factors; 1 leaves a rate as the strategy has it.

    Raises:
        PlanError: as `Dinan`.

    Source: Part II, section 1E and footnote 44, which name the two tensors; the runs are ours.
    """

    position_lr: float = 1.0
    head_bias_lr: float = 1.0

    def __call__(self, tensor: Tensor) -> Numbers:
        """The strategy's numbers, the two rates times their factors."""
        numbers = super().__call__(tensor)
        factors = {
            Role.POSITION_EMBEDDING: self.position_lr,
            Role.READOUT_BIAS: self.head_bias_lr,
        }
        return replace(numbers, lr=numbers.lr * factors.get(tensor.role, 1.0))
