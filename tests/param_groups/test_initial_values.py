"""What a plan does to tiny models: initial values, multipliers, and equivalent training."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from param_groups import EpsFollows, Everett, PlanError, Role, Rule, plan, rules_for
from param_groups.layers import Linear
from param_groups.plan import DECAY_MODES
from param_groups.quantities import NORMAL, UNIFORM, Numbers
from tests.param_groups.test_plan import (
    CONTEXT,
    RULES,
    VOCABULARY,
    WIDTH,
    Decoder,
    Fixed,
    decoder_plan,
    mup,
)


class Matrices(nn.Module):
    def __init__(self, *names, width=192):
        super().__init__()
        for name in names:
            self.add_module(name, Linear(width, width))


HALF = Numbers(0.5)


def drawn(*names, seed=0, numbers=HALF, dtype=torch.float32, width=192):
    """Named matrices filled with one kind of numbers."""
    model = Matrices(*names, width=width).to(dtype)
    fixed = Fixed(width, query=numbers)
    plan(model, [Rule("*", Role.QUERY)], fixed, lr=0.1).initialise(model, seed=seed)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("std", [0.02, 3.0])
@pytest.mark.parametrize("distribution", [NORMAL, UNIFORM])
def test_samples_have_the_mean_and_deviation_asked_for(distribution, std):
    """Within five standard errors; 36,864 samples."""
    values = drawn("a", numbers=Numbers(std, distribution, 7.0), dtype=torch.float64)["a.weight"]
    kurtosis = {NORMAL: 3.0, UNIFORM: 1.8}[distribution]
    count = values.numel()
    assert abs(values.mean() - 7.0) < 5 * std / count**0.5
    assert abs(values.std() / std - 1) < 5 * ((kurtosis - 1) / (4 * count)) ** 0.5
    measured = ((values - 7.0) / std).pow(4).mean()
    assert measured == pytest.approx(kurtosis, abs=0.25)


def test_uniform_samples_fill_their_interval_and_constants_are_exact():
    values = drawn("a", numbers=Numbers(0.1, UNIFORM))["a.weight"]
    bound = math.sqrt(3) * 0.1
    assert 0.999 * bound < values.max() <= bound * (1 + 1e-6)
    assert -0.999 * bound > values.min() >= -bound * (1 + 1e-6)
    assert drawn("a", numbers=Numbers(0.0, "constant", 0.25))["a.weight"].unique().item() == 0.25


@pytest.mark.parametrize("distribution", [NORMAL, UNIFORM])
def test_values_depend_on_seed_and_name_alone(distribution):
    """Neither the order of the model nor tensors added elsewhere move a draw."""
    numbers = Numbers(0.5, distribution)
    orders = (("a",), ("a", "b", "c"), ("c", "b", "a"))
    alone, first, last = (drawn(*names, numbers=numbers) for names in orders)
    for other in (first, last):
        assert torch.equal(alone["a.weight"], other["a.weight"])
    assert torch.equal(first["b.weight"], last["b.weight"])


def test_names_and_seeds_draw_independent_values():
    one, other = drawn("a", "b"), drawn("a", "b", seed=1)
    draws = torch.stack([values.flatten() for x in (one, other) for values in x.values()])
    off_diagonal = torch.corrcoef(draws) - torch.eye(4)
    assert off_diagonal.abs().max() < 5 / draws.shape[1] ** 0.5


def test_precisions_start_from_the_same_numbers():
    """The float64 values are the float32 draws, scaled: equal up to float32's own rounding."""
    single, double = (drawn("a", dtype=d)["a.weight"] for d in (torch.float32, torch.float64))
    half = drawn("a", dtype=torch.bfloat16)["a.weight"]
    torch.testing.assert_close(single.double(), double, rtol=2**-23, atol=0.0)
    torch.testing.assert_close(half.double(), double, rtol=2**-7, atol=0.0)


def test_deviations_scale_the_same_draw():
    """So that models of one shape under two plans start from equal effective weights."""
    one = drawn("a", numbers=Numbers(1.0), dtype=torch.float64)["a.weight"]
    other = drawn("a", numbers=Numbers(0.3), dtype=torch.float64)["a.weight"]
    assert torch.equal(one * 0.3, other)


@pytest.mark.parametrize("owner", ["tokens", "readout"])
@pytest.mark.parametrize("padding", [2, -1])
def test_the_row_of_padding_is_zero_and_no_other_value_changes(owner, padding):
    """Whichever of a tied tensor's modules has it; a name's other rows are drawn as without it."""
    both = ("tokens", "readout")
    models = [nn.ModuleDict({n: nn.Embedding(5, WIDTH) for n in both}) for _ in range(2)]
    models[1][owner] = nn.Embedding(5, WIDTH, padding_idx=padding)
    for model in models:
        model["readout"].weight = model["tokens"].weight
        plan(model, RULES[:1], Fixed(), lr=0.1).initialise(model, seed=0)
    plain, padded = (model["tokens"].weight.clone() for model in models)
    assert not padded[padding].any() and plain.all()
    plain[padding] = 0
    assert torch.equal(plain, padded)


