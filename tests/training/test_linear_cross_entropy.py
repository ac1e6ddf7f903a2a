"""The fused readout and loss against torch's two steps, whole and in chunks."""

import pytest
import torch
import torch.nn.functional as F

from training import linear_cross_entropy as losses
from training.linear_cross_entropy import IGNORE, linear_cross_entropy

TOKENS, WIDTH, VOCABULARY = 23, 6, 37


@pytest.fixture(params=["whole", "chunks", "lines"], autouse=True)
def chunks(request, monkeypatch):
    """Every test also with chunks of 5 tokens (the last of 3) and pieces of 2; and with these in
    products of whole lines and the two passes of a GPU, as written."""
    if request.param == "lines":
        monkeypatch.setattr(losses, "_ANY_SIZE", ())
        monkeypatch.setattr(losses, "_EAGER", ())
        monkeypatch.setattr(losses, "_two_passes", losses._two_passes.function)
    if request.param != "whole":
        monkeypatch.setitem(losses._CHUNK, "cpu", 5 * VOCABULARY)
        monkeypatch.setattr(losses, "_PIECE", 200)


def draw(dtype=torch.float64, size=1.0, ignored=(0, 4, 22)):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=generator, dtype=dtype) * size
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=dtype)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    targets[list(ignored)] = IGNORE
    return x.requires_grad_(), weight.requires_grad_(), targets


def two_steps(x, weight, targets, multiplier=1.0):
    logits = multiplier * x @ weight.T
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")


def both(function, x, weight, targets, scale=0.3, **options):
    loss = function(x, weight, targets, **options)
    return loss, *torch.autograd.grad(loss * scale, (x, weight))


@pytest.mark.parametrize("multiplier", [1.0, 0.7])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])  # at 300 most probabilities vanish
def test_loss_and_gradients_are_those_of_torch(multiplier, size):
    inputs = draw(size=size)
    expected = both(two_steps, *inputs, multiplier=multiplier)
    found = both(linear_cross_entropy, *inputs, multiplier=multiplier)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_float32_agrees_with_float64_to_rounding():
    single = both(linear_cross_entropy, *draw(torch.float32))
    x, weight, targets = draw(torch.float32)
    exact = lambda values: values.detach().double().requires_grad_()
    double = both(two_steps, exact(x), exact(weight), targets)
    for got, wanted in zip(single, double, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=2e-6, atol=2e-6)


def test_a_certain_prediction_costs_nothing_and_a_wrong_one_its_margin():
    weight = torch.eye(4).requires_grad_()
    x = torch.tensor([[500.0, 0, 0, 0]] * 2)
    assert linear_cross_entropy(x[:1], weight, torch.tensor([0])) == 0
    assert linear_cross_entropy(x, weight, torch.tensor([0, 1])) == 500


def test_without_gradients_only_the_loss_is_computed(monkeypatch):
    x, weight, targets = draw()
    with_gradients = linear_cross_entropy(x, weight, targets)
    monkeypatch.setattr(losses, "_accumulated", lambda *args: pytest.fail("a gradient"))
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, targets)
    assert torch.equal(loss, with_gradients) and not loss.requires_grad
    detached = linear_cross_entropy(x.detach(), weight.detach(), targets)
    assert torch.equal(detached, loss)


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_of_the_two_may_be_frozen(frozen):
    x, weight, targets = draw()
    wanted = both(two_steps, x, weight, targets)
    inputs = [x, weight]
    inputs[frozen] = inputs[frozen].detach()
    loss = linear_cross_entropy(*inputs, targets) * 0.3
    (got,) = torch.autograd.grad(loss, inputs[1 - frozen])
    torch.testing.assert_close(got, wanted[2 - frozen], rtol=1e-12, atol=1e-12)


def test_a_weight_tied_to_the_embedding_collects_both_gradients():
    _, weight, targets = draw()
    ids = torch.arange(TOKENS)
    got = torch.autograd.grad(linear_cross_entropy(weight[ids], weight, targets), weight)
    wanted = torch.autograd.grad(two_steps(weight[ids], weight, targets), weight)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_all_targets_ignored_is_no_loss_and_no_gradient():
    results = both(linear_cross_entropy, *draw(ignored=range(TOKENS)))
    assert not any(result.abs().any() for result in results)


@pytest.mark.parametrize("target", [VOCABULARY, 10 * VOCABULARY, -1])
def test_a_target_outside_the_vocabulary_is_refused(target):
    x, weight, targets = draw()
    targets[3] = target
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(x, weight, targets)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_under_autocast_the_products_are_low_and_all_else_float32(low):
    x, weight, targets = draw(torch.float32)
    with torch.autocast("cpu", low):
        loss, x_grad, weight_grad = both(linear_cross_entropy, x, weight, targets)
    assert {loss.dtype, x_grad.dtype, weight_grad.dtype} == {torch.float32}
    rounded = (x.detach().to(low) @ weight.detach().to(low).T).float()
    wanted = F.cross_entropy(rounded, targets, ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    exact = both(two_steps, x, weight, targets)
    for got, reference in zip((x_grad, weight_grad), exact[1:], strict=True):
        assert not torch.equal(got, reference)
        assert (got - reference).norm() < 0.01 * reference.norm()


@pytest.mark.parametrize("autocast", [False, True])
def test_it_compiles_whole_and_keeps_its_values(autocast):
    inputs = draw(torch.float32)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got, wanted = both(compiled, *inputs), both(linear_cross_entropy, *inputs)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_torch_approves_of_the_operation():
    x, weight, targets = draw()
    arguments = (x.detach(), weight.detach(), targets, 0.5, torch.float64)
    for gradients in (True, False):
        torch.library.opcheck(losses._opaque, (*arguments, gradients))


def test_the_logits_are_never_whole(chunks):
    """The largest tensor made is one chunk's buffer."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                Largest.numel = max(Largest.numel, result.numel())
            return result

    inputs = draw()
    arguments = (*(tensor.detach() for tensor in inputs), 1.0, torch.float64, True)
    with Largest():
        losses._opaque._init_fn(*arguments)
    buffer = losses._buffer(inputs[0], VOCABULARY)
    # Of whole lines the padded weight, 40 x 6, is the largest.
    assert Largest.numel <= max(buffer.numel(), (VOCABULARY + 3) * WIDTH)
