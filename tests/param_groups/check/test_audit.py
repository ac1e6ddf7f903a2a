"""The audit of anybody's optimiser: groups as trainers make them, mistakes that they shipped."""

import fnmatch
import re
import types

import pytest
import timm
import torch
from torch import nn

from param_groups import Everett, Muon, Role, Rule, plan, rules_for
from param_groups.check import audit
from param_groups.check.nearest import plans_of
from param_groups.check.reading import read
from param_groups.check.theory import PlanExponents
from tests.param_groups.test_muon import RULES
from tests.param_groups.test_muon import Block as Small
from training.optim import optimizers


class Layer(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm = nn.LayerNorm(n)
        self.qkv, self.out = nn.Linear(n, 3 * n), nn.Linear(n, n)
        self.up, self.down = nn.Linear(n, 4 * n), nn.Linear(4 * n, n)


class GPT(nn.Module):
    """A decoder's tensors under nanoGPT's names, drawn as nanoGPT draws them, untied."""

    def __init__(self, n, layers=2, std=0.02):
        super().__init__()
        self.wte, self.h = nn.Embedding(64, n), nn.ModuleList(Layer(n) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(n), nn.Linear(n, 64, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)


def named(model, *patterns):
    return [
        p for n, p in model.named_parameters() if any(fnmatch.fnmatch(n, one) for one in patterns)
    ]


def nanogpt(n):
    """nanoGPT's groups: decay for matrices, none for vectors, one rate."""
    model = GPT(n)
    split = [[p for p in model.parameters() if (p.dim() >= 2) is two] for two in (True, False)]
    groups = [{"params": split[0], "weight_decay": 0.1}, {"params": split[1], "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-3)


def trainer(n):
    """A Hugging Face Trainer's: decay by names."""
    model = GPT(n)
    spared = [name for name, _ in model.named_parameters() if "bias" in name or "norm" in name]
    spared += ["ln_f.weight"]
    groups = [
        {"params": [p for k, p in model.named_parameters() if (k in spared) is off]}
        for off in (True, False)
    ]
    groups[0]["weight_decay"] = 0.0
    return model, torch.optim.AdamW(groups, lr=5e-5, weight_decay=0.01)


MATRICES = ["*.qkv.weight", "*.out.weight", "*.up.weight", "*.down.weight"]
MATRIX = r"h\.\d+\.(qkv|out|up|down)\.weight"


def nanochat(n, head=1.0):
    """nanochat's: Muon for matrices, AdamW with rates (width / base)^(-1/2) for the rest."""
    model, power = GPT(n), (n / 64) ** -0.5
    rest = [("wte.weight", 0.2), ("lm_head.weight", 0.004 * head)]
    groups = [
        {"params": named(model, name), "lr": lr * power, "kind": "adamw"} for name, lr in rest
    ]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups += [{"params": vectors, "lr": 0.004 * power, "kind": "adamw"}]
    adamw = torch.optim.AdamW(groups)
    muon = torch.optim.Muon(named(model, *MATRICES), lr=0.02, adjust_lr_fn="spectral_unclamped")
    return model, [adamw, muon]


def torchtitan(n, table=None):
    """Groups by regular expressions, the first match wins, with muP's rates by hand."""
    model = GPT(n, std=1.0)
    table = table or [(MATRIX, 64 / n), (r"lm_head", 64 / n), (r"", 1)]
    groups = [{"params": [], "lr": 1e-2 * factor} for _, factor in table]
    for name, param in model.named_parameters():
        found = next(i for i, (pattern, _) in enumerate(table) if re.search(pattern, name))
        groups[found]["params"].append(param)
        if param.dim() > 1:
            std = {"wte.weight": 1.0, "lm_head.weight": 1 / n}.get(name, param.shape[1] ** -0.5)
            nn.init.normal_(param, std=std)
    return model, torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0)


def of_plan(prescription):
    def build(n):
        model = Small(n)
        made = plan(model, RULES, prescription(n), lr=0.01, absorb_multipliers=True)
        made.initialise(model, seed=0)
        groups = made.groups(model, several=True)
        return model, optimizers.build(prescription(n).optimizer, groups)

    return build


def vit(n):
    """timm's, whose class token and positions no module owns; and a table without leading axes."""
    options = {"embed_dim": n, "num_heads": 1, "depth": 1, "img_size": 32, "num_classes": 10}
    model = timm.create_model("vit_tiny_patch16_224", **options)
    rules = [*rules_for(model), Rule("latents", Role.POSITION_EMBEDDING)]
    model.latents = nn.Parameter(torch.empty(5, n))
    rule = Everett("mup", n, 64, qk_exponent=-0.5)
    made = plan(model, rules, rule, lr=0.01, absorb_multipliers=True)
    made.initialise(model, seed=0)
    return model, torch.optim.AdamW(made.groups(model))


def run(capsys, build, *arguments):
    """(exit code, what it printed)."""
    module = types.SimpleNamespace(build=build)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(audit, "load_module", lambda _: module)
            audit.main(["x.py", *map(str, arguments)])
    except SystemExit as ended:
        return ended.code, capsys.readouterr().out
    return 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("build", "rule"),
    [
        (torchtitan, "mup, full alignment"),
        (vit, "mup, full alignment"),
        (of_plan(lambda n: Everett("mup", n, 64)), "mup, full alignment"),
        (of_plan(lambda n: Everett("standard", n, 64)), "standard, full alignment"),
        (of_plan(lambda n: Everett("standard", n, 64, alignment="none")), "standard, none align"),
        (of_plan(lambda n: Everett("standard", n, 64, alignment="global")), "one rate, standard"),
        (of_plan(lambda n: Everett("mean_field", n, 64)), "mup, full alignment"),  # its class
        (of_plan(lambda n: Everett("mup", n, 64, "adam_param_scaling")), "mup, full alignment"),
        (of_plan(lambda n: Muon(Everett("mup", n, 64))), "mup, full alignment"),
    ],
)
def test_a_rule_is_known_from_its_numbers(capsys, build, rule):
    code, text = run(capsys, build)
    assert code == 0 and f"nearest rule: {rule}" in text and "every tensor follows it" in text


def test_rows_are_told_from_a_readout_that_a_norm_of_weights_holds():
    class Tables(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.pos_embed = nn.Parameter(torch.ones(10, n))
            self.head = torch.nn.utils.parametrizations.weight_norm(nn.Linear(n, 10, bias=False))
            self.last, self.turned = nn.Linear(n, 10), nn.ConvTranspose1d(5, n, 3)

    readings = {n: read(Tables(n), []) for n in (64, 128)}
    numbers = PlanExponents(plans_of(readings, depth=False))
    kinds = {name: numbers.powers(name).kind for name in numbers.names}
    assert kinds["pos_embed"] == kinds["turned.weight"] == kinds["turned.bias"] == "embedding"
    assert kinds["last.weight"] == "readout" and kinds["last.bias"] == "constant"
    assert kinds["head.parametrizations.weight.original1"] == "readout"


@pytest.mark.parametrize("build", [nanogpt, trainer])
def test_one_rate_and_one_initial_size_are_a_rule(capsys, build):
    code, text = run(capsys, build)
    assert code == 0 and "nearest rule: one rate, one initial size" in text


def test_nanochats_rates_are_mups_with_multipliers_and_its_initial_values_are_not(capsys):
    code, text = run(capsys, nanochat)
    assert code == 1 and "nearest rule: mup, full alignment, multipliers in the forward" in text
    deviating = re.findall(r"deviates: (\S+): (\w+)", text)
    assert {number for _, number in deviating} == {"init"}  # 0.02 at every width


# The regressions that trainers shipped in 2025 and 2026, planted.
HEAD, REST = (r"lm_head", lambda n: 64 / n), (r"", lambda n: 1)
TABLES = {  # of the head by the root, a catch-all, one layer's lost factor, another at one width
    "lm_head.weight: lr goes as size^-0.5, expected size^-1": [
        *((MATRIX, lambda n: 64 / n), (r"lm_head", lambda n: (64 / n) ** 0.5), REST)
    ],
    "h.*.down.weight: lr goes as size^0, expected size^-1": [
        *((r"h\.\d+\.(qkv|out|up)\.weight|lm_head", lambda n: 64 / n), REST)
    ],
    "h.1.qkv.weight: lr goes as size^0, expected size^-1": [
        *((r"h\.1\.qkv\.weight", lambda n: 1.0), (MATRIX, lambda n: 64 / n), HEAD, REST)
    ],
    "h.*.up.weight: lr has no power of the size, expected": [
        *((MATRIX, lambda n: 64 / n * (1.1 if n == 256 else 1.0)), HEAD, REST)
    ],
}


def two_matrices_moved(n):
    model = GPT(n)
    moved = named(model, "*.out.weight")[:2]
    kept = [p for p in named(model, *MATRICES) if all(p is not one for one in moved)]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    rest = [*moved, *vectors, *named(model, "wte.weight", "lm_head.weight")]
    muon = torch.optim.Muon(kept, lr=0.02, adjust_lr_fn="spectral_unclamped")
    return model, [muon, torch.optim.AdamW(rest, lr=0.002)]


def a_block_more_at_the_last_width(n):
    model = GPT(n, layers=3 if n == 256 else 2)
    return model, torch.optim.AdamW(model.parameters())


def held_twice(n):
    model = GPT(n)
    matrices = torch.optim.Muon(named(model, "wte.weight", *MATRICES), lr=0.02)
    return model, [matrices, torch.optim.AdamW(model.parameters(), lr=0.002)]


def held_by_none(n):
    model, optimizer = nanogpt(n)
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]
    return model, optimizer


def another_meaning_of_spectral(n):
    model, (adamw, _) = nanochat(n)
    return model, [adamw, torch.optim.Muon(named(model, *MATRICES), adjust_lr_fn="match_rms_adamw")]


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (two_matrices_moved, "h.*.out.weight: optimizer adam, where similar tensors have muon"),
        *(
            (lambda n, t=t: torchtitan(n, [(k, of(n)) for k, of in t]), l)
            for l, t in TABLES.items()
        ),
        (a_block_more_at_the_last_width, "h.2.up.weight: not in the models of all sizes"),
        (held_twice, "wte.weight: two optimisers hold it (muon and adam)"),
        (held_by_none, "wte.weight: no optimiser holds it"),
        (another_meaning_of_spectral, "h.*.qkv.weight: lr goes as size^0.5, expected size^0"),
    ],
)
def test_a_shipped_mistake_is_named(capsys, build, line):
    code, text = run(capsys, build)
    assert code == 1 and f"deviates: {line}" in text


