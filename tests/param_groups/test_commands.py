"""`python -m param_groups`: what it prints, and that a mistake is one line and exit code 2."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import param_groups
from param_groups.__main__ import everett_table, main

ROOT = Path(__file__).parents[2]
BLOCK = ["query", "key", "value", "attention_output", "mlp_in", "mlp_out"]
SOLVE = "solve --parameterization {} --optimizer {} --alpha {} --omega {} --u {}"
COMMANDS = {*"exponents constraints solve table trace check audit".split()}
NUMBERS = {
    "parts",
    "optimizer",
    "init_mean",
    "init_std",
    "init_distribution",
    "multiplier",
    "lr",
    "eps",
    "decay",
}


def output(command, capsys):
    """What a command prints to standard output; nothing may go to standard error."""
    main(command.split())
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def parsed(command, capsys):
    """What a command prints as JSON, refusing NaN and infinity, which are none."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(output(command + " --json", capsys), parse_constant=refuse)


def test_help_names_every_command_and_the_version_is_the_packages(capsys):
    for words, expected in (("--help", COMMANDS), ("--version", {param_groups.__version__})):
        with pytest.raises(SystemExit) as ended:
            main([words])
        printed = capsys.readouterr().out
        assert ended.value.code == 0 and expected <= {*re.split(r"[\s,]+", printed)}


# exponents


def test_exponents_are_the_table_as_json(capsys):
    """Which is the paper's, tests/param_groups/test_exponents.py; every number is a text."""
    assert parsed("exponents", capsys) == everett_table()
    assert parsed("exponents", capsys)["mup"]["embedding"]["lr"]["adam"]["full"] == "-1/2"


@pytest.mark.parametrize("member", ["adamw", "adam_atan2", "adam_param_scaling"])
def test_solve_takes_every_optimiser_that_its_message_offers(member, capsys):
    family = "adafactor" if member == "adam_param_scaling" else "adam"
    command = lambda name: SOLVE.format("mup", name, "1", "1/2", "1")
    assert parsed(command(member), capsys) == parsed(command(family), capsys)


def test_exponents_as_text_have_a_line_for_every_layer(capsys):
    lines = output("exponents", capsys).splitlines()
    (line,) = [line for line in lines if line.startswith("ntk") and "hidden" in line]
    assert line.split()[2:] == ["0", "-1/2", "-1", "1/2", "-1/2", "-1/2", "1", "0", "0"]
    for name in ("standard", "ntk", "mup", "mean_field"):
        assert sum(line.startswith(name) for line in lines) == 3


# solve


def test_solve_has_the_documented_shape(capsys):
    solution = parsed(SOLVE.format("mup", "adam", "1", "1/2", "1"), capsys)
    assert solution == {
        "lr": {"embedding": "-1/2", "hidden": "-1", "readout": "-1/2"},
        "residual": {"embedding": "0", "hidden": ["0"], "readout": "0"},
        **dict.fromkeys(("stable", "nontrivial", "feature_learning"), True),
    }


@pytest.mark.parametrize(
    ("case", "extra", "rates"),
    [
        (("standard", "adam", "1/2", "0.5", "1/2"), "", ("0", "-1/2", "-1/2")),
        (("mean_field", "sgd", "0.5", "0.5", "0.5"), "", ("1", "3/2", "1")),
        (("standard", "adam", "1", "1/2", "1"), " --omega-readout 1", ("-1/2", "-3/2", "-1")),
        (("mup", "adam", "1", "1/2", "1"), " --omega-readout 1", ("-1/2", "-1", "-1/2")),
        (("mup", "adam", "1", "1", "1"), "", ("-1", "-1", "-1/2")),
        (("mup", "adam", "1", "1", "1"), " --hidden-layers 8", ("-9/2", "-9/2", "-1/2")),
    ],
)
def test_solve_takes_fractions_and_decimals(case, extra, rates, capsys):
    solution = parsed(SOLVE.format(*case) + extra, capsys)
    assert tuple(solution["lr"].values()) == rates


