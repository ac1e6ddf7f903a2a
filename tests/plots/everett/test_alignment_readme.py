"""What nanolm_c4's README says of alignment (Figures 1, 5 to 7), as in plots/test_readmes.py."""

from collections.abc import Iterator

from plots import tables
from plots.everett import alignment
from plots.style import LABELS
from tests.plots.test_readmes import NANOLM, RULES, found, hold, pair, read, span


def test_the_readme_says_what_the_shipped_tables_show():
    hold(alignment_claims())
    hold(alignment_by_width())


def alignment_claims() -> Iterator[tuple[str, str]]:
    table = read("everett/alignment")
    first = table[(table[tables.STEP] == 1) & (table[tables.WIDTH] == 128)]
    keys = [tables.CURVE, tables.PARAMETERIZATION]
    yield (
        NANOLM,
        (
            f"layers start at {span(first['alignment'], 3)}, in the mean over layers at "
            f"{span(first.groupby(keys)['alignment'].mean(), 3)}"
        ),
    )

    def peaks(curves, rules, kinds):
        return {
            (c, r): alignment.peak(alignment.of(table, c, r, kinds))[0].value
            for c in curves
            for r in rules
        }

    two = ("adam", "adafactor")
    high, low = (peaks(two, rules, ["readout"]).values() for rules in (RULES[2:], RULES[:2]))
    yield (
        NANOLM,
        (
            f"readout peaks at {span(high)} with muP and mean-field and at {span(low)} with "
            "standard and NTK"
        ),
    )
    mlp = peaks(two, RULES, alignment.MLP)
    over = {key: value for key, value in mlp.items() if value > 0.8}
    assert list(over) == [("adam", "mup")]
    yield NANOLM, f"MLP layers stay below 0.8 but for muP under Adam ({over['adam', 'mup']:.2f})"
    sgd = [
        *peaks(["sgd"], RULES, ["readout"]).values(),
        *peaks(["sgd"], RULES, alignment.MLP).values(),
    ]
    yield NANOLM, f"SGD's peaks are {span(sgd)}"
    table = alignment.read([tables.shipped("everett/figure_1_5_6_7_alignment_desktop")])
    runs = table.drop_duplicates([*keys, tables.WIDTH, tables.SEED])
    yield NANOLM, f"`desktop`: {len(runs)} runs, commit 45df7fa, D = 32 to"

    def three(curve, rule, kinds=("readout",)):
        height = alignment.peak(alignment.of(table, curve, rule, kinds))[0]
        return pair(height.value, height.error, 3)

    for rule, label in (("mup", "muP"), ("mean_field", "mean-field")):
        yield NANOLM, f"{three('adam', rule)} and {three('adafactor', rule)} with {label}"
    four = [
        f"{three(curve, 'standard')} and {three(curve, 'ntk')}" for curve in ("adam", "adafactor")
    ]
    yield NANOLM, f"peaks at {four[0]} under Adam and at {four[1]} under Adafactor, all below 0.7"
    verdicts = found("everett/alignment_desktop")
    assert {
        verdicts[f"{curve}, {LABELS[rule]}: peak of the readout"].verdict
        for curve in ("adam", "adafactor")
        for rule in RULES[:2]
    } == {"disagrees: below"}
    yield NANOLM, f"below 0.8 but for muP under Adam, {three('adam', 'mup', alignment.MLP)}"
    ends = sorted(three("sgd", rule, alignment.MLP)[:5] for rule in RULES)
    heights = sorted((three("sgd", rule), LABELS[rule]) for rule in RULES)
    (low, least), *_, (high, most) = heights
    yield (
        NANOLM,
        (
            f"peaks between {low} ({least}) and {high} ({most}), its MLP layers between "
            f"{ends[0]} and {ends[-1]}"
        ),
    )


def alignment_by_width() -> Iterator[tuple[str, str]]:
    lines = found("everett/alignment_desktop")

    def number(name: str) -> str:
        return lines[name].measured.partition(" at step")[0].partition(" (")[0]

    wide = {
        (label, d): f"adam, {label}: highest peak of MLP layers, D = {d}"
        for label in LABELS.values()
        for d in (32, 64)
    }
    over = {key: number(name) for key, name in wide.items() if float(number(name)[:5]) > 0.8}
    assert {*over} == {("muP", 32), ("muP", 64), ("mean-field", 32), ("mean-field", 64)}
    assert [key for key in over if lines[wide[key]].verdict == "within noise"] == [
        ("mean-field", 32)
    ]
    yield (
        NANOLM,
        (
            f"with muP ({over['muP', 32]} at D = 32, {over['muP', 64]} at 64) and "
            f"mean-field ({over['mean-field', 32]}, {over['mean-field', 64]}), of which "
            "only mean-field's at 32 is within noise"
        ),
    )
    start = "readout's peak from D = 32 to 128"
    by = {
        curve: [number(f"{curve}, {label}: {start}") for label in LABELS.values()]
        for curve in ("adam", "adafactor")
    }
    *first, last = (
        f"{one} ({label})" for one, label in zip(by["adam"], LABELS.values(), strict=True)
    )
    *others, end = by["adafactor"]
    yield (
        NANOLM,
        (
            f"by {', '.join(first)} and {last} under Adam, and by {', '.join(others)} and "
            f"{end} under Adafactor"
        ),
    )
    for curve in by:
        words = [lines[f"{curve}, {label}: {start}"].verdict for label in LABELS.values()]
        assert words == ["disagrees: below", "disagrees: below", "agrees", "agrees"]
    pairs = {
        (a, b): lines[f"sgd, {a} - {b}: peak of the readout"]
        for a in ("NTK", "mean-field")
        for b in ("standard", "muP")
    }
    gap = {key: line.measured.partition(" (")[0][1:] for key, line in pairs.items()}
    assert [line.verdict for line in pairs.values()] == [
        "agrees",
        "agrees",
        "disagrees",
        "within noise",
    ]
    yield (
        NANOLM,
        (
            f"peaks {gap['NTK', 'standard']} below standard's and {gap['NTK', 'muP']} below "
            f"muP's; mean-field's peaks {gap['mean-field', 'standard']} above standard's"
        ),
    )