def test_any_change_against_saved_numbers_is_a_line(capsys, tmp_path):
    saved = tmp_path / "numbers.json"
    assert run(capsys, trainer, "--save", saved)[0] == 0
    assert run(capsys, trainer, "--against", saved) == (0, f"0 changes against {saved}\n")

    def decay_of_norms_came_back(n):
        model, optimizer = trainer(n)
        optimizer.param_groups[0]["weight_decay"] = 0.01
        return model, optimizer

    code, text = run(capsys, decay_of_norms_came_back, "--against", saved)
    assert code == 1 and "ln_f.weight at 64: decay 0 -> 5e-07" in text


def test_a_number_that_one_side_lacks_is_a_change():
    old, new = ({"64": {"w": {key: 1.0, "lr": 1.0}}} for key in ("former", "added"))
    lines = ["w at 64: former 1 -> -", "w at 64: added - -> 1"]
    assert audit.changes(old, new) == lines


def test_a_scan_of_the_depth_reads_rates(capsys):
    def build(n, layers, power=-0.5):
        model = GPT(n, layers)
        blocks = [p for k, p in model.named_parameters() if k.startswith("h.")]
        rest = [p for k, p in model.named_parameters() if not k.startswith("h.")]
        rate = 0.01 * layers**power
        return model, torch.optim.AdamW([{"params": blocks, "lr": rate}, {"params": rest}], lr=0.01)

    code, text = run(capsys, build, "--widths", 64, "--depths", 2, 4, 8)
    assert code == 0 and "nearest rule: rates in blocks as depth^(-1/2)" in text
    code, text = run(capsys, lambda n, layers: build(n, layers, 0.0), "--depths", 2, 8)
    assert code == 0 and "nearest rule: no power of the depth" in text

    def by_muon(n, layers):
        model, adamw = build(n, layers)
        blocks = adamw.param_groups[0]
        blocks["params"] = [p for p in blocks["params"] if p.ndim < 2]
        return model, [torch.optim.Muon(named(model, *MATRICES), lr=0.1 * layers**-0.5), adamw]

    code, text = run(capsys, by_muon, "--depths", 2, 4, 8)
    assert code == 0 and "nearest rule: rates in blocks as depth^(-1/2)" in text


@pytest.mark.parametrize(
    ("group", "line"),
    [
        ({"lr": 0.1}, "h.7.down.weight: lr 0.1, where similar tensors have 0.01"),
        ({"eps": 1e-4}, "h.7.qkv.weight: eps 0.0001, where similar tensors have 1e-08"),
        ({"weight_decay": 0.0}, "h.7.up.bias: decay none, where similar tensors have some"),
        (None, "h.7.norm.weight: no optimiser holds it"),
    ],
)
def test_blocks_that_the_smallest_model_lacks_are_read_too(capsys, group, line):
    def build(n, layers):
        model = GPT(n, layers)
        odd = named(model, "h.[567].*")
        rest = [p for p in model.parameters() if all(p is not one for one in odd)]
        groups = [{"params": rest}, *([{"params": odd, **group}] if group and odd else [])]
        return model, torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)

    code, text = run(capsys, build, "--depths", 2, 4, 8)
    assert code == 1 and f"deviates: {line}\n" in text and "h.1." not in text
