"""Muon for hidden matrices, as a prescription around a rule for Adam."""

import math
from dataclasses import dataclass, replace

from param_groups.prescription import Tensor
from param_groups.quantities import Numbers, check_finite, check_positive
from param_groups.roles import IN, OUT, Layout, PlanError, Role, choose
from param_groups.rules.wrappers import Compared

# The rate of U, the orthogonalised momentum of a matrix (out, in), over the global one.
MUON_CONVENTIONS = {
    "spectral": lambda fan_in, fan_out: math.sqrt(fan_out / fan_in),
    "original": lambda fan_in, fan_out: math.sqrt(max(1.0, fan_out / fan_in)),
    "match_rms": lambda fan_in, fan_out: 0.2 * math.sqrt(max(fan_out, fan_in)),
}


@dataclass(frozen=True)
class Muon(Compared):
    """Muon for the matrices of hidden layers, the rule's AdamW for all other tensors.

    Muon's update is U, the momentum with all singular values near 1, so its spectral norm is the
    rate at every size. `convention` says what multiplies it:

        spectral    sqrt(out/in): changes of activations stay as large as the activations (Bernstein
                    et al.; Dion; torch's "spectral_unclamped")
        original    sqrt(max(1, out/in)): the same powers of the width (Jordan et al. 2024)
        match_rms   0.2 sqrt(max(out, in)): entries as large as AdamW's (Liu et al. 2025), which
                    grows as the root of the width and transfers with the power -1/2

    Muon's rates are multiplied by (width / base width)^rate_exponent, too: by default 0, but -1/2
    for match_rms, which others mostly use with 0. The rule's rates of these matrices and constants
    on them do not count; the power of a `Depth` inside stays. Forward multipliers are divided out.
    Each part of a fused tensor has the rate of its own
    shape, each expert of a stack that of one, and a convolution that of (out, in * kernel).

    Args:
        rule: any prescription for Adam.
        convention, rate_exponent: above.
        adam_factor: what multiplies the rates of AdamW's tensors.
        base_width: of a rule without one.

    Raises:
        PlanError: a number out of range, a rule for another optimiser than Adam or whose rates go
            with the depth outside of branches; from a call, a fused matrix whose parts nobody
            knows, a transposed convolution, a tied matrix.

    Source: Jordan et al. 2024 (Muon); `MUON_CONVENTIONS` names the others.

    >>> from param_groups import Everett
    >>> Muon(Everett("mup", 1024, 256))(Tensor("mlp_in", 1024, 4096)).lr
    2.0
    """

    convention: str = "spectral"
    rate_exponent: float | None = None
    adam_factor: float = 1.0
    marks = {"optimizer": "muon"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule.optimizer != "adam":
            raise PlanError(
                f"Muon: the rule inside has the numbers of AdamW's tensors, but {self.rule.form} "
                f"is for {self.rule.optimizer!r}; give it optimizer='adam'"
            )
        size, n = self.rule.size, round(self.rule.width)
        sizes = [size._replace(depth=depth) for depth in (1, 2) if size.depth is not None]
        squares = [Tensor(Role.QUERY, n, n, size=one, inside=False) for one in sizes]
        if len({self.rule.relative(square).lr for square in squares}) > 1:
            raise PlanError(
                f"Muon: rates of {self.rule.form} go with the depth outside of branches, too, and "
                "Muon's would not; take Muon(Depth(rule, ...)) around a rule without a depth"
            )
        choose("convention", self.convention, MUON_CONVENTIONS)
        check_positive("Muon", adam_factor=self.adam_factor)
        if self.rate_exponent is None:
            power = -0.5 if self.convention == "match_rms" else 0.0
            object.__setattr__(self, "rate_exponent", power)
        check_finite("Muon", rate_exponent=self.rate_exponent)

    @property
    def optimizer(self) -> str:  # type: ignore[override]
        """Muon, with AdamW beside it."""
        return "muon"

    def change(self, tensor: Tensor, numbers: Numbers) -> Numbers:
        """The rate of a hidden matrix is Muon's, by its shape."""
        facts = tensor.role.facts
        if facts.grows != (IN, OUT):
            return replace(numbers, lr=numbers.lr * self.adam_factor, optimizer="adam")
        if tensor.part_of or len(tensor.outputs) != 1:
            raise PlanError(
                f"{tensor}: Muon orthogonalises the matrices of a fused tensor one by one, and of "
                f"its {tensor.fan_out} outputs nobody says which are whose: give its rule "
                "parts=(queries, keys, values) or parts=(1, 1) for gate and up, sizes or ratios "
                "along the outputs; parts=(1,) * (3 * heads) where heads have theirs in turn"
            )
        kernel = tensor.layout is Layout.TRANSPOSED and len(tensor.shape) > 2
        by_head = tensor.layout in (Layout.OUTS_IN, Layout.IN_OUTS, Layout.INS_OUT)
        if tensor.tied_to or kernel or by_head:
            why = "a tensor with an axis of heads" if by_head else "a transposed convolution"
            why = f"tied to {tensor.tied_to[0]}" if tensor.tied_to else why
            raise PlanError(
                f"{tensor} is {why}, and Muon's rate is that of a matrix with one place in the "
                "model: train this model with a rule for Adam"
            )
        power = self.ratio(tensor) ** (self.rate_exponent or 0.0)
        lr = MUON_CONVENTIONS[self.convention](tensor.fan_in, tensor.fan_out) * power
        # What a branch's depth does to the rate, it does to Muon's.
        if tensor.role.facts.branch if tensor.inside is None else tensor.inside:
            lr *= numbers.lr / self.rule.relative(replace(tensor, inside=False)).lr
        return replace(numbers, lr=lr / numbers.multiplier, optimizer="muon")
