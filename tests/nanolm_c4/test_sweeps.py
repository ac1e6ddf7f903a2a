"""The sweep files of Everett et al.: what they expand to, and that their runs train."""

from fractions import Fraction
from pathlib import Path

import pytest

from nanolm_c4 import train
from sweeps.sweep_file import load_sweep
from tests.tracked import tracked
from training.config import parse_overrides, set_keys, validate

pytestmark = pytest.mark.xdist_group("drafts")  # every sweep is expanded once
ROOT = Path(__file__).resolve().parents[2]
SWEEPS = ROOT / "nanolm_c4" / "sweeps"
OTHERS = {"figure_7_12"}  # of Bordelon et al., tested with their other figures
FIGURES = sorted({path.stem for path in tracked("nanolm_c4/sweeps/figure_*.yaml")} - OTHERS)
TABLE_3 = [128, 256, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 6144, 8192, 12288, 16384]

# Parameterisations x sizes x first rates (x settings); the sweeps then follow their optima.
RUNS = {
    # 4 parameterisations, 5 first rates, 14 sizes for 50,000 steps and 10 compute-optimal ones
    "figure_11_sgd": 4 * 5 * (14 + 10),
    "figure_12_adam": 4 * 5 * (14 + 10),
    "figure_13_adafactor": 4 * 5 * (11 + 10),  # sizes up to 4B parameters (App. G)
    # 4 parameterisations, 14 sizes, 4 settings, 3 first rates
    "figure_2_adam": 4 * 14 * 4 * 3,
    "figure_3_sgd": 4 * 14 * 4 * 3,
    "figure_3_param_scaling": 4 * 14 * (5 + 3 * 3),
    "figure_1_5_6_7_alignment": 4 * 3 * 3,  # parameterisations, sizes, optimisers
    "figure_4_epsilon": 4 * 5 * 6 * 2,  # parameterisations, sizes, epsilons, constant or per layer
    "figure_8_mitigations": 4 * 14 * 4 * 3,  # parameterisations, sizes, three cures and none, rates
    "figure_9_weight_decay": 4 * 3 * (14 + 10),
    "figure_10_adafactor": 4 * 11 * 4 * 3,  # sizes up to 4B parameters
}


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    """Every sweep at both sizes, counted before anything has run."""
    empty = tmp_path_factory.mktemp("results")
    return {
        (name, preset): load_sweep(SWEEPS / f"{name}.yaml", empty, preset, draft=True)
        for name in FIGURES
        for preset in (None, "laptop")
    }


def test_every_sweep_of_the_paper_is_there():
    assert set(FIGURES) == set(RUNS)


@pytest.mark.parametrize("name", FIGURES)
def test_a_sweep_has_the_papers_runs_with_its_settings(drafts, name):
    sweep = drafts[name, None]
    assert len(sweep.points) == len({point.run for point in sweep.points}) == RUNS[name]
    for point in drafts[name, None].points:
        config = point.config
        assert config.model.width in TABLE_3
        assert (config.model.layers, config.model.head_dim, config.model.context) == (8, 128, 512)
        assert (config.model.vocab_size, config.training.batch_size) == (32101, 256)
        assert (config.schedule.warmup_steps, config.prescription.base_width) == (1000, 1024)
        assert config.training.steps >= 2000 and config.data.source == "c4"
        tokens = config.training.steps * config.training.batch_size * config.model.context
        assert tokens <= config.data.max_train_tokens  # nothing is read twice
        decay = config.optimizer.weight_decay
        assert decay == (1e-4 if name == "figure_9_weight_decay" else 0)


def test_the_compute_optimal_horizon_is_twenty_tokens_per_non_embedding_parameter(drafts):
    # Table 3's non-embedding counts times 20 over 256 x 512 tokens per step
    counts = {256: 14_644_736, 1024: 134_076_416, 6144: 3_824_357_376}
    points = drafts["figure_12_adam", None].points
    for width, count in counts.items():
        steps = {
            p.config.training.steps
            for p in points
            if p.curve.endswith("compute_optimal") and p.config.model.width == width
        }
        assert steps == {round(Fraction(20 * count, 256 * 512))}
    assert {p.config.training.steps for p in points if p.curve.endswith("fixed")} == {50_000}


def test_laptop_runs_have_the_curves_of_the_papers(drafts):
    for name in FIGURES:
        ours, theirs = drafts[name, "laptop"].config.curves, drafts[name, None].config.curves
        assert set(ours) - set(theirs) == ({"enlarged"} if "mitigations" in name else set())
        assert not set(theirs) - set(ours)
        for point in drafts[name, "laptop"].points:
            assert point.config.model.width <= 128 and point.config.data.source == "embedded"


def two_steps(config, texts, **more):
    """A config cut to two steps of two rows of a small text."""
    words = (
        "training.steps=2 training.batch_size=2 training.micro_batch_size=null "
        "training.eval_samples=2 training.eval_batch_size=2 training.compile=false "
        "training.precision=fp32 schedule.warmup_steps=1 checkpoint.minutes=null "
        "data.tokenizer=null"
    ).split()
    keys = {**parse_overrides([*words, *texts]), **more}
    data = set_keys(config.model_dump(mode="json"), keys)
    return validate(type(config), data, "test")


@pytest.mark.thorough
@pytest.mark.parametrize("preset", [None, "laptop"])
@pytest.mark.parametrize("name", FIGURES)
def test_the_first_run_of_a_sweep_takes_two_steps(drafts, texts, tmp_path, name, preset):
    points = drafts[name, preset].points
    smallest = min(point.config.model.width for point in points)
    first = next(point for point in points if point.config.model.width == smallest)
    # The paper's narrowest models keep their width, heads, vocabulary and prescription.
    more = {} if preset else {"model.width": 128, "model.layers": 2, "model.context": 64}
    summary = train.EXPERIMENT.run(two_steps(first.config, texts, **more), tmp_path / "run")
    assert (summary["status"], summary["step"]) == ("finished", 2)
    if name == "figure_1_5_6_7_alignment":
        assert len((tmp_path / "run" / "probes.jsonl").read_text().splitlines()) == 2
