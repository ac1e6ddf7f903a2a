"""Rules are pure: from the results of a cell to what is run next, whatever order they arrive in."""

import itertools
import math
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest

from sweeps.rules import (
    FAILED,
    SIX_NEIGHBOURS,
    Cell,
    Confirm,
    Coverage,
    Extend,
    around,
    candidate,
    mean_score,
    score,
)
from sweeps.sweep import SweepWork
from sweeps.sweep_file import load_sweep
from tests.sweeps.toys import play

ROOT = Path(__file__).resolve().parents[2]
ONE = {"keys": ["lr"], "neighbours": [[1], [-1]], "metric": "final_eval_loss"}
RULES = {
    "extend": Extend(key="lr", points=2),
    "fresh": Extend(key="lr", points=2, seeds=[7, 8]),
    "cover": Extend(key="lr", coverage=Coverage()),
    "cover 0.1": Extend(key="lr", coverage=Coverage(excess=0.1)),
    "cover 0.3": Extend(key="lr", coverage=Coverage(excess=0.3)),
    "cover gap 0.4": Extend(key="lr", coverage=Coverage(gap=0.4)),
    "climb": Confirm(**ONE, seeds=[0, 1]),
    "short climb": Confirm(**ONE, points=1),
    "climb of two": Confirm(keys=["lr", "wd"], metric="final_eval_loss"),
}
# Losses at the places of a cell and what its rule answers. The first line of a block has the rule,
# a source's optimum (`<- 16`; `<- ?` is not known yet) and the values; every other line is a case,
# or a row of one case where it begins with the value of a second key. `.` was not run, `?` is at
# work, `x` has diverged, `f` has failed, `!` makes no config; `2,5` are those of two seeds, and
# `(9)` that of a seed which has no say. The file names all places but those with `+`. The answer:
# `*` is to be run, `2*` with further seeds; then the words `wait` or `done`, and a note.
CASES = """
extend         1/4   1/2   1     2     4     8
               .     .     3     2     3     .     done
               .     *     2     3     4     .
               .     .     4     3     2     *
               .     *     x     x     .     .
               .     *     3     .     .     .
               .     *     2     2     2     .     # flat: the safe side
               .     .     3     ?     .     .     wait
               .     .     3     2     *     .
               .     .     f     .     .     .     done
               f+    1     2     .     .     .     done lr 0.25 failed; it is needed
               .     !     1     2     .     .     done lr 0.5 was not run: small; it is needed
               .     .     4     3     2+    1+    done 2 values of lr added, and more are needed
               .     *     3     2,5   4     .     # means of 3 and 3.5
               .     *     3,f   2,5   4     .     # of 3: f has no say
               .     .     3,x   2,5   4     .     done  # infinite

cover          1/2   1     2     2^1.5 4     2^2.5 8
               .     3     2     .     2.1   .     *     # no unstable value yet
               .     3     2     .     2.1   *     x     # one, but 2^1 apart
               .     3     2     .     2.1   *     2.5   # 25 % above the lowest
               .     3     2     .     2.1   2.2   x     done
               .     3     2     2.5   2.1   .     .     done  # the first unstable value
               .     3     2     2.3   2.5   .     .     done
               *     2     3     .     .     .     .     # the optimum comes first

cover 0.1      1     2     2^1.5 4
               3     2     2.3   2.5   done

cover 0.3      1     2     2^1.5 4     8
               3     2     2.3   2.5   *

cover gap 0.4  1     2     2^1.5 2^1.75 4
               3     2     2.3   *     2.5

extend <- ?    8     16
               1     2     wait

extend <- 2    2     4     8     16    32    64
               *     .     1     2     .     .     # the source's optimum
               5+    *     1     2     .     .     # between it and the best
               5+    5+    1     2     .     .     done
               2.4+  .     *     2.2   2.5   3     # from below

extend <- 16   1     2     4     8     16    32
               3     2.5   2.2   *     2.4+  .     # 4 is not inside yet
               3     2.5   2.2   2.3+  2.4+  .     done
               3     2.5   2.2   2.1+  2.4+  .     done
               3     2.5   2.2   *     2+    2.1+  # the source's is best
               3     2.1   2.2   .     2.4+  .     done  # the best is elsewhere
               3     .     2.2   .     2.4   .     done  # the file's own grid
               *     2+    3     4     5+    .     # one value is added, and not two

fresh          1     2     4     8
               3     2*    3     .     done
               3     2(99)* 3    .     done
               4     3     2+    1+*   done 2 values of lr added, and more are needed
               f     .     .     .     done
               x+    x+    x     x     done 2 values of lr added, and more are needed

fresh <- 2     2     4     8     16
               5*    3     2*    3     done

climb          1/4   1/2   1     2     4
               .     *     1     *     .
               .     2     1     ?     .     wait
               *     2     3     4     .     # 1/2 is better
               .     2     1*    2     .     done
               .     2     1(99)* 2    .     done
               .     2     1     f     .     done lr=1 is not confirmed: a neighbour failed
               .     2,2   1,1   0,f   .     done lr=1 is not confirmed: a neighbour failed
               f     .     .     .     .     done

short climb    1/2   1     2
               .     1     .     done 1 points are not enough to confirm lr=1; raise confirm.points
               .     x     .     done every run diverged, also after 1 more points

climb of two   1/2   1     2
1/2            .     *     *
1              *     5     *
2              *     *     .     # neither twice both nor half both

climb of two   1/2   1     2     4
1/4            .     .     *     *
1/2            .     6     4     *
1              6     5     6     .
2              6     6     .     .

climb of two   1/2   1     2
1/2            .     6     6
1              6     5*    6
2              6     6     .     done

climb of two   1/2   1     2
1/2            .     !     6
1              6     5     6
2              6     6     .     done lr=1 wd=1 is not confirmed: small
"""
TOKEN = re.compile(r"([^(+*]+)(?:\((\d+)\))?(\+?)(\*?)")