def test_initialising_twice_is_initialising_once():
    model = Decoder()
    result = decoder_plan(model=model)
    result.initialise(model, seed=3)
    once = {name: p.detach().clone() for name, p in model.named_parameters()}
    multiplier = model.tokens.multiplier
    result.initialise(model, seed=3)
    assert all(torch.equal(once[name], p) for name, p in model.named_parameters())
    assert model.tokens.multiplier == multiplier


@pytest.mark.parametrize("distribution", [NORMAL, UNIFORM])
def test_torchs_global_generator_is_left_alone(distribution):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    drawn("a", numbers=Numbers(0.5, distribution), width=4)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("start", [1.0, 1.1])
def test_a_gain_that_is_called_a_bias_is_not_set_to_zero(start):
    """A norm's scale at 0 makes every output 0, and nothing below it has a gradient."""
    model = nn.ParameterDict({"out": torch.randn(8, 8), "gain": torch.full((8,), start)})
    rules = [Rule("out", Role.HIDDEN), Rule("gain", Role.HIDDEN_BIAS)]
    make = lambda: plan(model, rules, Everett("mup", 8, 8), lr=0.1, absorb_multipliers=True)
    numbers, before = make(), model["out"].clone()
    said = rf"'gain' \(hidden_bias\) is {start:g} in all entries, and "
    with pytest.raises(PlanError, match=said):
        numbers.initialise(model, seed=0)
    assert torch.equal(model["out"], before)  # nothing was drawn
    numbers.initialise(model, seed=0, keep=["gain"])
    assert model["gain"].eq(start).all()
    rules[1] = Rule("gain", Role.LAYER_SCALE, scale=start)
    make().initialise(model, seed=0)
    assert model["gain"].eq(start).all()


def test_a_bias_that_is_no_constant_or_one_entry_is_set_to_zero():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    rules = [Rule("*.weight", Role.HIDDEN), Rule("*.bias", Role.HIDDEN_BIAS)]
    numbers = plan(model, rules, Everett("mup", 8, 8), lr=0.1, absorb_multipliers=True)
    numbers.initialise(model, seed=0)
    assert not model[0].bias.any() and not model[1].bias.any()


def pretrained(tmp_path):
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9, n_positions=4)
    config.tie_word_embeddings = False
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    return transformers.GPT2LMHeadModel.from_pretrained(tmp_path), rules_for


def normed(*_):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8))
    rules = [Rule("0.weight", Role.HIDDEN), Rule("1.weight", Role.NORM_SCALE)]
    return model, lambda _: [*rules, Rule("1.bias", Role.NORM_BIAS)]


def loaded_before(tmp_path):
    model, rules = normed()
    state = {**model.state_dict(), "1.weight": torch.linspace(0.5, 1.5, 8)}
    model.load_state_dict(state)
    return model, rules


def loaded_whole(tmp_path):
    model, rules = loaded_before(tmp_path)
    torch.save(model, tmp_path / "model.pt")
    return torch.load(tmp_path / "model.pt", weights_only=False), rules


def copied(tmp_path):
    model, rules = loaded_before(tmp_path)
    return copy.deepcopy(model), rules


def loaded_after(model):
    model.load_state_dict({name: value + 1e-3 for name, value in model.state_dict().items()})


