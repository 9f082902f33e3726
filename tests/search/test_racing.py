"""Races: on tables of scores with known answers, and in whole searches on a tiny model."""

import json

import numpy as np
import pytest
from formula import held_out_by_formula
from selection import mostly_long

from lpes_jax.errors import UserError
from lpes_jax.scores import Scores
from lpes_jax.scoring import Scorer
from lpes_jax.search import loop, racing
from lpes_jax.search.checks import check
from lpes_jax.search.loop import search
from lpes_jax.search.racing import Bar, StagedScorer, eighths, estimates, hopeless, race, units_of
from lpes_jax.search.run import run_search
from lpes_jax.search.scorers import make_scorer, make_staged_scorer
from lpes_jax.settings.search import SearchSettings, preset
from lpes_jax.tasks.flags import task_of

BOUNDS = [0, 25, 50, 100, 200]
NOBODY = np.zeros((0, 200))


def table_of(chances: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Verdicts [P, 200] of individuals with these chances; questions differ in how hard they are, for all alike."""
    return (rng.uniform(size=(1, 200)) * 0.7 + rng.uniform(size=(len(chances), 200)) * 0.3 < chances[:, None]).astype(float)


def raced(table: np.ndarray, bar: Bar) -> tuple[np.ndarray, np.ndarray]:
    return race(lambda k, chosen: table[chosen, BOUNDS[k] : BOUNDS[k + 1]], len(table), BOUNDS, bar, least=1.0)


def test_a_race_keeps_who_reaches_the_bar_and_saves_most_of_the_rest():
    rng = np.random.default_rng(0)
    wrong, reached, asked, beaten = 0, 0, [], 0
    for _ in range(200):
        table = table_of(rng.uniform(0.2, 0.8, 25), rng)
        parents, children = table[:5], table[5:]
        bar = parents[parents.mean(axis=1).argmin()]
        values, scored = raced(children, Bar(bar[None]))
        np.testing.assert_array_equal(values, np.where(np.arange(200) < scored[:, None], children, 0))
        fitness = children.mean(axis=1)
        wrong += int((scored[fitness > bar.mean()] < 200).sum())
        reached += int((fitness > bar.mean()).sum())
        asked += scored[fitness < bar.mean() - 0.1].tolist()
        beaten += scored[fitness.argmax()] < 200 and fitness.max() > bar.mean()
        for individual, estimate in estimates(values, scored, Bar(bar[None])).items():
            assert estimate < bar.mean() and np.float32(estimate) < np.float32(bar.mean())
            assert abs(estimate - fitness[individual]) < 0.25
    assert reached > 1000 and wrong / reached < 0.02  # 5 % of those that are exactly as good as the bar, at the most
    assert beaten == 0  # the best of a generation is far above it
    assert np.mean(asked) < 80 and np.min(asked) == 25


def test_half_of_a_generation_is_kept_where_it_is_its_own_bar():
    rng = np.random.default_rng(1)
    table = table_of(np.linspace(0.1, 0.9, 16), rng)
    values, scored = raced(table, Bar(NOBODY, keep=8))
    fitness = table.mean(axis=1)
    assert (scored == 200).sum() >= 8 and (scored < 200).sum() >= 5
    assert set(np.argsort(-fitness)[:6]) <= set(np.flatnonzero(scored == 200))
    found = estimates(values, scored, Bar(NOBODY, keep=8))
    assert set(found) == set(np.flatnonzero(scored < 200))
    assert max(found.values()) < np.sort(fitness[scored == 200])[::-1][7]
    assert (raced(table[:8], Bar(NOBODY, keep=8))[1] == 200).all()


def test_few_questions_and_equals_prove_nothing():
    behind = np.full((1, 4), -0.5)
    assert not hopeless(behind, np.zeros(4), 16).any()  # four questions that agree
    assert hopeless(np.full((1, 12), -0.5), np.zeros(12), 48).all()
    assert not hopeless(np.zeros((1, 100)), np.zeros(100), 200).any()
    nearly = np.zeros((1, 100))
    nearly[0, :2] = -1
    assert not hopeless(nearly, np.zeros(100), 200, least=1.0).any()


def test_a_score_that_is_not_finite_ends_an_individuals_race_and_no_one_elses():
    table = np.tile(np.linspace(0.4, 0.6, 200), (3, 1))
    table[1, 10], table[2, 150] = np.nan, -np.inf
    for bar in (Bar(table[:1]), Bar(NOBODY, keep=2)):
        values, scored = raced(table, bar)
        assert scored.tolist() == [200, 25, 200] and not estimates(values, scored, bar)
        np.testing.assert_array_equal(values[0], table[0])


def test_units_are_haystacks_and_eighths_have_as_much_of_each_task():
    header = list(range(1000, 1100))
    haystacks = [[*header, *(50 * h + np.arange(40)).tolist(), 7, q] for h in range(6) for q in range(3)]
    assert units_of(haystacks) == [[3 * h, 3 * h + 1, 3 * h + 2] for h in range(6)]
    assert units_of([[*header, q, q + 1] for q in range(6)]) == [[q] for q in range(6)]
    first, second = [[q] for q in range(20)], [[q] for q in range(20, 36)]
    parts = eighths([first, second], seed=0)
    assert sorted(q for part in parts for [q] in part) == list(range(36))
    assert [[sum(q < 20 for [q] in part), len(part)] for part in parts] == [[2, 4], [3, 5]] * 4
    assert eighths([first, second], seed=0) == parts != eighths([first, second], seed=1)
    with pytest.raises(UserError, match="--race: 6 haystacks are too few .*; raise --limit"):
        eighths([units_of(haystacks)], seed=0)


def test_a_race_is_refused_where_it_makes_no_sense():
    with pytest.raises(UserError, match="--race drops individuals, and --algorithm gradient has none"):
        check(preset("default", race=True, algorithm="gradient"))
    with pytest.raises(UserError, match="--race: --fitness metric"):
        check(preset("default", race=True, fitness="metric"))


class Landscape(Scorer):
    """A scorer whose prompts like factors near 1.4, each in its own way: searches on it cost nothing."""

    longest, individuals_at_once = 1, 1
    asked = 0

    def __init__(self, prompts: list[int]):
        self.prompts, self.num_prompts, self.answer_tokens = np.array(prompts), len(prompts), np.ones(len(prompts), int)

    def lengthen(self, longest: int) -> None:
        assert longest == 1

    def __call__(self, factors, granularity="layer", on_prompts=lambda count: None) -> Scores:
        Landscape.asked += len(factors) * len(self.prompts)
        wanted = 1.4 + 0.2 * np.sin(self.prompts)
        distance = np.square(factors.astype(np.float64)[:, None] - wanted[None, :, None]).mean(axis=-1)
        log_likelihood = -10 * distance - 0.1 * np.cos(self.prompts)
        return Scores(distance < 0.05, log_likelihood.astype(np.float32))


TINY = {"num_pairs": 2, "key_length": 1, "limit": 60, "test_limit": 1, "uniform_candidates": 2, "control_points": 3}
TINY |= {"positions": (0,), "population_size": 16, "parents": 4, "mutations": 12, "crossovers": 2, "generations": 5}
IDENTITY = {"name": "tiny", "num_layers": 3, "sha256": "0"}
PROMPTS = 60 * 3


@pytest.fixture
def run(guesser, tokenizer, monkeypatch):
    """Searches on the landscape: the history, and the entry `search` of factors.json."""

    def staged(settings: SearchSettings, *_: object) -> StagedScorer:
        return StagedScorer(Landscape, eighths([[[question] for question in range(60)]], settings.run.seed), 3)

    def run(settings: SearchSettings) -> tuple[list[dict], dict]:
        Landscape.asked = 0
        with held_out_by_formula():
            result = search(settings, guesser, tokenizer, [task_of(settings.task)], IDENTITY)
        lines = (settings.run.output_path / "history.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], result.factors.search

    monkeypatch.setattr(loop, "make_scorer", lambda *_: Landscape(list(range(PROMPTS))))
    monkeypatch.setattr(loop, "make_staged_scorer", staged)
    return run


def test_race_is_deprecated_in_one_line(capsys):
    with pytest.raises(UserError, match="no model"):
        run_search(preset("default", race=True, model="/no/model.gguf"))
    assert capsys.readouterr().err.splitlines() == [
        "note: --race is deprecated and will be removed: it saves prompts, but where it was measured no time"
    ]


@pytest.mark.promotes
@pytest.mark.parametrize("fitness", mostly_long(["accuracy", "log_likelihood"], "accuracy"))
def test_a_race_changes_nothing_but_the_lines_of_those_it_drops_and_is_resumed(tmp_path, run, fitness, monkeypatch):
    settings = preset("default", **TINY, fitness=fitness, output_path=tmp_path / "whole")
    whole, whole_record = run(settings)
    assert whole_record["prompts_scored"] == Landscape.asked == PROMPTS * whole_record["evaluations"]
    settings = settings.replace(race=True, output_path=tmp_path / "raced")
    lines, race_record = run(settings)
    dropped = [line for line in lines if "raced" in line]
    assert {7 / 60, 0.25} < {line["raced"] for line in dropped} <= {7 / 60, 0.25, 0.5}
    assert not {line["id"] for line in dropped} & {parent for line in lines[16:] for parent in line["parents"]}
    scores = {"fitness", "accuracy", "log_likelihood", "raced", "values"}
    for ours, theirs in zip(lines, whole, strict=True):
        assert {name: ours[name] for name in ours.keys() - scores} == {name: theirs[name] for name in theirs.keys() - scores}
        if "raced" not in ours:
            assert {name: ours[name] for name in theirs} == theirs
            assert racing.from_text(ours["values"]).mean() == pytest.approx(ours["fitness"], abs=1e-6)
    assert (
        race_record["best_individual"] == whole_record["best_individual"]
        and race_record["evaluations"] == whole_record["evaluations"]
    )
    assert race_record["prompts_scored"] == Landscape.asked < 0.8 * whole_record["prompts_scored"]
    # A run that was cut off within a generation goes on to the same files, whatever is scored at once.
    history, sweep = (
        (settings.run.output_path / "history.jsonl").read_text(),
        (settings.run.output_path / "uniform.json").read_text(),
    )
    (settings.run.output_path / "history.jsonl").write_text("".join(history.splitlines(keepends=True)[:40]))
    monkeypatch.setattr(Landscape, "individuals_at_once", 8)
    _, resumed_record = run(settings.replace(resume=True))
    assert resumed_record["prompts_scored"] == race_record["prompts_scored"]
    assert (settings.run.output_path / "history.jsonl").read_text() == history
    assert (settings.run.output_path / "uniform.json").read_text() == sweep and "values" not in sweep


@pytest.mark.promotes
@pytest.mark.parametrize("algorithm", mostly_long(["cma_es", "random"], "random"))
def test_other_algorithms_end_with_an_individual_that_was_scored_whole(tmp_path, run, algorithm):
    settings = preset("default", **TINY, algorithm=algorithm, race=True, max_evaluations=60, output_path=tmp_path / "run")
    lines, race_record = run(settings)
    assert len(lines) == race_record["evaluations_of_algorithm"] == 60
    dropped = [line for line in lines if "raced" in line]
    assert dropped and "raced" not in lines[race_record["best_individual"]]
    assert race_record["fitness_of_best"] == max(line["fitness"] for line in lines)
    if algorithm == "cma_es":
        for generation in {line["generation"] for line in lines}:
            generation_lines = [line for line in lines if line["generation"] == generation]
            assert 2 * sum("raced" in line for line in generation_lines) <= len(generation_lines)


def test_eighths_are_scored_as_the_whole(guesser, tokenizer):
    settings = preset("default", **TINY | {"limit": 12})
    task = task_of(settings.task)
    prompts = [task.prompt(example, slot) for example in task.examples("search", 12, 0) for slot in (0, 0, 1)]
    factors = np.array([[1.0, 1.2, 0.9]], np.float32)
    whole = make_scorer(settings, guesser, tokenizer, [task], [prompts], ())
    staged = make_staged_scorer(settings, guesser, tokenizer, [task], [prompts])
    assert (whole.num_prompts, whole.answer_tokens.tolist()) == (staged.num_prompts, staged.answer_tokens.tolist())
    expected, scores = whole(factors), staged(factors)
    np.testing.assert_array_equal(scores.correct, expected.correct)
    np.testing.assert_allclose(scores.log_likelihood, expected.log_likelihood, atol=1e-4)
    first = staged(factors, stages=[0]).log_likelihood
    np.testing.assert_array_equal(np.flatnonzero(first), staged.prompts_of(1))
    np.testing.assert_array_equal(first[:, staged.prompts_of(1)], scores.log_likelihood[:, staged.prompts_of(1)])


def test_too_few_haystacks_are_refused(guesser, tokenizer):
    settings = preset("default", race=True, num_pairs=4, key_length=2, queries_per_haystack=2)
    task = task_of(settings.task)
    prompts = [task.prompt(example, slot) for example in task.examples("search", 20, 0) for slot in (0, 1, 3)]
    with pytest.raises(UserError, match="--race: 10 haystacks are too few"):
        make_staged_scorer(settings, guesser, tokenizer, [task], [prompts])
