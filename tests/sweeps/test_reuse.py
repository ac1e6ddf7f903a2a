"""Results of another sweep that are copied."""

from sweeps.reuse import take_over
from tests.sweeps.toys import drive, make_toy, work_of, write_file

SWEEP = "grid: {lr: [0.5, 0.25]}\ncurves: {a: {}}\n"


def test_copied_results_are_on_the_disk_before_they_have_their_name(tmp_path, monkeypatch):
    """After a power cut a summary must not outlive the logs that it sums up."""
    monkeypatch.setattr("training.environment.commit", lambda: "c0ffee")
    toy = make_toy(tmp_path, monkeypatch)
    source = drive(work_of(toy, write_file(toy, SWEEP, "source.yaml")))
    run = next(source.folder.glob("*/summary.json")).parent
    (run / "metrics.jsonl").write_text("{}\n")
    target, noted = toy / "again" / run.name, set()

    def note(path):
        assert not target.exists()
        noted.add(path.name)

    monkeypatch.setattr("sweeps.reuse.sync", note)
    assert take_over(run, target)
    assert {"summary.json", "metrics.jsonl"} < noted and (target / "summary.json").exists()
