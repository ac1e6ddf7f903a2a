"""The scripts of the experiments: what they start, in which order, and what they draw."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sweeps.sweep_file import load_sweep
from tests.tracked import tracked

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ("bart_span_denoise", "nanolm_c4", "vit_cifar5m", "vit_imagenet")


@pytest.fixture
def call(tmp_path):
    """Runs a script where `accelerate`, `python` and `sbatch` only say what they are given."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "scripts/environment.sh").write_text(f'cd "{tmp_path}"\n')
    (tmp_path / "bin").mkdir()
    for name in ("accelerate", "python", "sbatch"):
        path = tmp_path / "bin" / name
        # `sbatch --parsable` prints the job's number, and where there are several the cluster.
        number = "echo x >>count; echo $(($(wc -l <count) + 100))';cluster'\n"
        path.write_text(
            f'#!/bin/sh\necho {name} "$@" | tee -a calls >&2\n{number * (name == "sbatch")}'
        )
        path.chmod(0o755)

    def call(script, *words, **variables):
        env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", **variables}
        (tmp_path / "calls").write_text("")
        command = ["bash", f"scripts/{script}.sh", *words]
        ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        lines = (tmp_path / "calls").read_text().splitlines()
        ran.calls = [line for line in lines if "--strict" not in line]
        ran.looks = [line for line in lines if "--strict" in line]
        return ran

    return call


def table(root, name):
    path = root / "results" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


@pytest.mark.parametrize(
    ("script", "words", "module", "config", "suffix"),
    [
        ("bart_span_denoise", [], "bart_span_denoise", "bart_large", ""),
        ("bart_span_denoise", ["r2c2"], "bart_span_denoise", "r2c2", "_fsdp"),
        ("nanolm_c4", [], "nanolm_c4", "paper", ""),
        ("vit_cifar5m", ["run"], "vit_cifar5m", "paper", ""),
        ("vit_imagenet", ["run"], "vit_imagenet", "paper", ""),
    ],
)
def test_one_run_is_launched_on_one_node_or_several(call, script, words, module, config, suffix):
    run = f"-m {module}.train {module}/configs/{config}.yaml"
    [line] = call(script, *words, GPUS="4").calls
    assert line == (
        f"accelerate launch --config_file scripts/accelerate/one_node_8gpu{suffix}.yaml "
        f"--num_processes 4 {run}"
    )
    assert (ROOT / line.split()[3]).exists()
    if words:
        [line] = call(script, *words, "seed=1").calls
        assert line.endswith(f"--num_processes 8 {run} seed=1")
    [line] = call(script, *words, NODES="2", NODE="1", FIRST_NODE="10.0.0.1").calls
    assert f"/several_nodes{suffix}.yaml " in line and (ROOT / line.split()[3]).exists()
    several = "--num_processes 16 --num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1"
    assert line.endswith(f"{several} {run}")
    refused = call(script, *words, NODES="2")
    assert refused.returncode != 0 and "the rank of this node" in refused.stderr


def test_changes_of_keys_go_to_the_run(call):
    [line] = call("vit_imagenet", "optimizer.lr=1e-3").calls
    assert line.endswith("paper.yaml optimizer.lr=1e-3")


@pytest.mark.parametrize("script", EXPERIMENTS)
@pytest.mark.parametrize("words", [["sweep"], ["run", "drw"]])
def test_a_mistyped_command_starts_nothing(call, script, words):
    ran = call(script, *words)
    assert (ran.returncode, ran.calls) == (2, [])
    assert ran.stderr == (
        f"error: {words[-1]}: neither a command of this script nor key=value; the first lines of "
        f"scripts/{script}.sh say what it takes\n"
    )


def swept(lines):
    """(file, curve or "") of every sweep that was started."""
    found = []
    for line in lines:
        words = line.split()
        if words[1:3] == ["-m", "sweeps"]:
            curve = words[words.index("--curves") + 1] if "--curves" in words else ""
            found.append((words[4], curve))
    return found


