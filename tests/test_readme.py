"""What the READMEs say holds: formulas stand on their lines, commands parse, the example runs."""

import importlib
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from param_groups import __version__
from tests.processes import finished

ROOT = Path(__file__).resolve().parents[1]
READMES = {
    path: path.read_text() for path in [ROOT / "README.md", *sorted(ROOT.glob("[a-z]*/README.md"))]
}
README = READMES[ROOT / "README.md"]
LINE = r"\[[\w/.]+\.py:\d+\]\(([\w/.]+\.py)#L(\d+)\) `([^`]+)`"
FORMULAS = [
    ((path.parent / file).resolve(), int(line), code)
    for path, text in READMES.items()
    for file, line, code in re.findall(LINE, text)
]
COMMAND = r"(?:python -m|bash|accelerate launch) [^`\n]+"
# A placeholder of the reader's: a file or folder that the documents cannot name.
PLACEHOLDER = re.compile(r"…|\.\.\.|CONFIG|RUN|FILE|NAME|TABLE|\[|my_|results\.csv|results/")
COMMANDS = sorted(
    {
        command.split("  #")[0].split(" # ")[0].strip()
        for text in READMES.values()
        for line in re.findall(f"^({COMMAND})$", text.replace("\\\n", " "), re.M)
        + re.findall(f"`({COMMAND})`", text)
        for command in line.split(" && ")
        if not PLACEHOLDER.search(command)
    }
)
# Their work takes minutes, a GPU or data: they are taken only as far as their options.
LONG = (
    "benchmarks bart_span_denoise.data effective_theory.run training.coordinate_check "
    "nanolm_c4.data plots vit_cifar5m.initial"
).split()


@pytest.mark.parametrize(("path", "line", "code"), FORMULAS)
def test_every_formula_stands_on_the_line_that_is_named(path, line, code):
    assert code in path.read_text().splitlines()[line - 1]


def test_the_papers_are_cited_as_the_readme_names_them():
    """With the version and the licence of the package."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == __version__ and cited["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    papers = {one["title"]: one.get("url") for one in cited["references"]}
    assert len(papers) == 4
    for title, url in papers.items():
        assert f"*{title}*" + (f"]({url})" if url else "") in README


def test_formulas_and_commands_were_found():
    assert len(FORMULAS) >= 8 and len(COMMANDS) >= 25
    assert sum(text.count("#L") for text in READMES.values()) == len(FORMULAS)


def parses(words):
    """Runs a command of ours only as far as its arguments and its config; its exit code, if any."""
    if words[0] == "accelerate":
        words = ["python", *words[words.index("-m") :]]
    if words[0] == "bash":
        assert (ROOT / words[1]).is_file()
        subprocess.run(["bash", "-n", words[1]], check=True, cwd=ROOT)
        return None
    module, arguments = words[2], words[3:]
    if module.endswith(".train") and not {"--help", "--plan"} & {*arguments}:
        from training.config import load

        config, *overrides = (word for word in arguments if not word.startswith("--"))
        load(importlib.import_module(module).EXPERIMENT.config, ROOT / config, overrides)
        return None
    if module == "training.coordinate_check":  # tests/training runs it
        from training.config import load
        from training.experiment import load_experiment

        name, config, *overrides = arguments
        overrides = [word for word in overrides if "=" in word]
        load(load_experiment(name).config, ROOT / config, overrides)
        return None
    if module == "param_groups" and arguments[0] == "check":  # tests/param_groups/check runs it
        assert arguments[1].startswith(("hf:", "timm:")) or (ROOT / arguments[1]).is_file()
        return None
    if module == "vit_cifar5m.initial":  # a GPU's work at the paper's sizes
        from vit_cifar5m import initial

        args = initial._parser().parse_intermixed_args(arguments)
        assert initial.read_settings(args.preset, args.overrides)
        return None
    if module == "sweeps" and arguments[1:2] == []:
        arguments = [*arguments, "--help"]
    elif module == "sweeps" and arguments[0] in ("run", "search"):
        arguments = [*dict.fromkeys([*arguments, "--dry-run"])]
    elif module == "effective_theory.dinan.predict":
        arguments = [*arguments, "theory.attention_draws=256"]
    elif module.startswith(tuple(LONG)):
        arguments = [*arguments, "--help"]
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands_parse(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", sys.argv)
    code = parses(shlex.split(command))
    assert not code, capsys.readouterr().err


def test_the_example_for_ones_own_model_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", README, re.S)[1]
    assert len(code.strip().splitlines()) <= 12
    script = tmp_path / "example.py"
    script.write_text(code)
    result = finished(script, cwd=ROOT, PYTHONPATH=ROOT)
    assert result.returncode == 0, result.err
    assert "blocks.*.attn.qkv.weight (12 tensors)" in result.out


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_files_of_documented_commands_exist(path):
    """As they are called from the root, in blocks and in sentences; a FILE.py has no folder."""
    line = r"(?:python|bash|accelerate launch|param-groups) [^`\n]+"
    for command in re.findall(line, READMES[path].replace("\\\n", " ")):
        for file in re.findall(r"(?<![\w/.…])[\w.-]+/[\w./-]*\.py\b", command):
            assert (ROOT / file).is_file(), command


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_linked_files_exist(path):
    for target in re.findall(r"\]\(([^)#:]+)[)#]", READMES[path]):
        # A badge is the page of a workflow beside the repository's files.
        file = re.sub(r"^\.\./\.\./actions(/workflows/[^/]+)(/badge\.svg)?$", r".github\1", target)
        assert (path.parent / file).exists(), target


def test_workflows_call_what_is_there():
    """Their scripts exist, and the Python versions are those that scripts and package take."""
    texts = {path.name: path.read_text() for path in ROOT.glob(".github/workflows/*.yml")}
    assert texts.keys() == {"quick.yml", "main.yml", "release.yml", "site.yml"}
    for text in texts.values():
        for script in re.findall(r"(?:bash|python) (scripts/\S+|\.ci/\S+)", text):
            assert (ROOT / script).is_file()
    versions = yaml.safe_load(texts["quick.yml"])["jobs"]["quick"]["strategy"]["matrix"]["python"]
    scripts = (ROOT / "scripts/environment.sh").read_text()
    assert versions == ["3.11", "3.12"] and "not in ((3, 11), (3, 12))" in scripts


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_no_place_is_left_to_be_filled_in(path):
    assert not re.findall(r"@[A-Z0-9]+@", READMES[path])


def test_the_first_page_stays_short():
    assert len(README.splitlines()) <= 200 and len(README.split()) <= 2000
