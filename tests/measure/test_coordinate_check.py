"""The coordinate check: it confirms what is right, names what is expected, and catches mistakes."""

import csv
import dataclasses
import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from measure import coordinate_check as cc
from measure.coordinate_check import Check
from nanolm_c4 import train
from nanolm_c4.config import Config
from param_groups import Bordelon, Dinan, Everett, Role, Rule, plan
from param_groups.exponents import Alignment
from plots import coordinate_check as figure
from training.config import load
from training.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
LAPTOP = ROOT / "nanolm_c4/configs/laptop.yaml"
VOCABULARY, CONTEXT, STEPS = 48, 16, 3
WIDTHS = (64, 128, 256, 512)
ALONG = "readout" + cc.ALONG


def config(width, seed=0, **keys):
    changes = {
        "seed": seed, "model.width": width, "model.layers": 1, "model.context": CONTEXT,
        "prescription.alignment": "full", "prescription.embedding_std": 1.0,
        "optimizer.lr": 2**-10,
    }
    changes |= {key.replace("__", "."): value for key, value in keys.items()}
    return load(Config, LAPTOP, [f"{key}={value}" for key, value in changes.items()])


def logits_loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def decoder(alter=None, **keys):
    """Build of a small decoder on random tokens; `alter(row, width)` changes rows of its plan."""

    def build(width, seed):
        settings = config(width, seed, **keys)
        model = train.build_model(settings, VOCABULARY)
        numbers = train.build_plan(settings, model)
        if alter:
            rows = tuple(alter(row, width) for row in numbers.rows)
            numbers = dataclasses.replace(numbers, rows=rows)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(VOCABULARY, (STEPS, 1, CONTEXT + 1), generator=generator)
        return Check(model, numbers, [(row[:, :-1], row[:, 1:]) for row in ids], logits_loss)

    return build


def check(build, **options):
    return cc.fit(cc.measure(build, WIDTHS, steps=STEPS, **options))


def words(slopes, *quantities):
    """Name -> worst verdict."""
    result = {}
    for slope in slopes:
        if not quantities or slope.quantity in quantities:
            result[slope.name] = cc.worst([slope.verdict, result.get(slope.name, cc.UNKNOWN)])
    return result


def slope(slopes, quantity, name, step=1):
    (found,) = [s for s in slopes if (s.quantity, s.name, s.step) == (quantity, name, step)]
    return found


# ------------------------------------------------------------------------------------------------
# The decoder under the four parameterisations


@pytest.mark.parametrize("name", ["standard", "ntk", "mup", "mean_field"])
def test_full_alignment_passes_but_for_the_expected_growth_of_the_logits(name):
    slopes = check(decoder(prescription__parameterization=name))
    grows = name in ("standard", "ntk")
    exceptions = {n for n, word in words(slopes).items() if word == cc.EXCEPTION}
    assert exceptions == ({ALONG, "readout"} if grows else set())
    assert not cc.failed(slopes), words(slopes)
    assert set(words(slopes).values()) <= {cc.OK, cc.EXCEPTION}
    along = slope(slopes, "change", ALONG)
    assert along.slope == pytest.approx(0.5 if grows else 0.0, abs=0.1)
    assert (along.aim, along.predicted) == (0.0, 0.5 if grows else 0.0)
    start = slope(slopes, "init", "readout", 0)
    assert start.slope == pytest.approx(0.0 if grows else -0.5, abs=0.1)
    assert ("omega 1/2" in cc.table(slopes)) == grows


def test_every_part_of_the_decoder_is_measured_and_updates_are_exact():
    slopes = check(decoder(prescription__parameterization="mup"), seeds=(0,))
    block = "blocks.0"
    assert set(words(slopes, "change")) == {
        "token_embedding", "position_embedding", block, f"{block}.attention_norm",
        *(f"{block}.attention.{n}" for n in ("query", "key", "value", "output")),
        f"{block}.mlp_norm", f"{block}.mlp.up", f"{block}.mlp.down", "final_norm", "readout", ALONG,
    }
    for name, expected in {  # Table 1: -c of muP under Adam with full alignment
        "token_embedding.weight": -0.5, f"{block}.mlp.down.weight": -1.0, "readout.weight": -0.5,
        "final_norm.weight": -0.5,
    }.items():
        found = slope(slopes, "update", name)
        assert found.aim == expected
        assert found.slope == pytest.approx(expected, abs=0.01)