@pytest.mark.parametrize("script", EXPERIMENTS)
def test_every_sweep_of_an_experiment_is_run_after_those_it_starts_from(call, script):
    """Each shipped sweep file once; a file whose values come from another one after that one."""
    started = swept(call(script, "sweeps").calls)
    files = [file for file, _ in started]
    whole = [file for file, curve in started if not curve]
    shipped = {str(path.relative_to(ROOT)) for path in tracked(f"{script}/sweeps/*.yaml")}
    other = {"vit_cifar5m": {"nanolm_c4/sweeps/figure_7_12.yaml"}}.get(script, set())
    # The quickstart has a script of its own, the decoder of Bordelon et al. theirs; the questions
    # that are ours are of no figure of a paper.
    apart = {f"nanolm_c4/sweeps/{name}.yaml" for name in ("quickstart", "figure_7_12")} - other
    apart.add("bart_span_denoise/sweeps/ablations.yaml")
    apart |= {file for file in shipped if (ROOT / file).read_text().startswith("# Ours: ")}
    assert sorted(whole) == sorted((shipped | other) - apart)
    for position, (file, curve) in enumerate(started):
        if curve:  # one that starts from nothing
            continue
        text = (ROOT / file).read_text()
        for line in text.splitlines():
            key, _, value = line.strip().partition(": ")
            if key in ("sweep", "constants") and value.endswith(".yaml"):
                before = f"{Path(file).parent}/{value}"
                assert before == file or before in files[:position], (file, value)


def test_all_text_that_sweeps_read_is_tokenised_once_before_they_start(call):
    """The script's sweeps of growing horizons are those whose files ask for more text."""
    growing = {}
    for path in tracked("nanolm_c4/sweeps/*.yaml"):
        for tokens in re.findall(r"data.max_train_tokens: (\d[\d_]*)", path.read_text()):
            growing.setdefault(tokens, set()).add(path.stem)
    [(tokens, names)] = growing.items()
    paper = "python -m nanolm_c4.data nanolm_c4/configs/paper.yaml"
    both = [paper, f"{paper} data.max_train_tokens={tokens}"]
    assert call("nanolm_c4", "prepare").calls == both
    assert call("nanolm_c4", "sweeps").calls[:2] == both
    for name in ("figure_2_adam", *names):
        assert call("nanolm_c4", "prepare", ONLY=name).calls == both[: 1 + (name in names)]
    assert call("nanolm_c4", "prepare", ONLY="figure_2").returncode == 2
    assert int(tokens) < 512 * 152_000_000  # of as many files as scripts/download.sh says


@pytest.mark.parametrize("script", EXPERIMENTS)
def test_sweeps_without_the_preset_are_left_out(call, tmp_path, script):
    shutil.copytree(ROOT / script / "sweeps", tmp_path / script / "sweeps")
    if script == "vit_cifar5m":  # all of its files have one
        file = tmp_path / script / "sweeps/figure_2.yaml"
        file.write_text(file.read_text().replace("\n  desktop:", "\n  another:"))
    started = swept(call(script, "sweeps", "--preset", "desktop").calls)
    whole = {file for file, curve in started if file.startswith(script) and not curve}
    every = {file for file, _ in swept(call(script, "sweeps").calls) if file.startswith(script)}
    having = {
        file
        for file in every
        if "desktop" in yaml.safe_load((tmp_path / file).read_text()).get("presets", {})
    }
    assert whole == having and 0 < len(having) < len(every) + (script == "vit_imagenet")
    jobs = call(script, "slurm", "--", "--preset", "desktop").calls
    jobs = [line for line in jobs if f"sweep.sh {script}" in line]
    assert len(jobs) == len([file for file, _ in started if file.startswith(script)])
    # One that none has is refused by the first sweep.
    assert len(swept(call(script, "sweeps", "--preset", "dsktop").calls)) >= len(every)