def stepped(model):
    model(torch.ones(1, 8)).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=1e-6).step()


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (pretrained, None, "the model was loaded from '.*', and its weights would go"),
        (loaded_before, None, r"'1.weight' \(norm_scale\) has other values than a fresh model's"),
        (loaded_whole, None, r"'1.weight' \(norm_scale\) has other values than a fresh model's"),
        (copied, None, r"'1.weight' \(norm_scale\) has other values than a fresh model's"),
        (normed, loaded_after, "'0.weight' was written to since the plan was made or drawn, by l"),
        (normed, stepped, "'0.weight' was written to since the plan was made or drawn, by load_s"),
    ],
    ids=["from_pretrained", "load_state_dict", "load", "deepcopy", "load_state_dict later", "step"],
)
def test_a_checkpoint_is_not_drawn_over_in_silence(tmp_path, make, change, message):
    model, rules = make(tmp_path)
    rule = Everett("mup", 8, 8, qk_exponent=-0.5)
    numbers = plan(model, rules(model), rule, lr=0.1, absorb_multipliers=True)
    if change:
        change(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PlanError, match=f"{message}.*apply_multipliers.* keeps .*overwrite=True"):
        numbers.initialise(model, seed=0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    numbers.initialise(model, seed=0, overwrite=True)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    numbers.initialise(model.train(), seed=0)  # what it drew itself may be drawn again
    assert all(torch.equal(value, first[name]) for name, value in model.state_dict().items())
    if change:  # after training, too
        change(model)
        with pytest.raises(PlanError, match=message):
            numbers.initialise(model, seed=0)


def test_a_fresh_model_of_a_checkpoints_config_and_a_new_head_are_drawn(tmp_path):
    model, rules = pretrained(tmp_path)
    fresh = transformers.AutoModelForCausalLM.from_config(model.config)
    assert fresh.name_or_path  # a config keeps where it is from
    rule = Everett("mup", 8, 8, qk_exponent=-0.5)
    for one, keep in ((fresh, ()), (model, ["transformer.*"])):
        numbers = plan(one, rules(one), rule, lr=0.1, absorb_multipliers=True)
        numbers.initialise(one, seed=0, keep=keep)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    numbers.initialise(model, seed=0)


def test_memory_that_nothing_was_written_to_is_drawn():
    with torch.device("meta"):
        model, rules = normed()
    numbers = plan(model, rules(model), Everett("mup", 8, 8), lr=0.1, absorb_multipliers=True)
    model.to_empty(device="cpu")
    model[1].weight.data.copy_(torch.rand(8))  # whatever it holds
    numbers.initialise(model, seed=0)


def test_a_forgotten_initialisation_shows_in_the_first_output():
    model = Decoder()
    ids = torch.zeros(1, CONTEXT, dtype=torch.long)
    assert model(ids).isnan().all()
    decoder_plan(model=model).initialise(model, seed=0)
    assert model(ids).isfinite().all()


def test_initialising_sets_the_multiplier_of_every_layer():
    model = Decoder()
    decoder_plan(model=model).initialise(model, seed=0)
    assert model.tokens.multiplier == pytest.approx(8**0.5)
    assert model.blocks[1].norm.multiplier == pytest.approx(8**0.5)
    assert model.blocks[1].query.multiplier == 1.0
    assert model.readout.multiplier == pytest.approx(8**-0.5)
    effective = model.blocks[1].norm.weight * model.blocks[1].norm.multiplier
    torch.testing.assert_close(effective, torch.ones(8))


def test_a_second_plan_replaces_the_multipliers():
    model = Decoder()
    decoder_plan(model=model).initialise(model, seed=0)
    decoder_plan(Everett("standard", WIDTH, 4), model).initialise(model, seed=0)
    assert {layer.multiplier for layer in model.modules() if hasattr(layer, "multiplier")} == {1.0}


def test_both_layers_of_a_tied_tensor_get_its_multiplier():
    model = Decoder()
    model.readout.weight = model.tokens.weight
    numbers = Numbers(0.5, multiplier=3.0)
    fixed = Fixed(token_embedding=numbers, readout=numbers)
    plan(model, RULES[:-1], fixed, lr=0.1).initialise(model, seed=0)
    assert model.tokens.multiplier == model.readout.multiplier == 3.0


def test_a_word_embedding_may_stand_in_a_module_of_ones_own():
    model = nn.Module()
    model.tokens, model.readout = nn.Module(), nn.Linear(WIDTH, 11, bias=False)
    model.tokens.weight = nn.Parameter(torch.ones(11, WIDTH))
    rules = (RULES[0], RULES[-1])
    assert len(plan(model, rules, mup(), lr=0.1).rows) == 2
    model.readout.weight = model.tokens.weight
    with pytest.raises(PlanError, match="'tokens.weight' is tied to readout.weight.*Tied"):
        plan(model, rules[:1], mup(), lr=0.1)


def trained(model, result, optimizer, steps=10):
    """The losses of a few steps on random tokens, in float64."""
    model = model.double()
    result.initialise(model, seed=1)
    built = optimizer(result.groups(model))
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        ids = torch.randint(VOCABULARY, (4, CONTEXT + 1), generator=generator)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        built.zero_grad()
        loss.backward()
        built.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9),
    "adam": lambda groups: torch.optim.AdamW(groups),
}


@pytest.mark.parametrize("mode", DECAY_MODES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["ntk", "mup", "mean_field"])
def test_absorbed_multipliers_train_the_same(name, optimizer, mode):
    """Plain torch layers follow the layers with multipliers, epsilon and decay included."""
    prescription = EpsFollows(Everett(name, WIDTH, 4, optimizer=optimizer))
    # An epsilon as large as the gradients, so that a wrong one is seen; SGD couples its decay to
    # momentum, where only the product of rate and decay matters all the same.
    settings = {"lr": 0.02, "eps": 1e-2 if optimizer == "adam" else 0.0}
    settings |= {"weight_decay": 0.05, "decay_mode": mode}
    with_layers, plain = Decoder(), Decoder(plain=True)
    absorbed = decoder_plan(prescription, plain, absorb_multipliers=True, **settings)
    assert {row.multiplier for row in absorbed.rows} == {1.0}
    kept = decoder_plan(prescription, with_layers, **settings)
    one = trained(with_layers, kept, OPTIMIZERS[optimizer])
    other = trained(plain, absorbed, OPTIMIZERS[optimizer])
    assert other == pytest.approx(one, rel=1e-10)
    assert abs(one[-1] - one[0]) > 1e-3