def test_rates_without_alignment_grow_by_the_half_power_that_theory_predicts():
    slopes = check(decoder(
        prescription__parameterization="mean_field", prescription__alignment="none"
    ))
    down = slope(slopes, "change", "blocks.0.mlp.down")
    assert (down.aim, down.predicted, down.verdict) == (0.0, 0.5, cc.EXCEPTION)
    assert down.slope == pytest.approx(0.5, abs=0.1)
    assert "alpha 1/2" in down.note
    assert not cc.failed(slopes)


def test_one_global_rate_grows():
    slopes = check(decoder(
        prescription__parameterization="standard", prescription__alignment="global"
    ))
    found = slope(slopes, "change", "blocks.0.mlp.down")
    assert (found.aim, found.predicted, found.verdict) == (0.0, 1.0, cc.GROWS)
    assert found.slope == pytest.approx(1.0, abs=0.2)
    assert words(slopes, "update")["blocks.0.mlp.up.weight"] == cc.OK  # as planned
    assert words(slopes, "init", "change")["token_embedding"] == cc.OK
    assert cc.failed(slopes)


def scaled(kind, power, part):
    """Changes one number of the rows of some roles by a power of width/64."""

    def alter(row, width):
        if part not in row.name:
            return row
        return dataclasses.replace(row, **{kind: getattr(row, kind) * (width / 64) ** power})

    return alter


@pytest.mark.parametrize("name", ["standard", "mup"])
def test_a_rate_that_does_not_fall_with_width_is_caught(name):
    slopes = check(decoder(scaled("lr", 1, ".mlp."), prescription__parameterization=name))
    assert slope(slopes, "change", "blocks.0.mlp.down").verdict == cc.GROWS
    assert slope(slopes, "change", "blocks.0.attention.key").verdict == cc.OK
    assert slope(slopes, "update", "blocks.0.mlp.up.weight").verdict == cc.GROWS
    assert slope(slopes, "update", "blocks.0.attention.key.weight").verdict == cc.OK


def test_a_rate_that_falls_too_fast_is_caught():
    slopes = check(decoder(scaled("lr", -1, "blocks"), prescription__parameterization="mup"))
    assert slope(slopes, "change", "blocks.0.mlp.down").verdict == cc.SHRINKS


@pytest.mark.parametrize("power, word", [(0.5, cc.GROWS), (-0.5, cc.SHRINKS)])
def test_a_wrong_initial_scale_is_caught(power, word):
    slopes = check(decoder(scaled("init_std", power, "mlp.up"),
                           prescription__parameterization="standard"))
    assert slope(slopes, "init", "blocks.0.mlp.up", 0).verdict == word
    assert slope(slopes, "init", "blocks.0.attention.key", 0).verdict == cc.OK


def test_a_wrong_scale_of_the_readout_is_caught():
    slopes = check(decoder(scaled("init_std", 0.5, "readout"),
                           prescription__parameterization="mup"))
    assert slope(slopes, "init", "readout", 0).verdict == cc.GROWS


# ------------------------------------------------------------------------------------------------
# Expected values against the papers' closed forms


def theory(prescription):
    return cc.theory_of(prescription)


