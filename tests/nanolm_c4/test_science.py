"""What the theory promises of the decoder: equivalent parameterisations and base width."""

import pytest
import torch

from nanolm_c4 import train
from nanolm_c4.config import Config
from training.config import load
from training.optim import optimizers

VOCABULARY, CONTEXT = 48, 16


def config(**keys):
    """The laptop config, small, with dotted keys (`__` for the dot) changed."""
    changes = {"model.layers": 2, "model.context": CONTEXT, "model.head_dim": 8}
    changes |= {key.replace("__", "."): value for key, value in keys.items()}
    words = [f"{key}={'null' if value is None else value}" for key, value in changes.items()]
    return load(Config, "nanolm_c4/configs/laptop.yaml", words)


def build(settings, dtype=torch.float64):
    """(initialised model, plan) of a config."""
    model = train.build_model(settings, VOCABULARY).to(dtype)
    numbers = train.build_plan(settings, model)
    numbers.initialise(model, settings.seed)
    return model, numbers


def batch(seed, rows=4):
    """Rows that count up in steps of five from random starts: something to learn."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, VOCABULARY, (rows, 1), generator=generator)
    ids = (starts + 5 * torch.arange(CONTEXT + 1)) % VOCABULARY
    return ids[:, :-1], ids[:, 1:]


def losses(settings, steps=10, optimizer="adam_atan2"):
    """The losses of some steps in float64, trained as planned."""
    model, numbers = build(settings)
    rule = optimizers.build(optimizer, numbers.groups(model), betas=(0.9, 0.95))
    history = []
    for step in range(steps):
        loss = model(*batch(step)) / (4 * CONTEXT)
        history.append(loss.item())
        rule.zero_grad()
        loss.backward()
        rule.step()
    return history


# Everett et al., B.2: W' = W n^-theta moves a constant from the initial weights into the
# multiplier. With rates gamma (n/b)^-c the same move at the base width needs gamma' = gamma
# b^theta: here theta is (embedding, hidden, readout).
PAIRS = {("standard", "ntk"): (0.0, 0.5, 0.5), ("mup", "mean_field"): (0.5, 0.5, 0.5)}
CONSTANTS = {"embedding": 3.0, "hidden": 0.2, "readout": 5.0}


def trained(name, alignment, optimizer, width=48, **more):
    """The losses under a rule with equal effective scales and hardly an epsilon."""
    keys = {"model__width": width, "prescription__base_width": 32}
    keys |= {"prescription__parameterization": name, "prescription__alignment": alignment}
    keys |= {"prescription__embedding_std": 0.3, "prescription__qk_exponent": -0.5}
    keys |= {"optimizer__lr": 0.01, "optimizer__eps": 1e-30, "optimizer__name": optimizer}
    return losses(config(**keys, **more), optimizer=optimizer)


@pytest.mark.parametrize("alignment", ["full", "none"])
@pytest.mark.parametrize("optimizer", ["adam_atan2", "adam"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("width", [16, 48])
def test_equivalent_parameterisations_train_alike(pair, optimizer, alignment, width):
    thetas = zip(("embedding", "hidden", "readout"), PAIRS[pair], strict=True)
    gammas = {f"prescription__gamma_{layer}": 32**theta for layer, theta in thetas}
    one = trained(pair[0], alignment, optimizer, width)
    two = trained(pair[1], alignment, optimizer, width, **gammas)
    assert one == pytest.approx(two, rel=1e-10, abs=0)
    assert one[-1] < one[0] - 0.1  # something was learnt


@pytest.mark.parametrize("alignment", ["full", pytest.param("none", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adam_param_scaling", "adafactor"])
@pytest.mark.parametrize("pair", PAIRS)
def test_equal_effective_constants_give_equal_losses(pair, optimizer, alignment):
    """So a search of effective constants is over one set for both; in a tensor's units it is not:
    there the same constants are other rates, and other losses."""
    gammas = {f"prescription__gamma_{layer}": gamma for layer, gamma in CONSTANTS.items()}

    def ends(units):
        keys = {**gammas, "prescription__gamma_units": units}
        return [trained(name, alignment, optimizer, **keys) for name in pair]

    one, two = ends("effective")
    assert one == pytest.approx(two, rel=1e-9, abs=0)
    one, two = ends("tensor")
    relative = optimizer in ("adam_param_scaling", "adafactor")  # whose rates know no multiplier
    assert (abs(one[-1] / two[-1] - 1) < 1e-9) == relative


@pytest.mark.parametrize("alignment", ["full", "none", "global"])
@pytest.mark.parametrize("name", ["standard", "ntk", "mup", "mean_field"])
def test_at_the_base_width_training_is_plain_torch_adam(name, alignment):
    keys = {"model__width": 32, "prescription__base_width": 32}
    rule = {"prescription__parameterization": name, "prescription__alignment": alignment}
    settings = config(**keys, **rule)
    (model, numbers), (plain, _) = build(settings), build(settings)
    ours = optimizers.build("adam", numbers.groups(model), betas=(0.9, 0.95))
    lr = settings.optimizer.lr
    torchs = torch.optim.Adam(plain.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-9)
    for step in range(5):
        for network, rule in ((model, ours), (plain, torchs)):
            rule.zero_grad()
            (network(*batch(step)) / (4 * CONTEXT)).backward()
            rule.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
