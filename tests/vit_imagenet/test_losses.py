"""vit_imagenet.losses against timm's losses and counts by hand."""

import math

import pytest
import torch
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

from vit_imagenet.losses import IGNORE, measure, soft_cross_entropy


def draw(batch=6, classes=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(batch, classes, generator=generator)
    return logits, torch.randint(classes, (batch,), generator=generator)


def test_soft_cross_entropy_is_timms_on_timms_mixed_targets():
    logits, labels = draw()
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=7)
    _, targets = mixup(torch.randn(6, 3, 4, 4), labels)
    expected = 6 * SoftTargetCrossEntropy()(logits, targets)
    torch.testing.assert_close(soft_cross_entropy(logits, targets), expected)


def test_soft_cross_entropy_of_smoothed_labels_is_timms_label_smoothing():
    logits, labels = draw()
    targets = torch.full((6, 7), 0.1 / 7).scatter_add(1, labels[:, None], torch.full((6, 1), 0.9))
    expected = 6 * LabelSmoothingCrossEntropy(0.1)(logits, labels)
    torch.testing.assert_close(soft_cross_entropy(logits, targets), expected)


def test_equal_logits_cost_the_log_of_the_classes():
    targets = torch.eye(4)[:3]
    assert soft_cross_entropy(torch.zeros(3, 4), targets).item() == pytest.approx(3 * math.log(4))


@pytest.mark.parametrize("loss", ["soft", "measured"])
def test_bf16_logits_under_autocast_lose_no_further_precision(loss):
    logits, labels = draw(batch=64, classes=1000)
    logits = logits.bfloat16()
    function = {
        "soft": lambda z: soft_cross_entropy(z, torch.nn.functional.one_hot(labels, 1000).float()),
        "measured": lambda z: measure(z, labels)["loss"],
    }[loss]
    exact = function(logits.double())
    with torch.autocast("cpu", torch.bfloat16):
        found = function(logits)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


def test_the_gradient_is_that_of_float64():
    logits, labels = draw()
    targets = torch.nn.functional.one_hot(labels, 7).double()
    logits = logits.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: soft_cross_entropy(z, targets), logits)


def test_measure_counts_by_rank_and_leaves_out_images_without_label():
    logits = torch.arange(7.0).repeat(5, 1)  # class 6 first, then 5, 4, 3, 2, 1, 0
    sums = measure(logits, torch.tensor([6, 5, 2, 1, IGNORE]))
    assert {name: sums[name].item() for name in ("top1", "top5")} == {"top1": 1, "top5": 3}
    total = math.log(sum(math.exp(k) for k in range(7)))
    assert sums["loss"].item() == pytest.approx(4 * total - (6 + 5 + 2 + 1), rel=1e-6)


def test_with_fewer_than_five_classes_top5_is_among_all():
    logits, labels = draw(classes=3)
    assert measure(logits, labels)["top5"] == 6


def test_a_batch_without_labels_sums_to_zero():
    sums = measure(torch.randn(3, 9), torch.full((3,), IGNORE))
    assert {name: value.item() for name, value in sums.items()} == {"loss": 0, "top1": 0, "top5": 0}