@pytest.mark.parametrize("name, alignment, part, aim, predicted", [
    ("standard", "full", "logits", 0, "1/2"), ("ntk", "full", "logits", 0, "1/2"),
    ("mup", "full", "logits", 0, 0), ("mean_field", "full", "logits", 0, 0),
    ("standard", "full", "hidden", 0, 0), ("mup", "full", "embedding", 0, 0),
    ("standard", "none", "hidden", 0, "1/2"), ("standard", "none", "logits", 0, 1),
    ("mean_field", "none", "logits", 0, "1/2"), ("mup", "none", "logits", 0, "1/2"),
    ("standard", "global", "hidden", 0, 1), ("standard", "global", "logits", 0, "3/2"),
    ("mup", "global", "embedding", 0, "1/2"), ("mean_field", "global", "hidden", 0, "1/2"),
])
def test_changes_predicted_for_adam(name, alignment, part, aim, predicted):
    """First order, alpha = 1, omega = 1 at the readout: max of d - alpha and a + b + r - omega."""
    found = cc.expectation(theory(Everett(name, 64, 64, alignment=alignment)), "change", part)
    assert found == (Fraction(aim), Fraction(predicted))


def test_the_two_adafactor_cases_whose_logits_shrink_in_theory():
    """Errata of Everett et al.: r_{L+1} = 1/2 for muP and mean field without alignment."""
    for name in ("mup", "mean_field"):
        rule = Everett(name, 64, 64, optimizer="adafactor", alignment="none")
        assert cc.expectation(theory(rule), "change", "logits")[0] == Fraction(-1, 2)


def test_logits_at_initialisation():
    for name, power in {"standard": 0, "ntk": 0, "mup": "-1/2", "mean_field": "-1/2"}.items():
        aim, predicted = cc.expectation(theory(Everett(name, 64, 64)), "init", "logits")
        assert aim == predicted == Fraction(power)


@pytest.mark.parametrize("s", [0.0, 0.5, 1.0])
def test_dinan_changes_activations_as_s_says(s):
    """Footnote 8: hidden changes go as n^(-(1 - s)/2), logits change by a constant."""
    found = theory(Dinan(width=64, strategy="meta_principled", s=s))
    assert cc.expectation(found, "change", "hidden") == (Fraction(s - 1) / 2,) * 2
    assert cc.expectation(found, "change", "logits") == (0, 0)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_bordelon_is_of_the_class_of_mean_field(optimizer):
    rule = Bordelon(head_dim=16, heads=4, depth=2, optimizer=optimizer)
    for part in ("embedding", "hidden", "logits"):
        assert cc.expectation(theory(rule), "change", part) == (0, 0)
    assert cc.expectation(theory(rule), "init", "logits") == (Fraction(-1, 2),) * 2