def number(text):
    base, _, power = text.partition("^")
    return float(Fraction(base)) ** float(power or 1)


def grids():
    """The rule, its source's optimum, place -> token, and the words of every case."""
    for block in CASES.strip().split("\n\n"):
        header, *lines = [line.partition("#")[0].rstrip() for line in block.split("\n")]
        name = max((name for name in RULES if header.startswith(name)), key=len)
        words = header.removeprefix(name).split()
        source = words[1] if words[0] == "<-" else None
        values = [number(word) for word in words[2 if source else 0 :]]
        tokens = {}
        for line in lines:
            rows = line.split()
            second = (number(rows.pop(0)),) if line[0] != " " else ()
            if not second:
                tokens = {}
            tokens |= {(value, *second): token for value, token in zip(values, rows, strict=False)}
            if not second or line == lines[-1]:
                yield pytest.param(
                    RULES[name], source, tokens, rows[len(values) :], id=f"{name}: {line.strip()}"
                )


def result(text):
    """A run's summary by its token."""
    fine = {"status": "finished", "final_eval_loss": 0.0}
    others = {"?": None, "f": FAILED, "x": {"status": "diverged", "final_eval_loss": None}}
    return others[text] if text in others else {**fine, "final_eval_loss": float(text)}


@pytest.mark.parametrize(("rule", "source", "tokens", "words"), [*grids()])
def test_a_rule_looks_at_a_cell_and_answers(rule, source, tokens, words):
    cell, new, again = Cell("a"), set(), set()
    if source:
        place = 1.0 if source == "?" else number(source)
        cell.source = Cell("b", {(place,): {0: result("1")}}, settled=source != "?")
    for place, token in tokens.items():
        if token == "*":
            new.add(place)
        elif token == "!":
            cell.refused[place] = "small"
        elif token != ".":
            losses, further, added, starred = TOKEN.fullmatch(token).groups()
            cell.results[place] = dict(enumerate(map(result, losses.split(","))))
            cell.named |= set() if added else {place}
            again |= {place} if starred else set()
            if further:
                cell.results[place][99], cell.further[place] = result(further), (99,)
    answer = rule.next(cell)
    assert set(answer.places) == new | again and not new & again
    if answer.places:
        assert answer.seeds == (tuple(rule.seeds) if again else None)
    word, *note = words or [""]
    assert (answer.done, not answer.done and not answer.places) == (word == "done", word == "wait")
    assert answer.note == " ".join(["a:", *note] if note else [])


