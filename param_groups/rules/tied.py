"""A word embedding that is the readout, too, in a model that is trained from scratch."""

from dataclasses import dataclass

from param_groups.prescription import Forward, Size, Tensor
from param_groups.quantities import Numbers
from param_groups.roles import PlanError, Role
from param_groups.rules.wrappers import Compared


@dataclass(frozen=True)
class Tied(Compared):
    """The embedding's numbers for a tensor that embeds and reads out, and logits times b / n.

    Under muP an embedding starts with entries of order one and changes by as much per step. Read
    out by it, logits are sums over the width n of products that all point one way: that of a
    position's own token starts at n. Times b / n, b the base width, they are of order one at the
    start, and so are their changes. The model applies the factor, where the readout's module or a
    hook of it returns the logits, so that a check sees them.

    Args:
        rule: any prescription with a base width, Muon's too.
        base_width: of a rule without one.

    Raises:
        PlanError: from a call, a tied tensor that is named by its readout; from a plan, a model
            without one, and multipliers that are not absorbed, of which two layers need two.

    Source: the shared readout of mup (Yang et al. 2022).

    >>> from param_groups import Everett
    >>> Tied(Everett("mup", 1024, 256)).forward().logit_multiplier
    0.25
    """

    marks = {"tied": True}

    def change(self, tensor: Tensor, numbers: Numbers) -> Numbers:
        """The same: a tied tensor is an embedding in its model's rules."""
        if tensor.reads_out and tensor.role is not Role.TOKEN_EMBEDDING:
            raise PlanError(f"{tensor} is tied to an embedding: name it once, as token_embedding")
        return numbers

    def forward(self, size: Size | None = None) -> Forward:
        """The rule's with a tie, and its factor on logits times b / n."""
        size = size or self.size
        inner = self.rule.forward(size)
        factor = inner.logit_multiplier * self.base.width / size.width
        return inner._replace(logit_multiplier=factor, ties=True)