def test_options_reach_every_sweep_and_a_preset_its_tables(call, tmp_path):
    files = "figure_1_2_laptop/results figure_1_2_laptop/metrics rate_transfer_laptop/results"
    for file in files.split():
        table(tmp_path, f"vit_imagenet/{file}.csv")
    lines = call("vit_laptop").calls
    for line, name in zip(lines[:2], ("figure_1_2", "rate_transfer"), strict=True):
        assert line == (
            f"python -m sweeps run vit_imagenet/sweeps/{name}.yaml --preset laptop "
            "--workers 2 --threads 1"
        )
    figures = ["dinan/vit_search", "dinan/vit_strategies", "dinan/rate_transfer"]
    assert [line.split()[3] for line in lines[2:]] == figures
    assert all("figure_1_2_laptop/metrics.csv" in line for line in lines[2:4])
    assert len(call("vit_imagenet", "sweeps", "--preset", "laptop", "--dry-run").calls) == 2


@pytest.mark.parametrize(
    ("script", "sweeps"),
    [("everett_laptop", 14), ("infinite_limits_laptop", 7), ("bart_laptop", 2)],
)
def test_laptop_scripts_run_the_laptop_preset_of_all(call, script, sweeps):
    lines = [line for line in call(script).calls if "-m sweeps" in line]
    assert len(lines) == sweeps
    assert all(line.endswith("--preset laptop --workers 2 --threads 1") for line in lines)


LAPTOP = ("bart", "everett", "infinite_limits", "vit")


@pytest.mark.parametrize("script", ["quickstart", *(f"{name}_laptop" for name in LAPTOP)])
def test_options_of_the_small_scripts_reach_the_sweeps_and_a_look_trains_nothing(call, script):
    lines = call(script, "--workers", "4", "--dry-run").calls
    assert len(swept(lines)) == len(lines) > 0
    assert all(line.endswith("--threads 1 --workers 4 --dry-run") for line in lines)
    assert call(script, "--help").calls == ["python -m sweeps run --help"]


def test_a_look_at_several_sweeps_adds_their_runs_and_times_up(call, tmp_path):
    lines = (
        "a (laptop): 4 of 4 runs to do and up to 1176 more, 2e+12 FLOPs, about 30 s on 2 CPU cores",
        "b: 100 of 120 runs to do, 1e9 FLOPs, about 1 h 9 min on 2 CPU cores; 3 inputs are to come",
        "c (x): 60 of 60 runs to do, 4e+22 FLOPs, about 26,529 H100-hours",
    )
    said = "\n".join(lines)
    (tmp_path / "bin/python").write_text(f"#!/bin/sh\nprintf '{said}\n'\n")
    (tmp_path / "scripts/nanolm_c4.sh").write_text(
        '. "$(dirname "$0")/experiment.sh"\nstages=(a/b)\nsweep_and_draw "$@"\n'
    )
    total = (
        "all 3 sweeps: 164 runs to do and up to 1176 more, about 70 min on 2 CPU cores, about 26529"
    )
    assert call("nanolm_c4", "--dry-run").stdout == f"{said}\n{total} H100-hours\n"
    (tmp_path / "bin/python").write_text(f"#!/bin/sh\nprintf '{lines[0]}\n'\nexit 2\n")
    alone = call("nanolm_c4", "--dry-run")
    assert (alone.stdout, alone.returncode) == (f"{lines[0]}\n", 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["quickstart.sh", "--help"], "Trains a width sweep on the embedded corpus"),
        (["download.sh", "-h"], "Fetches the data of the paper-size configs"),
        (["everett_laptop.sh", "--help"], "at the\nlaptop preset: trains, draws"),
        (["vit_laptop.sh", "--help"], "at the laptop preset: a small Vision Transformer"),
        (["bart_laptop.sh", "--help"], "at the laptop preset: a narrow BART"),
        (["infinite_limits_laptop.sh", "--help"], "at the laptop presets: Vision Transformers"),
        (["nanolm_c4.sh", "--help"], "on GPU nodes, after"),
    ],
)
def test_questions_are_answered_before_anything_is_installed(words, said, tmp_path):
    for folder in ("scripts", "training"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "requirements.lock").write_text("never installed\n")
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # no packages
    (tmp_path / "python").chmod(0o755)
    command = ["bash", tmp_path / "scripts" / words[0], *words[1:]]
    env = {"PATH": "/usr/bin:/bin", "PYTHON": str(tmp_path / "python")}
    ran = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path.parent)
    assert (ran.returncode, ran.stderr) == (0, "") and said in ran.stdout
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("script", ["lock", "mutation", "plots"])
def test_help_is_the_first_lines_and_nothing_is_called(call, script):
    for words in (["-h"], ["--help"]):
        ran = call(script, *words)
        assert (ran.returncode, ran.calls, ran.stderr) == (0, [], "")
        assert f"# {ran.stdout.splitlines()[0]}\n" in (ROOT / f"scripts/{script}.sh").read_text()