RATES = [
    lambda n: Everett("mup", n, 64, optimizer="adam_param_scaling"),
    lambda n: Everett("ntk", n, 64, alignment=Alignment(alpha=1, omega="3/4", u=1)),
    lambda n: Bordelon(head_dim=16, heads=n // 16, depth=2),
    lambda n: Dinan(width=n, strategy="hybrid"),
    lambda n: Dinan(width=n, strategy="neural_tangent", optimizer="sgd"),
]


@pytest.mark.parametrize("make", RATES)
def test_exponents_are_those_of_the_prescriptions_own_numbers(make):
    """The theory's a, b and c against the numbers of the prescription at two widths."""
    roles = {"hidden": Role.QUERY, "readout": Role.READOUT, "embedding": Role.POSITION_EMBEDDING}
    found = theory(make(64))
    for layer, role in roles.items():
        fans = {n: (1 if layer == "embedding" else n, 10 if layer == "readout" else n)
                for n in (64, 256)}
        one, two = (make(n)(role, *fans[n]) for n in (64, 256))
        power = lambda name: math.log(getattr(two, name) / getattr(one, name), 4)  # noqa: E731
        assert power("lr") == pytest.approx(-float(found.c[layer]), abs=1e-6), layer
        scale = power("multiplier") + power("init_std")
        assert scale == pytest.approx(-float(found.parameterization[layer].scale), abs=1e-6), layer


def test_what_is_unknown_gets_no_verdict():
    assert cc.theory_of(None) is None
    assert cc.expectation(None, "init", "logits") == (None, None)
    assert cc.expectation(None, "change", "hidden") == (0, 0)
    assert cc.verdict(3.0, 0.01, None, None) == cc.UNKNOWN


@pytest.mark.parametrize("rule", [
    Everett("mup", 64, 32), Everett("ntk", 64, 32, alignment=Alignment(alpha="3/4", omega=1, u=1)),
    Dinan(width=64), Bordelon(head_dim=16, heads=4, depth=2),
])
def test_a_prescription_is_read_back_from_its_plan(rule):
    saved = json.loads(json.dumps(rule.describe()))
    numbers = dataclasses.replace(_mlp_plan(64), prescription=saved)
    assert cc.prescription_of(numbers) == rule


# ------------------------------------------------------------------------------------------------
# Slopes and verdicts


def power_points(law, widths=(64, 128, 256, 512), seeds=3):
    """Points of law(width, seed)."""
    return [cc.Point("change", "x", "hidden", 1, w, s, law(w, s))
            for w in widths for s in range(seeds)]


def test_a_power_law_is_fitted_exactly():
    slope_, error = cc.slope_of(power_points(lambda w, s: 3 * w**-0.75))
    assert slope_ == pytest.approx(-0.75, abs=1e-12)
    assert error == pytest.approx(0, abs=1e-12)


def test_the_error_holds_the_spread_of_the_seeds():
    """Three seeds at +-d in log2, means on the line: the closed form of least squares."""
    d, n = 0.3, 12
    _, error = cc.slope_of(power_points(lambda w, s: w**0.5 * 2 ** (d * (s - 1))))
    centred = 3 * (1.5**2 + 0.5**2) * 2
    assert error == pytest.approx(math.sqrt(4 * 2 * d**2 / (n - 2) / centred), rel=1e-9)


def test_the_error_holds_a_curvature_that_all_seeds_share():
    """More equal seeds do not make a bent line a straight one."""
    bent = lambda w, s: 2 ** (0.1 * (math.log2(w) - 7.5) ** 2)  # noqa: E731
    _, one = cc.slope_of(power_points(bent, seeds=1))
    _, many = cc.slope_of(power_points(bent, seeds=10))
    assert many == pytest.approx(one) and one > 0.05


@pytest.mark.parametrize("slope_, error, aim, predicted, word", [
    (0.05, 0.02, 0, 0, cc.OK), (0.4, 0.02, 0, 0, cc.GROWS), (-0.4, 0.02, 0, 0, cc.SHRINKS),
    (0.45, 0.02, 0, 0.5, cc.EXCEPTION), (0.1, 0.02, 0, 0.5, cc.OK), (1.0, 0.02, 0, 0.5, cc.GROWS),
    (-0.5, 0.02, 0, 0.5, cc.SHRINKS), (-0.5, 0.02, -0.5, -0.5, cc.OK),
    (0.05, 0.2, 0, 0, cc.UNCLEAR), (0.3, 0.1, 0, 0, cc.UNCLEAR), (0.9, 0.2, 0, 0, cc.GROWS),
])
def test_verdicts(slope_, error, aim, predicted, word):
    assert cc.verdict(slope_, error, aim, predicted) == word


def test_the_plain_size_of_logits_is_judged_from_above_only():
    assert cc.verdict(-0.4, 0.02, 0, 0, one_sided=True) == cc.UNKNOWN
    assert cc.verdict(0.4, 0.02, 0, 0, one_sided=True) == cc.GROWS


def test_values_without_a_logarithm_get_a_word_instead_of_a_slope():
    plans = {64: _mlp_plan(64), 128: _mlp_plan(128)}
    for value, word in ((0.0, cc.UNKNOWN), (math.nan, cc.NOT_FINITE), (math.inf, cc.NOT_FINITE)):
        measured = cc.Measurement(power_points(lambda w, s: value if s else 1.0), plans)
        (found,) = cc.fit(measured)
        assert (found.slope, found.verdict) == (None, word)
        cc.table([found])


def test_the_component_along_the_gradient():
    """Positions without a gradient do not count; the sizes of gradients do not matter."""
    change = torch.tensor([[3.0, 4.0], [1.0, 0.0], [9.0, 9.0]])
    gradient = torch.tensor([[0.0, 2.0], [-5.0, 0.0], [0.0, 0.0]])
    assert cc._rms_along(change, gradient) == pytest.approx(math.sqrt((16 + 1) / 2))


# ------------------------------------------------------------------------------------------------
# A model of one's own


class Mlp(nn.Module):
    """One hidden matrix, dropout, and a module that is never called."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(8, width, bias=False)
        self.hidden = nn.Linear(width, width, bias=False)
        self.idle = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(0.5)
        self.readout = nn.Linear(width, 4, bias=False)

    def forward(self, x):
        return self.readout(torch.relu(self.dropout(self.hidden(torch.relu(self.first(x))))))


RULES = (Rule("first.weight", Role.PATCH_EMBEDDING), Rule("hidden.weight", Role.MLP_IN),
         Rule("idle.weight", Role.MLP_OUT), Rule("readout.weight", Role.READOUT))


def _mlp_plan(width, model=None):
    rule = Everett("standard", width, 32)
    return plan(model or Mlp(width), RULES, rule, lr=1e-3)


def own(width, seed=0, **changes):
    model = Mlp(width)
    batch = (torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)), torch.arange(4))
    fields = {"model": model, "plan": _mlp_plan(width, model), "batches": [batch],
              "loss": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])}
    return Check(**{**fields, **changes})


def test_what_is_measured_is_what_a_loop_by_hand_sees():
    """Outputs without dropout on the first batch, two steps with it under torch's own Adam."""
    measured = cc.measure(own, (16, 32, 64), steps=2, seeds=(3,))
    rms = {(p.quantity, p.name, p.width, p.step): p.rms for p in measured.points}
    task = own(16, 3)
    model, (x, y) = task.model, task.batches[0]
    task.plan.initialise(model, 3)
    start = model.eval()(x).detach()
    hidden = model.hidden.weight.detach().clone()
    optimizer = torch.optim.Adam(task.plan.groups(model), betas=(0.9, 0.98))
    torch.manual_seed(3)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model.train()(x), y).backward()
        optimizer.step()
    change = model.eval()(x).detach() - start
    gradient = torch.softmax(start, 1) - F.one_hot(y, 4)
    along = (change * F.normalize(gradient)).sum(1)
    expected = {
        ("init", "readout", 16, 0): start, ("change", "readout", 16, 2): change,
        ("change", ALONG, 16, 2): along,
        ("update", "hidden.weight", 16, 2): model.hidden.weight.detach() - hidden,
    }
    for key, value in expected.items():
        assert rms[key] == pytest.approx(value.square().mean().sqrt().item(), rel=1e-4), key
    assert measured.silent == ("idle",)
    assert rms["update", "idle.weight", 16, 2] == 0


