"""The encoder-decoder: padding, dropout, compilation, bf16; its function is fairseq's (interop)."""

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn

from bart_span_denoise.model import PADDING, RULES, Bart
from param_groups import Dinan, plan
from training import sharding
from training.linear_cross_entropy import IGNORE

WIDTH, HEADS, LAYERS, VOCABULARY, ROWS = 16, 2, 2, 40, 14
SMALL = {"vocab_size": VOCABULARY, "width": WIDTH, "heads": HEADS, "layers": LAYERS}
SMALL |= {"position_rows": ROWS, "attention_scale": 0.4, "logit_multiplier": 0.3}


def small(seed=0, **changes):
    """A little model in float64 with every weight drawn at a size where all parts matter."""
    model = Bart(**{**SMALL, **changes}).double().eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(noise * 0.4)
    model.zero_padding()
    return model


def tokens(rows, length, pads=0, seed=1):
    """Ids without [pad], but for the last `pads` of the first row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCABULARY, (rows, length), generator=generator)
    ids[0, length - pads :] = PADDING
    return ids


def batch(seed=1):
    """Encoder ids, decoder ids and targets, with unequal lengths."""
    encoder, decoder = tokens(3, 11, 4, seed), tokens(3, 9, 3, seed + 1)
    targets = tokens(3, 9, 3, seed + 2)
    return encoder, decoder, targets.masked_fill(targets == PADDING, IGNORE)


def test_what_a_pad_holds_changes_only_the_logit_of_pad():
    model, (encoder, decoder, _) = small(), batch()
    before = model(encoder, decoder)
    with torch.no_grad():
        model.word_embedding.weight[PADDING] = 3.0
    after = model(encoder, decoder)
    other = torch.arange(VOCABULARY) != PADDING
    real = decoder != PADDING
    assert torch.equal(after[real][:, other], before[real][:, other])
    assert (before[..., PADDING] == 0).all() and (after[..., PADDING] != 0).any()


def test_more_padding_changes_neither_loss_nor_gradients():
    model, (encoder, decoder, targets) = small(), batch()
    parameters = list(model.parameters())
    short = model(encoder, decoder, targets)
    wide = [F.pad(ids, (0, 2), value=PADDING) for ids in (encoder, decoder)]
    long = model(*wide, F.pad(targets, (0, 2), value=IGNORE))
    torch.testing.assert_close(long, short, rtol=1e-12, atol=0)
    for a, b in zip(
        torch.autograd.grad(long, parameters), torch.autograd.grad(short, parameters), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_source_of_nothing_but_padding_gives_numbers():
    model, (encoder, decoder, targets) = small(), batch()
    encoder[1] = PADDING
    logits = model(encoder, decoder)
    loss = model(encoder, decoder, targets)
    loss.backward()
    mask = model.encode(encoder)[1]
    assert mask.any(-1).all()  # to attend to nothing is NaN in some kernels, and 0 in others
    assert mask[:, 0, 0].sum(-1).tolist() == [7, 11, 11]
    assert logits.isfinite().all() and loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    alone = model(encoder[[0, 2]], decoder[[0, 2]])
    torch.testing.assert_close(logits[[0, 2]], alone, rtol=1e-12, atol=1e-12)


def test_attention_logits_are_scaled_as_told():
    """Another scale than fairseq's: twice the scale is twice the queries."""
    model, double, ids = small(), small(attention_scale=0.8), batch()[:2]
    for name, parameter in model.named_parameters():
        parameter.data.mul_(2.0 if "query" in name else 1.0)
    torch.testing.assert_close(double(*ids), model(*ids), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(double(*ids), small()(*ids))


@pytest.mark.parametrize("strategy", ["standard", "neural_tangent"])
def test_the_row_of_padding_starts_at_zero_and_stays_there(strategy):
    model = Bart(**SMALL).train()
    prescription = Dinan(WIDTH, strategy=strategy, init="bart")
    numbers = {"lr": 0.3, "eps": 1e-6, "weight_decay": 0.05, "decay_mode": "global"}
    result = plan(model, RULES, prescription, **numbers)
    result.initialise(model, seed=0)
    assert (model.word_embedding.weight[PADDING] != 0).all()
    model.zero_padding()
    start = model.word_embedding.weight.detach().clone()
    assert (start[PADDING] == 0).all() and (start[:PADDING] != 0).all()
    optimizer = torch.optim.AdamW(result.groups(model), betas=(0.9, 0.998))
    for step in range(4):
        model(*batch(seed=step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    assert (model.word_embedding.weight[PADDING] == 0).all()
    others = torch.arange(VOCABULARY) != PADDING
    assert (model.word_embedding.weight != start)[others].all()


@pytest.mark.parametrize("fused", [True, False])
def test_padding_gets_no_gradient_from_lookups_or_the_output(fused):
    model, (encoder, decoder, targets) = small(), batch()
    encoder[1] = PADDING  # attended to, for want of anything else
    loss = model(encoder, decoder, targets) if fused else model(encoder, decoder).square().sum()
    loss.backward()
    assert (model.word_embedding.weight.grad[PADDING] == 0).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sharded_row_of_padding_is_zeroed_where_it_lies(rank):
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=2)
    try:
        whole = torch.randn(7, 3)
        model = Bart(**{**SMALL, "vocab_size": 7, "width": 3, "heads": 1, "padding": 5})
        mesh = init_device_mesh("cpu", (2,))
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        sharding.local(sharded).copy_(whole[:4] if rank == 0 else whole[4:])
        model.word_embedding.weight = nn.Parameter(sharded)
        model.zero_padding()
        expected = whole.clone()
        expected[5] = 0
        part = sharding.local(model.word_embedding.weight.detach())
        assert torch.equal(part, expected[:4] if rank == 0 else expected[4:])
    finally:
        distributed.destroy_process_group()


@pytest.mark.thorough
@pytest.mark.parametrize("training", [False, True])
def test_it_compiles_without_graph_breaks(training):
    torch._dynamo.reset()
    changes = {} if training else {"dropout": 0.0, "attention_dropout": 0.0}
    model = small(**changes).train(training)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    encoder, decoder, targets = batch()
    parameters = list(model.parameters())
    for arguments in ((encoder, decoder), (encoder, decoder, targets)):
        results = []
        for call in (model, compiled):
            torch.manual_seed(0)
            result = call(*arguments)
            results.append([result, *torch.autograd.grad(result.square().sum(), parameters)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_bf16_autocast_agrees_roughly_and_gives_float32():
    model, (encoder, decoder, targets) = small().float(), batch()
    encoder[1] = PADDING
    exact = model(encoder, decoder)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, loss = model(encoder, decoder), model(encoder, decoder, targets)
    loss.backward()
    assert (logits.dtype, loss.dtype) == (torch.float32, torch.float32)
    assert not torch.equal(logits, exact)
    assert (logits - exact).square().mean().sqrt() < 0.05 * exact.square().mean().sqrt()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert (model.word_embedding.weight.grad[PADDING] == 0).all()


@pytest.mark.parametrize(("dropout", "attention_dropout"), [(0.1, 0.0), (0.0, 0.1), (0.1, 0.1)])
def test_dropout_acts_in_training_only_and_follows_the_seed(dropout, attention_dropout):
    model = small(dropout=dropout, attention_dropout=attention_dropout)
    ids = batch()[:2]
    still = model(*ids)
    assert torch.equal(model(*ids), still)
    model.train()
    torch.manual_seed(0)
    first, second = model(*ids), model(*ids)
    torch.manual_seed(0)
    assert torch.equal(model(*ids), first)
    assert not torch.equal(first, second) and not torch.equal(first, still)


def test_dropout_stands_on_both_stems_and_every_branch():
    model = small(dropout=0.5, attention_dropout=0.0).train()
    calls = []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda m, args, y: calls.append((y == 0).any().item()))
    model(*batch()[:2])
    assert calls == [True] * (2 + 2 * LAYERS + 3 * LAYERS)