def test_blocks_for_a_gpu_are_chosen_by_number_and_start_around_shipped_tables(call, tmp_path):
    (tmp_path / "plots").symlink_to(ROOT / "plots")
    ran = call("gpu_blocks", "5", "1", "--dry-run")
    assert ran.returncode == 0 and len(ran.calls) == 6  # in their own order, with the options
    assert ran.calls[0] == (
        "python -m sweeps run nanolm_c4/sweeps/figure_12_adam.yaml --preset wide_five --curves "
        "standard_fixed ntk_fixed --workers 8 --dry-run"
    )
    table = tmp_path / "results/nanolm_c4/figure_12_adam_wide/results.csv"
    shipped = ROOT / "plots/data/everett/figure_12_adam_wide.csv"
    assert table.read_bytes() == shipped.read_bytes()
    table.write_text("ours")  # and no table of a user's is replaced
    assert len(call("gpu_blocks").calls) == 21 and table.read_text() == "ours"


def test_the_quickstart_prepares_runs_and_draws(call):
    data, sweep, figure = call("quickstart").calls
    assert data == "python -m nanolm_c4.data nanolm_c4/configs/laptop.yaml"
    assert sweep.endswith("sweeps run nanolm_c4/sweeps/quickstart.yaml --workers 2 --threads 1")
    results = "results/nanolm_c4/quickstart"
    assert figure == f"python -m plots quickstart {results}/results.csv --out {results}"


def test_what_is_not_there_yet_is_named_and_the_rest_drawn(call, tmp_path):
    table(tmp_path, "nanolm_c4/figure_1_5_6_7_alignment/probes.csv")
    ran = call("nanolm_c4", "draw")
    assert [line.split()[3] for line in ran.calls] == ["everett/alignment"]
    assert "everett/epsilon not drawn: results/nanolm_c4/figure_4_epsilon/results.csv" in ran.stderr
    table(tmp_path, "bart_span_denoise/figure_3_4/results.csv")
    table(tmp_path, "bart_span_denoise/figure_3_4/metrics.csv")
    drawn = [line.split()[3] for line in call("bart_span_denoise", "draw").calls]
    assert drawn == ["dinan/bart_rates", "dinan/bart_strategies"]


def test_slurm_jobs_wait_for_the_stage_before(call):
    only = "figure_12_adam figure_3_param_scaling:global constants\n  figure_2_adam"
    words = ["slurm", "--partition", "gpu", "--nodes", "4", "--", "--where", "seed==0"]
    ran = call("nanolm_c4", *words, ONLY=only)
    options, started = zip(
        *(line.split(" scripts/slurm/sweep.sh ") for line in ran.calls), strict=True
    )
    assert started == (
        "nanolm_c4/sweeps/figure_12_adam.yaml --where seed==0",
        "nanolm_c4/sweeps/figure_3_param_scaling.yaml --curves global --where seed==0",
        "nanolm_c4/sweeps/constants.yaml --where seed==0",
        "nanolm_c4/sweeps/figure_2_adam.yaml --where seed==0",
    )
    after = ["", "", " --dependency afterany:101:102", " --dependency afterany:103"]
    for line, name, wait in zip(options, only.split(), after, strict=True):
        parts = f"--job-name nanolm_c4/{name}{wait} --partition gpu --nodes 4"
        assert line == f"sbatch --parsable {parts}"
    assert ran.stdout.splitlines()[2] == "job 103: nanolm_c4/constants"