def test_outputs_are_compared_on_the_first_batch_with_later_steps_on_later_ones():
    seen = []

    def loss(model, batch):
        seen.append((model.training, int(batch[1][0])))
        return F.cross_entropy(model(batch[0]), batch[1])

    batches = [(torch.randn(4, 8), torch.full((4,), i)) for i in range(2)]
    build = lambda w, s: own(w, s, batches=batches, loss=loss)  # noqa: E731
    cc.measure(build, (16, 32, 64), steps=3, seeds=(0,))
    one = [(False, 0), (True, 0), (False, 0), (True, 1), (False, 0), (True, 0), (False, 0)]
    assert seen == 3 * one


def test_a_tensor_that_is_never_used_gets_no_verdict():
    slopes = cc.fit(cc.measure(own, (16, 32, 64), steps=1, seeds=(0, 1)))
    idle = slope(slopes, "update", "idle.weight")
    assert (idle.verdict, idle.note) == (cc.UNKNOWN, "zero")


def test_a_check_depends_on_its_seeds_alone():
    """Dropout included, whatever the caller's generator has drawn before."""
    runs = []
    for before in (1, 2):
        torch.manual_seed(before)
        runs.append(cc.measure(own, (16, 32, 64), steps=1, seeds=(0,)).points)
    assert runs[0] == runs[1]
    assert cc.measure(own, (16, 32, 64), steps=1, seeds=(1,)).points != runs[0]