@pytest.mark.parametrize(("extra", "features"), [("", True), (" --omega-readout 1", False)])
def test_solve_as_text_names_layers_and_properties(extra, features, capsys):
    """With its readout aligned, NTK moves its logits only while its features stand still."""
    text = output(SOLVE.format("ntk", "sgd", "1", "1/2", "1") + extra, capsys)
    power = "1/2" if features else "0"
    table = [line.split() for line in text.splitlines()[:4]]
    assert table[1:] == [
        ["embedding", power, "0" if features else "1/2"],
        ["hidden", power, "0" if features else "1/2"],
        ["readout", "0", "0"],
    ]
    assert text.splitlines()[4:7] == [
        "stable: True",
        "nontrivial: True",
        f"feature learning: {features}",
    ]
    for symbol in ("alpha for", "omega for", "u for", "n^-residual"):
        assert symbol in " ".join(text.split())  # what the symbols mean


# Tables


@pytest.mark.parametrize(
    ("command", "header"),
    [
        (
            "exponents",
            "parameterization,layer,init variance,multiplier,gradient,sgd full,adam full,"
            "adafactor full,sgd none,adam none,adafactor none",
        ),
        ("constraints", "constraint,sgd,adam,adafactor"),
        (SOLVE.format("mup", "adam", "1", "1/2", "1"), "layer,learning rate n^,residual"),
        (
            SOLVE.format("mup", "adam", "1", "1", "1") + " --hidden-layers 3",
            "layer,learning rate n^,res"
            "idual\nembedding,-2,3/2\nhidden 1,-2,1\nhidden 2,-2,1/2\n"
            "hidden 3,-2,0\nreadout,-1/2,0",
        ),
        ("table dinan width=64", "role,init,std,multiplier,relative lr,eps factor"),
        ("table stratos", "parameterization,layer,a,b,c"),
    ],
)
def test_tables_have_their_cells(command, header, capsys):
    text = [line.split() for line in output(command, capsys).splitlines()]
    for row in header.splitlines():
        assert row.replace(",", " ").split() in text


def test_stratos_table_has_a_line_for_every_layer(capsys):
    table = parsed("table stratos", capsys)
    text = [line.split() for line in output("table stratos", capsys).splitlines()]
    rows = [[name, layer, *row.values()] for name in table for layer, row in table[name].items()]
    assert all(row in text for row in rows)
    assert len(rows) == 12 and table["mup"]["hidden"] == {"a": "0", "b": "1/2", "c": "1"}


# table