def test_half_steps_come_back_to_the_very_same_numbers():
    """0.1 times the root of two, over it, is 0.10000000000000002."""
    place, known = (0.1,), {(0.1,)}
    for step in (0.5, 0.5, 0.5, -0.5, -0.5, -0.5):
        (place,) = around(place, [[step]], known)
        known.add(place)
    assert place == (0.1,) and len(known) == 4


def test_scores_order_runs_by_metric_then_loss_and_divergence_last():
    fine = {"status": "finished", "final_eval_loss": 0.5, "best_eval_top1": 0.9}
    worse = {**fine, "final_eval_loss": 0.6}
    gone = {"status": "diverged", "final_eval_loss": None, "best_eval_top1": 0.99}
    assert score(fine, "best_eval_top1") > score(worse, "best_eval_top1")
    assert score(worse, "best_eval_top1") > score(gone, "best_eval_top1")
    assert score(fine, "final_eval_loss") > score(worse, "final_eval_loss")
    assert score(FAILED, "best_eval_top1") is None
    assert mean_score([(0.5, -1.0), (0.7, -3.0)]) == pytest.approx((0.6, -2.0))
    odd = {**fine, "best_eval_x_loss": 2.0}  # a name alone does not make a loss
    assert score(odd, "best_eval_x_loss")[0] == 2


def test_of_equal_points_the_one_low_in_every_key_is_the_candidate():
    gone = -math.inf, -math.inf
    places = {(2.0, 2.0): gone, (1.0, 2.0): gone, (2.0, 1.0): gone, (1.0, 1.0): gone}
    assert candidate(places) == (1.0, 1.0)


# Whatever the order


GRID = f"""
experiment: nanolm_c4
config: {ROOT}/nanolm_c4/configs/laptop.yaml
grid: {{model.width: [16, 32, 64], optimizer.lr: {{log2: [-9, -7]}}}}
curves: {{a: {{}}}}
"""
SWEEPS = {
    "extension": "extend: {key: optimizer.lr, points: 5}\nseeds: [0, 1]\n",
    "coverage": "extend: {key: optimizer.lr, points: 9, coverage: {}}\n",
    "transfer": "extend: {key: optimizer.lr}\n"
    "transfer: {source: {model.width: 16}, target: {model.width: 64}}\n",
    "fresh": "extend: {key: optimizer.lr, points: 5, seeds: [7, 8]}\nseeds: [0, 1]\n"
    "transfer: {source: {model.width: 16}, target: {model.width: 64}}\n",
    "climb": "confirm: {keys: [optimizer.lr], neighbours: [[1], [-1], [2]], seeds: [0, 1, 2]}\n",
}


@pytest.mark.parametrize("kind", SWEEPS)
@pytest.mark.parametrize("optimum", [-3, -5, -10, -12])
def test_the_points_of_a_sweep_do_not_depend_on_the_order_of_results(tmp_path, kind, optimum):
    path = tmp_path / "s.yaml"
    path.write_text(GRID + SWEEPS[kind])

    def result(point):
        """Losses and failures are drawn by the run alone, around a parabola."""
        dice = random.Random(f"{optimum} {point.values} {point.seed}")
        distance = math.log2(point.place[0]) - optimum
        if dice.random() < 0.06:
            return {"status": "failed"}
        if distance > 2:
            return {"status": "diverged", "final_eval_loss": None, "best_eval_loss": 1.0}
        loss = 3 + 0.1 * distance**2 + 0.2 * dice.random()
        return {"status": "finished", "final_eval_loss": loss, "best_eval_loss": loss}

    sweep = load_sweep(path)
    ends = []
    for seed, room in itertools.product(range(3), (1, 4, 100)):
        work = play(sweep, result, seed, room)
        ends.append((set(work.points), sorted(work.notes.items()), work.next()))
    assert all(end == ends[0] for end in ends)
    assert len(ends[0][0]) > len(sweep.points)  # the rule did ask for more