def test_an_own_prescription_is_held_to_constant_scale():
    def build(width, seed):
        task = own(width, seed)
        task.plan = dataclasses.replace(task.plan, prescription={"name": "mine"})
        return task

    slopes = cc.fit(cc.measure(build, (64, 128, 256), steps=2))
    assert slope(slopes, "init", "readout", 0).verdict == cc.UNKNOWN
    assert slope(slopes, "change", "hidden").aim == 0
    assert slope(slopes, "update", "hidden.weight").aim == pytest.approx(-1)  # the planned rate's


def test_the_example_passes(tmp_path, capsys):
    example = str(ROOT / "examples/coordinate_check_mlp.py")
    cc.main([example, "--out", str(tmp_path), "--steps", "2"])
    assert "passed:" in capsys.readouterr().out
    assert {file.name for file in tmp_path.iterdir()} == {
        f"coordinate_check.{kind}" for kind in ("csv", "json", "png", "pdf")
    }
    result = json.loads((tmp_path / "coordinate_check.json").read_text())
    assert result["passed"] and result["widths"] == [64, 128, 256, 512]
    with open(tmp_path / "coordinate_check.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    # 5 modules at first, 5 + 1 changes and 7 tensors per step
    assert len(rows) == 4 * 3 * (4 + 2 * (5 + 7))


# ------------------------------------------------------------------------------------------------
# The command


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Overrides for a tiny decoder on a folder of little documents."""
    root = tmp_path_factory.mktemp("texts")
    (root / "texts").mkdir()
    random = torch.Generator().manual_seed(0)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    for i in range(30):
        ids = torch.randint(len(syllables), (80,), generator=random).tolist()
        words_ = ["".join(syllables[k] for k in ids[j : j + 2]) for j in range(0, 80, 2)]
        (root / "texts" / f"{i:02}.txt").write_text(" ".join(words_))
    return ["data.source=local", f"data.path={root / 'texts'}", f"data.cache_dir={root / 'cache'}",
            "data.tokenizer_vocab_size=80", "data.validation_fraction=0.2", "model.layers=1",
            "model.head_dim=8", "model.context=16"]


def command(*words_):
    return cc.main(["nanolm_c4", str(LAPTOP), *words_])


def test_an_experiment_is_checked_from_its_config(data, tmp_path, capsys):
    command(*data, "prescription.parameterization=mup", "prescription.alignment=full",
            "--widths", "32", "64", "128", "--steps", "2", "--out", str(tmp_path))
    out = capsys.readouterr().out
    assert "set for the check: training.batch_size=1" in out and "passed:" in out
    assert "set for the check: optimizer.weight_decay=0" in out
    assert "readout along the loss gradient" in out
    result = json.loads((tmp_path / "coordinate_check.json").read_text())
    assert result["prescription"]["parameterization"] == "mup"
    assert result["set_for_the_check"]["optimizer.lr"] == 2**-10


def test_a_failed_check_ends_with_exit_code_1(data, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        command(*data, "prescription.alignment=global", "--widths", "32", "64", "128",
                "--steps", "1", "--out", str(tmp_path))
    assert ended.value.code == 1
    assert "FAILED" in capsys.readouterr().out
    assert not json.loads((tmp_path / "coordinate_check.json").read_text())["passed"]


def test_the_command_line_wins_over_what_the_check_would_set():
    target = cc.experiment_target(
        "nanolm_c4", LAPTOP, ["optimizer.lr=0.5", "training.batch_size=3"],
        width_key="model.width", steps=1, widths=WIDTHS,
    )
    assert target.settings["set_for_the_check"] == {
        "prescription.embedding_std": 1.0, "optimizer.weight_decay": 0.0
    }


def test_as_configured_sets_nothing():
    target = cc.experiment_target("nanolm_c4", LAPTOP, [], width_key="model.width", steps=1,
                                  widths=WIDTHS, as_configured=True)
    assert target.settings["set_for_the_check"] == {}


def test_a_task_that_fuses_its_loss_is_measured_through_its_logits(data):
    settings = load(Config, LAPTOP, [*data, "model.width=32", "training.batch_size=1"])
    task = train.build_task(settings)

    class Fused(type(task.model)):
        def forward(self, ids, targets=None):
            logits = F.linear(self.body(ids), self.readout.weight * self.readout.multiplier)
            if targets is None:
                return self.readout(self.body(ids))
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

        def body(self, ids):
            x = self.token_embedding(ids)
            for block in self.blocks:
                x = block(x)
            return self.final_norm(x)

    task.model.__class__ = Fused
    found = cc._from_task(task, 1)
    points, _ = cc._measure_one(found, 32, 0, 1, torch.device("cpu"))
    assert ALONG in {point.name for point in points}
    task.loss = lambda model, batch: 2 * model(*batch)
    with pytest.raises(UserError, match=r"'readout' is not called for the loss .* another number"):
        cc._from_task(task, 1)


MISTAKES = [
    (["nanolm_c4", str(LAPTOP), "--widths", "64", "128"], "at least 3 different positive ones"),
    (["nanolm_c4", str(LAPTOP), "--widths", "64", "128", "128"], "at least 3 different"),
    (["nanolm_c4", str(LAPTOP), "--widths", "0", "64", "128"], "positive"),
    (["nanolm_c4", str(LAPTOP), "--widths", "64", "128", "200"],
     "model.width 200 is not a multiple of model.head_dim 16"),
    (["nanolm_c4", str(LAPTOP), "--width-key", "model.widht"], "did you mean 'model.width'"),
    (["nanolm_c4", str(LAPTOP), "optimizer.rl=1"], "did you mean 'optimizer.lr'"),
    (["nanolm_c4", str(LAPTOP), "--steps", "0"], "0 steps"),
    (["nanolm_c4", str(LAPTOP), "--seeds", "0"], "0 seeds"),
    (["nanolm_c4", str(LAPTOP), "--tolerance", "0"], "--tolerance 0"),
    (["nanolm_c4"], "nanolm_c4/configs/laptop.yaml"),
    (["nanolm_c4", "absent.yaml"], "absent.yaml: cannot read the file"),
    (["nanolm", str(LAPTOP)], "experiment 'nanolm' has no train.py"),
    (["absent.py"], "absent.py: cannot read the file"),
]


@pytest.mark.parametrize("argv, message", MISTAKES)
def test_mistakes_are_one_line_and_exit_code_2(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cc.main(argv)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize("text, extra, message", [
    ("x = 1\n", [], "no function task(width, seed)"),
    ("def task(width, seed):\n    return 3\n", [], "returned int"),
    ("x = 1\n", ["model.width=3"], "key=value goes with an experiment's config"),
])
def test_mistakes_in_an_own_file(text, extra, message, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        cc.main([str(path), *extra])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def forgets_the_readout(model, batch):
    return model.hidden(model.first(batch[0])).square().mean()


@pytest.mark.parametrize("build, message", [
    (lambda w, s: own(w, s, batches=[]), "no batches"),
    (lambda w, s: own(32, s), "widths 16 and 32 gave models of the same shapes"),
    (lambda w, s: own(w, s, loss=forgets_the_readout), "module 'readout' was never called"),
    (lambda w, s: own(w, s, loss=lambda m, b: m.first.weight.sum()), "no planned module was"),
])
def test_what_cannot_be_compared_is_refused(build, message):
    with pytest.raises(UserError, match=message):
        cc.measure(build, (16, 32, 64), steps=1, seeds=(0,))


def test_a_forward_pass_that_depends_on_the_step_is_refused():
    def build(width, seed):
        calls = []

        def loss(model, batch):
            calls.append(model.training)
            if len(calls) == 3:  # the outputs after the first step
                model.first(batch[0])
            return F.cross_entropy(model(batch[0]), batch[1])

        return own(width, seed, loss=loss)

    with pytest.raises(UserError, match="'first' was called otherwise than at first"):
        cc.measure(build, (16, 32, 64), steps=1, seeds=(0,))


def test_models_that_differ_in_more_than_width_are_refused():
    class Deep(Mlp):
        def forward(self, x):
            return self.readout(self.idle(self.first(x)))

    def build(width, seed):
        task = own(width, seed)
        if width == 64:
            task.model.__class__ = Deep
        return task

    with pytest.raises(UserError, match="module 'hidden' is in the model of width 16 or 64 only"):
        cc.measure(build, (16, 32, 64), steps=1, seeds=(0,))


# ------------------------------------------------------------------------------------------------
# The figure


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The files of a check whose second block alone grows."""
    folder = tmp_path_factory.mktemp("results")
    build = decoder(scaled("lr", 1, "blocks.1.mlp"), model__layers=2)
    measured = cc.measure(build, WIDTHS, steps=2, seeds=(0, 1))
    cc.write(folder, measured, cc.fit(measured), {"widths": WIDTHS})
    return folder


def test_of_repeated_blocks_the_worst_is_drawn(results):
    chosen = figure.panels(*figure.read(results))
    assert chosen["blocks.1.mlp.down"] == cc.GROWS and "blocks.0.mlp.down" not in chosen
    assert chosen["blocks.0.attention_norm"] == cc.OK
    assert list(chosen)[-1] == ALONG


def test_lines_are_geometric_means_over_seeds(results):
    table, _ = figure.read(results)
    rows = table[(table.name == "readout") & (table.quantity == "change") & (table.step == 2)]
    one, two = rows[rows.width == 64].rms
    line = figure.means(table, "readout")["change", 2]
    assert line[64] == pytest.approx(math.sqrt(one * two))
    assert list(line.index) == list(WIDTHS)


def test_figures_of_the_same_files_are_the_same(results, tmp_path):
    files = [figure.draw(*figure.read(results), tmp_path / name) for name in ("one", "two")]
    for one, two in zip(*files):
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("file, text, message", [
    ("coordinate_check.csv", None, "cannot read the file"),
    ("coordinate_check.csv", "a,b\n1,2\n", "no quantity in its"),
    ("coordinate_check.csv", ",".join(figure.COLUMNS) + "\n", "no points"),
    ("coordinate_check.json", "{", "cannot read the file"),
    ("coordinate_check.json", "{}", "no slopes in its"),
])
def test_a_folder_that_is_no_checks_is_one_line(results, tmp_path, file, text, message, capsys):
    for source in results.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / file).unlink() if text is None else (tmp_path / file).write_text(text)
    with pytest.raises(SystemExit) as ended:
        figure.main([str(tmp_path)])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1


def test_a_readouts_bias_is_expected_to_move_by_its_own_rate():
    """lambda = n_out^(-1/2) in every strategy: the width has no part in it."""
    target = cc.experiment_target(
        "vit_imagenet", ROOT / "vit_imagenet/configs/laptop.yaml",
        ["prescription.strategy=neural_tangent", "optimizer.lr=4.0", "model.layers=1"],
        width_key="model.width", steps=1, widths=(32, 64, 128),
    )
    rows = cc.fit(cc.measure(target.build, (32, 64, 128), steps=1, seeds=(0, 1)))
    bias = next(row for row in rows if (row.quantity, row.name) == ("update", "head.bias"))
    assert bias.predicted == pytest.approx(0, abs=1e-9) and bias.verdict == cc.OK