# command, roles in order, some numbers, scalars of the forward pass
TABLES = {
    "everett": (
        "table everett parameterization=mup width=192 base_width=128",
        ["token_embedding", "position_embedding", "norm_scale", *BLOCK, "readout"],
        {
            ("query", "lr"): 1 / 1.5,
            ("readout", "lr"): 1.5**-0.5,
            ("readout", "multiplier"): 192**-0.5,
            ("mlp_out", "init_std"): (4 * 192) ** -0.5,
            ("norm_scale", "init_mean"): 192**-0.5,
        },
        {},
    ),
    "everett with options": (
        "table everett parameterization=ntk width=192 base_width=128 "
        "optimizer=sgd alignment=none eps_per_layer=true embedding_std=0.5 head_dim=16 "
        "mlp_ratio=2 model=vision patch_inputs=48",
        ["patch_embedding", "position_embedding", "norm_scale", *BLOCK, "readout"],
        {
            ("query", "lr"): 1.5,
            ("query", "eps"): 1 / 1.5,
            ("position_embedding", "init_std"): 0.5,
            ("mlp_out", "init_std"): 2**-0.5,
            ("patch_embedding", "init_std"): 48**-0.5,
        },
        {"attention_scale": 0.25},
    ),
    "everett over depth": (
        "table everett parameterization=mup width=192 base_width=128 "
        "depth=8 base_depth=2 alpha_depth=0.5 qk_exponent=-0.25 "
        "gamma_embedding=2 gamma_hidden=3 gamma_readout=5",
        ["token_embedding", "position_embedding", "norm_scale", *BLOCK, "readout"],
        {
            ("token_embedding", "lr"): 2 * 1.5**-0.5,
            ("query", "lr"): 3 / 1.5 / 2,
            ("readout", "lr"): 5 * 1.5**-0.5,
        },
        {"residual_multiplier": 1 / 2},
    ),
    "dinan, vision": (
        "table dinan model=vision width=768",
        ["patch_embedding", "position_embedding", *BLOCK, "readout", "readout_bias"],
        {
            ("query", "lr"): 768**-1.5,
            ("patch_embedding", "lr"): 768**-1.5,
            ("readout", "lr"): 1 / (768 * 1000**0.5),
            ("readout_bias", "lr"): 1000**-0.5,
            ("readout_bias", "decay"): 0.0,
        },
        {},  # a ViT has no tied logits
    ),
    "dinan, any s, with M": (
        "table dinan model=vision width=192 strategy=meta_principled "
        "s=0.25 mlp_factor=keep outputs=10",
        ["patch_embedding", "position_embedding", *BLOCK, "readout", "readout_bias"],
        {
            ("mlp_in", "lr"): 192**0.125 / (192 * (4 * 192) ** 0.5),
            ("mlp_out", "lr"): 192**0.125 / (4 * 192 * 192**0.5),
            ("readout_bias", "lr"): 10**-0.5,
        },
        {},
    ),
    "dinan, language": (
        "table dinan width=1024 strategy=maximal_update",
        ["token_embedding", "position_embedding", *BLOCK],
        {("token_embedding", "lr"): 1.0, ("token_embedding", "init_std"): 1.0},
        {"logit_multiplier": 1 / 1024},
    ),
    "bordelon, language": (
        "table bordelon head_dim=16 heads=9 depth=4 beta0=4 "
        "alpha_attention=0.5 alpha_depth=0.5 gamma0=0.25",
        ["token_embedding", "position_embedding", *BLOCK, "readout", "readout_bias"],
        {
            ("query", "lr"): 1 / 24,  # n = 144, L = 4
            ("key", "init_std"): 4.0,
            ("key", "multiplier"): 1 / 48,
            ("mlp_out", "multiplier"): 1 / 12,
            ("token_embedding", "multiplier"): 24.0,
            ("readout", "multiplier"): 24 / (0.25 * 144),
            ("readout", "init_std"): 0.0,
        },
        {"attention_scale": 1 / 4, "residual_multiplier": 2.0},
    ),
    "bordelon, vision": (
        "table bordelon head_dim=16 heads=16 depth=4 model=vision "
        "optimizer=sgd gamma0=0.1 patch_inputs=48",
        ["patch_embedding", "position_embedding", *BLOCK, "readout"],
        {
            ("query", "lr"): 0.01 * 256 * 4,
            ("patch_embedding", "multiplier"): 0.5 / 48**0.5,
            ("readout", "init_std"): 2.0,
        },
        {"attention_scale": 1 / 16, "residual_multiplier": 1 / 4},
    ),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables_have_the_documented_shape_numbers_and_lines(case, capsys):
    command, roles, numbers, forward = TABLES[case]
    table = parsed(command, capsys)
    assert list(table) == ["prescription", "roles", "forward"]
    assert table["prescription"]["name"] == command.split()[1]
    assert list(table["roles"]) == roles
    assert all(set(row) == NUMBERS for row in table["roles"].values())
    for (role, key), value in numbers.items():
        assert table["roles"][role][key] == pytest.approx(value, rel=1e-13), (role, key)
    assert table["forward"] == pytest.approx(forward, rel=1e-13)
    header, *body, last = output(command, capsys).splitlines()
    assert header.startswith("role") and "relative lr" in header
    assert [line.split()[0] for line in body] == roles
    printed = [part.split()[0] for part in last.split(", ")]
    if "attention_scale" not in forward:  # without head_dim=, the power of it
        assert last.startswith("attention_scale head_dim^(-")
        printed = [name for name in printed[1:] if name != "a"]
    assert printed == list(forward)


# Mistakes


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("", "required"),
        ("exponent", "exponent"),
        ("exponents --jsn", "--jsn"),
        ("solve --parameterization mup", "--optimizer, --alpha, --omega, --u"),
        ("table bogus", "everett"),
    ],
)
def test_a_wrong_command_line_says_how_it_is_used(command, word, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(command.split())
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    assert printed.err.startswith("usage: param-groups")
    assert word in printed.err.splitlines()[-1]


@pytest.mark.parametrize("command", ["", "exponents", "solve", "table"])
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), "--help"])
    assert stopped.value.code == 0
    assert "usage: param-groups" in capsys.readouterr().out


def run(*arguments):
    """The command as a user types it, from the root of the repository."""
    command = [sys.executable, "-m", "param_groups", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_module_runs_as_a_program():
    done = run("table", "everett", "parameterization=mup", "width=0", "base_width=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: Everett: width must be positive and finite, got 0\n"
    done = run("exponents", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ntk"]["readout"]["lr"]["adam"]["full"] == "-1/2"