def test_what_is_known_at_the_start_asks_for_the_same_runs(tmp_path):
    """A sweep that is stopped anywhere and begun again comes to the same points."""
    path = tmp_path / "s.yaml"
    path.write_text(GRID + "extend: {key: optimizer.lr}\n")

    def result(point):
        distance = math.log2(point.place[0]) + 5
        return {"status": "finished", "final_eval_loss": 3 + distance**2}

    whole = play(load_sweep(path), result, 0, 2)
    for seed in range(5):
        kept = random.Random(seed).sample(sorted(whole.results), 5)
        work = SweepWork(load_sweep(path), {run: whole.results[run] for run in kept}.get)
        while point := work.next():
            work.record(point, result(point))
        assert work.points.keys() == whole.points.keys()


# Accuracy 1 at rate 2^-3 and epsilon 2^-5, falling with the distance in a tilted valley, so that
# the walk has to turn.
CLIMB = f"""
experiment: nanolm_c4
config: {ROOT}/nanolm_c4/configs/laptop.yaml
grid: {{optimizer.lr: [0.001], optimizer.eps: [0.4]}}
curves: {{a: {{}}}}
confirm:
  keys: [optimizer.lr, optimizer.eps]
  metric: best_eval_top1
  seeds: [0, 1, 2]
  points: 50
"""


def far(place):
    x, y = math.log2(place[0]) + 3, math.log2(place[1]) + 5
    return (x + y) ** 2 + 0.3 * (x - y) ** 2


@pytest.mark.parametrize(("digits", "highest"), [(9, 1e9), (0, 1e9), (9, 0.3)])
def test_a_climb_ends_where_all_neighbours_are_worse_and_only_there_runs_its_seeds(
    tmp_path, digits, highest
):
    """Also on a plateau, which the loss decides, and where every run at the start diverges."""
    path = tmp_path / "s.yaml"
    path.write_text(CLIMB if highest > 1 else CLIMB.replace("0.001", "1.024"))

    def result(point):
        """Further seeds would lead elsewhere, if they counted."""
        if point.place[0] > highest:
            return {"status": "diverged", "final_eval_loss": None}
        loss = far(point.place) + 50 * (point.seed > 0)
        accuracy = round(1 - 0.01 * loss, digits)
        return {"status": "finished", "final_eval_loss": loss, "best_eval_top1": accuracy}

    before = SweepWork(load_sweep(path)).may_add()[0]
    works = [play(load_sweep(path), result, 0, room) for room in (1, 2, 100)]
    assert all(work.points == works[0].points and not work.notes for work in works)
    assert (before, works[0].may_add()) == (52, (0, 0.0))
    tried = {
        seed: {point.place for point in works[0].points.values() if point.seed == seed}
        for seed in range(3)
    }
    # The grid is {0.001 2^i} x {0.4 2^j}: the optimum of the whole grid, found by another road.
    grid = itertools.product(
        (0.001 * 2.0**i for i in range(-4, 11)), (0.4 * 2.0**j for j in range(-12, 4))
    )
    best = min((place for place in grid if place[0] <= highest), key=far)
    assert tried[1] == tried[2] == {best} and {*around(best, SIX_NEIGHBOURS)} <= tried[0]


def test_a_neighbour_that_failed_and_then_succeeds_confirms_the_optimum(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(GRID + SWEEPS["climb"])

    def result(point):
        loss = 3 + (math.log2(point.place[0]) + 8) ** 2
        return {"status": "finished", "final_eval_loss": loss, "best_eval_loss": loss}

    def broken(point):
        return FAILED if point.place[0] == 2**-7 else result(point)

    first = play(load_sweep(path), broken, 0, 2)
    assert len(first.notes) == 3 and all("a neighbour failed" in n for n in first.notes.values())
    done = {run: summary for run, summary in first.results.items() if summary is not FAILED}
    work = SweepWork(load_sweep(path), done.get)
    while point := work.next():
        work.record(point, result(point))
    assert not work.notes and sum(point.seed == 2 for point in work.points.values()) == 3