def test_an_unknown_sweep_and_changed_ones_are_refused(call):
    """Changed sweeps have folders of their own, which later sweeps and figures would not read."""
    ran = call("nanolm_c4", "sweeps", ONLY="figure_2")
    assert (ran.returncode, ran.calls) == (2, []) and "no sweep figure_2 here" in ran.stderr
    for words in (["training.steps=20"], ["--preset", "laptop", "--results", "/else"]):
        ran = call("bart_span_denoise", "sweeps", *words)
        assert ran.returncode == 2 and "python -m sweeps run FILE" in ran.stderr
        assert not swept(ran.calls)
    ran = call("vit_imagenet", "sweeps", "--where", "optimizer.lr<=0.5", "--where", "seed=1")
    assert ran.returncode == 0 and len(swept(ran.calls)) == 2


def test_whole_nodes_where_one_batch_is_spread_over_them(call):
    """ViT-B and BART-large replicated on a node's GPUs, R2C2 sharded."""
    lines = call("vit_imagenet", "slurm", "--partition", "gpu").calls
    assert len(lines) == 2
    for line in lines:
        assert " --partition gpu scripts/slurm/sweep.sh " in line
        assert line.endswith("--num_processes 8 --main_process_port 0")
    large, r2c2 = call("bart_span_denoise", "slurm").calls
    assert "figure_3_4.yaml" in large and "one_node_8gpu.yaml" in large
    assert "figure_5.yaml" in r2c2 and "one_node_8gpu_fsdp.yaml" in r2c2
    for line in (large, r2c2):  # and cores for the processes that read their data
        assert " --gpus-per-node 8 --cpus-per-task 40 " in line
    for script in ("vit_imagenet", "bart_span_denoise"):  # small runs on a CPU need none
        lines = call(script, "slurm", "--", "--preset", "laptop").calls
        assert len(lines) == 2 and not any("-per-" in line or "--launch" in line for line in lines)


@pytest.mark.parametrize("word", ["sweeps", "slurm"])
@pytest.mark.parametrize("script", EXPERIMENTS)
def test_a_sweep_that_fails_ends_the_script(call, tmp_path, script, word):
    for name in ("python", "sbatch"):
        fails = '#!/bin/sh\necho "$0" "$@" >>calls\ncase "$*" in *--strict*) ;; *) exit 2 ;; esac\n'
        (tmp_path / "bin" / name).write_text(fails)
    ran = call(script, word)
    assert ran.returncode == 2 and len(ran.calls) == 1


@pytest.mark.parametrize("script", EXPERIMENTS)
@pytest.mark.parametrize("word", ["sweeps", "slurm"])
def test_nothing_starts_where_data_or_gpus_are_missing(call, tmp_path, script, word):
    """14 jobs were submitted whose text was not there, at 589,000 GPU-hours on one core each."""
    looks = '#!/bin/sh\necho "$0" "$@" >>calls\ncase "$*" in *--strict*) exit 2 ;; esac\n'
    (tmp_path / "bin/python").write_text(looks)
    ran = call(script, word)
    assert (ran.returncode, ran.calls) == (2, []) and len(ran.looks) == len(swept(ran.looks)) > 0
    ended = "submitted" if word == "slurm" else "started"
    assert ran.stderr.endswith(f"error: nothing was {ended}\n")


@pytest.mark.parametrize(
    ("words", "gpus", "cores"),
    [
        (["--gpus-per-node", "8"], " --gpus 8", " --cpus-per-task 64"),
        (["--gpus-per-node=h100:4", "--nodes=3"], " --gpus 12", " --cpus-per-task 32"),
        (["-N", "2", "--gpus-per-node", "8", "-c", "20"], " --gpus 16", ""),
        (["--partition", "cpu"], "", ""),
    ],
)
def test_a_job_has_cores_for_its_gpus_and_is_held_against_its_runs(call, words, gpus, cores):
    ran = call("nanolm_c4", "slurm", *words, "--", "--where", "seed==0", ONLY="depth")
    file = "nanolm_c4/sweeps/depth.yaml"
    assert ran.looks == [f"python -m sweeps run {file} --dry-run --strict{gpus} --where seed==0"]
    options = f"--job-name nanolm_c4/depth {' '.join(words)}{cores}"
    assert ran.calls == [
        f"sbatch --parsable {options} scripts/slurm/sweep.sh {file} --where seed==0"
    ]


