"""What training minimises and evaluation reports: soft cross-entropy, top-1 and top-5."""

from __future__ import annotations

import torch
from torch.nn import functional

IGNORE = -100  # label of an image that could not be read; it counts nowhere


def soft_cross_entropy(logits_BxK: torch.Tensor, targets_BxK: torch.Tensor) -> torch.Tensor:
    """Summed -sum_k t_k log softmax(z)_k in nats, in float32 or better whatever the logits are."""
    dtype = torch.promote_types(logits_BxK.dtype, torch.float32)
    log_probabilities_BxK = functional.log_softmax(logits_BxK, dim=-1, dtype=dtype)
    return -(targets_BxK * log_probabilities_BxK).sum()


def count(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The images of a batch; in evaluation, where labels are numbers, those that have a label."""
    images, labels = batch
    return torch.tensor(len(images)) if labels.ndim == 2 else (labels != IGNORE).sum()


def measure(logits_BxK: torch.Tensor, labels_B: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over the images with a label: cross-entropy in nats, and how many were right.

    top1 counts images whose label has the largest logit, top5 those whose label is among the five
    largest (among all, with fewer than five classes).
    """
    dtype = torch.promote_types(logits_BxK.dtype, torch.float32)
    loss = functional.cross_entropy(
        logits_BxK.to(dtype), labels_B, ignore_index=IGNORE, reduction="sum"
    )
    best = logits_BxK.topk(min(5, logits_BxK.shape[-1]), dim=-1).indices
    right = best == labels_B[:, None]  # IGNORE is no class
    return {"loss": loss, "top1": right[:, 0].sum(), "top5": right.sum()}