@pytest.mark.parametrize(("hours", "asks"), [("999", False), ("64,268", True), ("1,001", True)])
def test_more_than_a_thousand_gpu_hours_want_a_yes(call, tmp_path, hours, asks):
    said = f"depth: 4 of 4 runs to do, 9e+22 FLOPs, about {hours} H100-hours; inputs to come: 4"
    (tmp_path / "bin/python").write_text(f"#!/bin/sh\necho '{said}'\n")
    ran = call("nanolm_c4", "slurm", ONLY="depth")
    assert (ran.returncode, len(ran.calls)) == ((2, 0) if asks else (0, 1)) and said in ran.stdout
    assert ("GPU-hours: nothing was submitted; --yes does" in ran.stderr) == asks
    ran = call("nanolm_c4", "slurm", "--yes", ONLY="depth")
    assert ran.returncode == 0 and len(ran.calls) == 1 and "--yes" not in ran.calls[0]
    ran = call("nanolm_c4", "slurm", "--dry-run", ONLY="constants depth")
    assert (ran.returncode, ran.calls) == (0, [])
    first, second = (line for line in ran.stdout.splitlines() if line.startswith("sbatch "))
    assert "nanolm_c4/sweeps/constants.yaml" in first and "afterany:JOB-OF-nanolm_c4/con" in second


def test_the_last_preset_counts_and_one_without_a_name_is_refused(call, tmp_path):
    for file in ("results", "metrics"):
        table(tmp_path, f"bart_span_denoise/figure_3_4_desktop/{file}.csv")
    lines = call("bart_laptop", "--preset", "desktop").calls
    assert not any("bart_span_denoise.data" in line for line in lines)  # laptop's text
    drawn = [line.split()[3] for line in lines if "-m plots" in line]
    assert drawn == ["dinan/bart_rates", "dinan/bart_strategies"]
    for script, word in itertools.product(EXPERIMENTS, ("sweeps", "slurm", "draw")):
        ran = call(script, word, "--preset")
        assert (ran.returncode, ran.calls) == (2, [])
        assert ran.stderr.startswith("error: --preset: expected the name of a preset")


def test_result_folders_are_those_of_the_sweeps(tmp_path):
    """What `preset` in scripts/experiment.sh appends is what a sweep's folder is called."""
    sweep = load_sweep(ROOT / "vit_imagenet/sweeps/figure_1_2.yaml", tmp_path, "laptop")
    assert sweep.folder == tmp_path / "vit_imagenet/figure_1_2_laptop"


def test_an_environment_keeps_the_torch_it_was_made_with(tmp_path):
    for name in ("scripts/environment.sh", "requirements.txt", "requirements.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    commands = tmp_path / ".venv/bin"
    commands.mkdir(parents=True)
    (commands / "activate").write_text("")
    for name in ("python", "uv"):
        (commands / name).write_text(
            f'#!/bin/sh\necho {name} "$@" "torch=$UV_TORCH_BACKEND" >>"{tmp_path}/calls"\n'
        )
        (commands / name).chmod(0o755)

    def installed(**variables):
        """What uv is asked for, by a script that is called with these variables."""
        (tmp_path / "calls").write_text("")
        env = {key: value for key, value in os.environ.items() if key != "UV_TORCH_BACKEND"}
        script = ["bash", "-euo", "pipefail", "-c", ". scripts/environment.sh"]
        subprocess.run(script, cwd=tmp_path, env={**env, **variables}, check=True)
        calls = (tmp_path / "calls").read_text().splitlines()
        return [call.split(" -r ")[1] for call in calls if call.startswith("uv")]

    assert installed() == ["requirements.lock torch="]
    assert installed() == []
    assert installed(UV_TORCH_BACKEND="cpu") == ["requirements.txt torch=cpu"]
    assert installed() == installed(UV_TORCH_BACKEND="cpu") == []
    assert installed(UV_TORCH_BACKEND="cu128") == ["requirements.txt torch=cu128"]
    with (tmp_path / "requirements.txt").open("a") as file:
        file.write("# another\n")
    assert installed() == ["requirements.txt torch=cu128"]
