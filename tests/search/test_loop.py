"""Whole searches on a tiny model: the history is checked line by line against the paper's rules, in NumPy.

Individuals are scored by a formula where the search is what is tested, and by the model elsewhere.
"""

import json
from dataclasses import replace
from functools import cache
from math import comb
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from formula import Analytic, held_out_by_formula, scored_as
from selection import mostly_long
from transformers import PreTrainedTokenizerFast

from lpes_jax.errors import UserError
from lpes_jax.factors import read_json
from lpes_jax.finite import first_bad_layer
from lpes_jax.models.llama import Llama, LlamaConfig
from lpes_jax.scores import Scores
from lpes_jax.search import loop
from lpes_jax.search.genetic import PaperGA
from lpes_jax.search.loop import search
from lpes_jax.search.objective import tie_break_scale
from lpes_jax.search.settings import lattice_of, scaled_layers, search_space
from lpes_jax.settings.search import SearchSettings, preset
from lpes_jax.store.run_folder import RunFolder
from lpes_jax.tasks.flags import task_of

pytestmark = pytest.mark.promotes
IDENTITY = {"name": "tiny", "num_layers": 3, "sha256": "0"}
TINY = {"num_pairs": 3, "key_length": 1, "limit": 3, "test_limit": 2, "uniform_candidates": 3}


def run(settings: SearchSettings, model: Llama, tokenizer: PreTrainedTokenizerFast) -> tuple[list[dict], dict]:
    """The history of a search, its config, and its result."""
    task = task_of(settings.task)
    result = search(settings, model, tokenizer, [task], IDENTITY)
    return history_of(settings.run.output_path), {"result": result}


def history_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def bezier_in_numpy(points: np.ndarray, num_layers: int) -> np.ndarray:
    """Eq. 3-6 in float64, by bisection."""
    d = len(points) - 1

    def basis(t: np.ndarray) -> np.ndarray:
        return np.stack([comb(d, k) * t**k * (1 - t) ** (d - k) for k in range(d + 1)], axis=-1)

    targets = points[0, 0] + (points[-1, 0] - points[0, 0]) * np.arange(num_layers) / (num_layers - 1)
    low, high = np.zeros(num_layers), np.ones(num_layers)
    for _ in range(80):
        middle = (low + high) / 2
        right = basis(middle) @ points[:, 0] < targets
        low, high = np.where(right, middle, low), np.where(right, high, middle)
    t = (low + high) / 2
    t[[0, -1]] = 0, 1
    return basis(t) @ points[:, 1]


def run_by_formula(settings: SearchSettings, model: Llama, tokenizer: PreTrainedTokenizerFast) -> tuple[list[dict], dict]:
    with pytest.MonkeyPatch.context() as patch, held_out_by_formula():
        patch.setattr(loop, "make_scorer", scored_as(Analytic))
        return run(settings, model, tokenizer)


@pytest.fixture(scope="module")
def paper_run(tmp_path_factory, guesser, tokenizer) -> tuple[SearchSettings, list[dict], dict]:
    # Three layers hold three control points on the paper's lattice; everything else is the preset.
    settings = preset("paper", **TINY, control_points=3, output_path=tmp_path_factory.mktemp("paper") / "run")
    return settings, *run_by_formula(settings, guesser, tokenizer)


def ga_of(settings: SearchSettings, config: LlamaConfig) -> PaperGA:
    return PaperGA(lattice_of(settings, search_space(settings, config, range(config.num_layers))), settings.ga)


def test_the_paper_preset_is_tables_9_and_12(paper_run, tiny_config):
    settings, _, _ = paper_run
    paper = ga_of(preset("paper"), replace(tiny_config, num_layers=32))
    ga, space = paper.settings, paper.lattice.space
    assert (ga.population_size, ga.parents, ga.mutations, ga.crossovers, ga.crossover_tries) == (32, 12, 16, 4, 4)
    assert (*paper.max_changes, space.x_step, space.y_step, space.min_factor, space.max_factor) == (2, 0.2, 1, 0.1, 1, 2)
    assert paper.lattice.control_points == 4 and space.initial_factor == 1.5
    assert (settings.ga.generations, settings.objective.weights, settings.objective.tie_break) == (20, (0.2, 0.3, 0.5), False)
    assert (preset("paper").questions.limit, preset("paper").questions.test_limit) == (200, 500)


def test_history_counts(paper_run):
    _, history, extra = paper_run
    assert len(history) == 32 + 20 * 24
    assert [line["id"] for line in history] == list(range(len(history)))
    by_generation = [sum(line["generation"] == generation for line in history) for generation in range(21)]
    assert by_generation == [32] + [24] * 20
    for generation in range(1, 21):
        operators = [line["operator"] for line in history if line["generation"] == generation]
        assert operators[:16] == ["mutation"] * 16
        assert all(name.startswith("crossover") for name in operators[16:])
    assert extra["result"].factors.search["individuals"] == 512
    scored = sum(not line["cached"] for line in history)
    assert 0 < scored < 512
    assert scored <= extra["result"].factors.search["evaluations"] <= scored + 3  # and the uniform candidates


def test_every_individual_obeys_the_paper(paper_run):
    settings, history, _ = paper_run
    lattice = np.round(np.arange(1.0, 2.01, 0.1), 1)
    last_layer = 2
    curve = cache(lambda *points: bezier_in_numpy(np.array(points), 3))  # many individuals are the same
    for line in history:
        points = np.array(line["control_points"])
        x, y = points[:, 0], points[:, 1]
        assert (x == np.round(x)).all() and (np.diff(x) > 0).all() and x[0] >= 0 and x[-1] <= last_layer  # Eq. 10
        assert np.isin(y, lattice).all()
        np.testing.assert_allclose(line["factors"], curve(*map(tuple, line["control_points"])), atol=1e-6)
        if line["operator"] in ("mutation", "crossover_failed"):
            parent = np.array(history[line["parents"][0]]["control_points"])
            neighbours = np.concatenate([[0], parent[:, 0], [last_layer]])
            low = np.maximum(neighbours[:-2], parent[:, 0] - 2)
            high = np.minimum(neighbours[2:], parent[:, 0] + 2)
            assert ((low <= x) & (x <= high)).all()  # Eq. 9
            assert (np.abs(y - parent[:, 1]) < 0.2 + 1e-9).all()
        elif line["operator"] == "crossover":
            first, second = (np.array(history[i]["control_points"]).ravel() for i in line["parents"])
            cut = line["cut"]
            assert (points.ravel() == np.concatenate([first[:cut], second[cut:]])).all()
        if line["operator"] != "initial":
            earlier = [other for other in history if other["generation"] < max(line["generation"], 1)]
            assert all(parent < len(earlier) or line["generation"] == 0 for parent in line["parents"])
    assert history[0]["control_points"] == [[0.0, 1.5], [1.0, 1.5], [2.0, 1.5]]


def test_both_children_of_a_crossover_are_scored_and_twins(paper_run):
    _, history, _ = paper_run
    crossed = [line for line in history if line["operator"] == "crossover"]
    assert crossed
    for line in crossed:
        position = (line["id"] - 32) % 24 - 16
        twin = history[line["id"] + (1 if position % 2 == 0 else -1)]
        assert twin["parents"] == line["parents"][::-1] and twin["cut"] == line["cut"]
        assert twin["fitness"] is not None


def test_fitness_is_the_weighted_accuracy_and_the_best_is_kept(paper_run):
    _, history, extra = paper_run
    for line in history:
        accuracy = line["accuracy"]
        assert line["fitness"] == pytest.approx(0.2 * accuracy["0"] + 0.3 * accuracy["50"] + 0.5 * accuracy["100"], abs=1e-8)
    assert len({line["fitness"] for line in history}) > 3
    best = max(history, key=lambda line: line["fitness"])
    factors = extra["result"].factors
    assert factors.search["best_individual"] == best["id"]
    np.testing.assert_allclose(factors.factors, best["factors"])


def test_parents_are_the_fittest_of_the_generations_before(paper_run):
    _, history, _ = paper_run
    # Replay Select-Parents: parents, mutants and the better child of each pair compete; ties to the earlier one.
    pool = sorted(history[:32], key=lambda line: -line["fitness"])[:12]
    for generation in range(1, 21):
        lines = [line for line in history if line["generation"] == generation]
        ids = {line["id"] for line in pool}
        assert {parent for line in lines for parent in line["parents"]} <= ids
        pairs = [max(lines[index : index + 2], key=lambda line: line["fitness"]) for index in range(16, 24, 2)]
        pool = sorted(pool + lines[:16] + pairs, key=lambda line: -line["fitness"])[:12]


def test_candidates_come_from_evosax_ask(paper_run, tiny_config):
    settings, history, _ = paper_run
    ga = ga_of(settings, tiny_config)
    key, params = jax.random.key(settings.run.seed), ga.default_params
    fitness = jnp.array([-line["fitness"] for line in history], jnp.float32)
    genes, _ = ga.initial_population(jax.random.fold_in(key, 0), params)
    assert ga.recorded_points(genes).tolist() == [line["control_points"] for line in history[:32]]
    state = ga.init(jax.random.fold_in(key, 1), genes, fitness[:32], params)
    for generation in range(1, 21):
        key_ask, key_tell = jax.random.split(jax.random.fold_in(key, generation + 1))
        genes, state = ga.ask(key_ask, state, params)
        block = slice(32 + (generation - 1) * 24, 32 + generation * 24)
        assert ga.recorded_points(genes).tolist() == [line["control_points"] for line in history[block]]
        state, _ = ga.tell(key_tell, genes, fitness[block], state, params)
    best = max(history, key=lambda line: line["fitness"])
    assert ga.recorded_points(state.best_solution.reshape(-1, 2)).tolist() == best["control_points"]


SMALL = TINY | {"population_size": 5, "parents": 3, "mutations": 3, "crossovers": 1, "generations": 2, "control_points": 3}


@pytest.fixture(scope="module")
def small_run(tmp_path_factory, guesser, tokenizer) -> tuple[SearchSettings, str]:
    settings = preset("default", **SMALL, output_path=tmp_path_factory.mktemp("small") / "run")
    run_by_formula(settings, guesser, tokenizer)
    return settings, (settings.run.output_path / "history.jsonl").read_text()


def test_the_same_seed_gives_the_same_history_and_another_does_not(small_run, tmp_path, guesser, tokenizer):
    settings, history = small_run
    run_by_formula(settings.replace(output_path=tmp_path / "again"), guesser, tokenizer)
    assert (tmp_path / "again" / "history.jsonl").read_text() == history
    run_by_formula(settings.replace(seed=1, output_path=tmp_path / "other"), guesser, tokenizer)
    assert (tmp_path / "other" / "history.jsonl").read_text() != history


@pytest.mark.long
def test_batch_size_and_chunk_change_no_individual_and_no_verdict(tmp_path, guesser, tokenizer):
    settings = preset("default", **SMALL | {"generations": 1}, output_path=tmp_path / "a")
    changed = settings.replace(batch_size=2, population_chunk=2, output_path=tmp_path / "b")
    with held_out_by_formula():
        (history, _), (lines, _) = (run(one, guesser, tokenizer) for one in (settings, changed))
    assert_same_history(lines, history)


def assert_same_history(ours: list[dict], theirs: list[dict]) -> None:
    """Every individual, its origin and its verdicts; likelihoods but for rounding, which sums of other shapes may move."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert {name: a[name] for name in a if name not in ("log_likelihood", "fitness")} == {
            name: b[name] for name in b if name not in ("log_likelihood", "fitness")
        }
        assert a["fitness"] == pytest.approx(b["fitness"], abs=1e-5)
        assert a["log_likelihood"] == pytest.approx(b["log_likelihood"], abs=2e-4)


@pytest.mark.parametrize(
    ("kept_lines", "torn", "config", "uniform"),
    [
        (0, b"", '{"model": {"na', None),  # a config.json that was never finished is not needed before the first line
        (7, b'{"id": 9}\n', None, '{"factor": 1'),
        (8, b"\0" * 50 + b"\n", None, "whole"),  # blocks of a file that a power cut left empty
    ],
)
def test_a_cut_off_run_resumes_to_the_same_files(small_run, tmp_path, guesser, tokenizer, kept_lines, torn, config, uniform):
    original, history = small_run
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(config or (original.run.output_path / "config.json").read_text())
    (folder / "history.jsonl").write_bytes("".join(history.splitlines(keepends=True)[:kept_lines]).encode() + torn)
    sweep = (original.run.output_path / "uniform.json").read_text()
    if uniform is not None:
        (folder / "uniform.json").write_text(sweep if uniform == "whole" else uniform)
    _, extra = run_by_formula(original.replace(output_path=folder, resume=True), guesser, tokenizer)
    assert (folder / "history.jsonl").read_text() == history and (folder / "uniform.json").read_text() == sweep
    scored = sum(not json.loads(line)["cached"] for line in history.splitlines()) + json.loads(sweep)["evaluations"]
    assert extra["result"].factors.search["evaluations"] == scored


def test_a_resumed_run_must_be_the_same_run(small_run, guesser, tokenizer):
    settings, history = small_run
    with pytest.raises(UserError, match=r"was run with --seed 0 \(now 3\)"):
        run(settings.replace(seed=3, resume=True), guesser, tokenizer)
    with pytest.raises(UserError, match=r"model.sha256 '0' \(now '1'\)"):
        search(settings.replace(resume=True), guesser, tokenizer, [task_of(settings.task)], IDENTITY | {"sha256": "1"})
    with RunFolder(settings.run.output_path, read_json(settings.run.output_path / "config.json"), resume=True):
        with pytest.raises(UserError, match="another process is working in this folder"):
            run(settings.replace(resume=True), guesser, tokenizer)
    with pytest.raises(UserError, match="--resume"):
        run(settings, guesser, tokenizer)
    assert (settings.run.output_path / "history.jsonl").read_text() == history


def test_other_questions_in_the_same_file_are_refused(tmp_path, guesser, tokenizer):
    settings = preset("default", **SMALL | {"generations": 0}, data=tmp_path / "kv.jsonl", output_path=tmp_path / "run")
    pairs = [[[f"{n}{letter}", letter] for letter in "123"] for n in range(40)]
    rows = [{"ordered_kv_records": records, "key": records[1][0], "value": records[1][1]} for records in pairs]
    settings = settings.replace(key_length=None)
    settings.task.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_by_formula(settings, guesser, tokenizer)
    moved = settings.replace(data=tmp_path / "moved.jsonl", resume=True)
    settings.task.data.rename(moved.task.data)
    history, _ = run_by_formula(moved, guesser, tokenizer)  # the contents count, not the name
    moved.task.data.write_text(moved.task.data.read_text().replace('"2"', '"4"'))
    with pytest.raises(UserError, match="--data with sha256 '.*questions with sha256 '"):
        run(moved, guesser, tokenizer)
    assert history_of(settings.run.output_path) == history


class BrokenAbove(Analytic):
    """By formula; likelihoods are not finite for factors with a mean above `limit`, alternately NaN and infinite."""

    limit: float

    def __call__(self, factors, *arguments, **options) -> Scores:
        correct, log_likelihood = super().__call__(factors, *arguments, **options)
        log_likelihood[factors.mean(axis=1) > self.limit, 1::2] = np.nan
        log_likelihood[factors.mean(axis=1) > self.limit, ::2] = -np.inf
        return Scores(correct, log_likelihood)


def test_scores_that_are_not_finite_rank_last_and_are_reported(tmp_path, guesser, tokenizer, monkeypatch, capfd):
    def with_limit(limit: float) -> list[dict]:
        monkeypatch.setattr(loop, "make_scorer", scored_as(BrokenAbove, limit=limit))
        with held_out_by_formula():
            return run(preset("default", **SMALL, output_path=tmp_path / str(limit)), guesser, tokenizer)[0]

    history = with_limit(1.0)
    bad = [line for line in history if line["fitness"] is None]
    assert 0 < len(bad) < len(history) and {line["id"] for line in bad} == {
        line["id"] for line in history if np.float32(line["factors"]).mean() > 1.0
    }
    assert all(line["not_finite"]["prompt"] == 0 for line in bad)
    assert not {line["id"] for line in bad} & {parent for line in history for parent in line["parents"]}
    assert "have scores that are not finite; individual" in capfd.readouterr().err
    with held_out_by_formula():
        again = run(preset("default", **SMALL, output_path=tmp_path / "1.0", resume=True), guesser, tokenizer)[0]
    assert again == history
    with pytest.raises(UserError, match="generation 0: 5 of 5 have scores that are not finite; individual 0, factors 1 1 1"):
        with_limit(0.0)
    assert len(history_of(tmp_path / "0.0")) == 5


def test_the_layer_where_numbers_stop_being_finite_is_named(tmp_path, guesser, tokenizer):
    def damaged(change) -> Llama:
        model = nnx.clone(guesser)
        change(model)
        return model

    def spoil(model: Llama) -> None:
        model.layers.down[...] = model.layers.down[...].at[1, 0, 0].set(jnp.inf)

    broken = damaged(spoil)
    assert first_bad_layer(guesser, [5, 6, 7], np.ones(3), "layer") is None
    assert first_bad_layer(broken, [5, 6, 7], np.ones(3), "layer") == 1
    embedding = damaged(lambda model: setattr(model, "embed", nnx.Param(model.embed[...].at[6].set(jnp.nan))))
    assert first_bad_layer(embedding, [5, 6, 7], np.ones(3), "layer") == "embedding"
    head = damaged(lambda model: setattr(model, "head", nnx.Param(model.head[...].at[0, 0].set(jnp.nan))))
    assert first_bad_layer(head, [5, 6, 7], np.ones(3), "layer") == "logits"
    said = "generation 0: .* the model's logits are not finite.* first in layer 1, at prompt 0; try --dtype float32"
    with pytest.raises(UserError, match=said):
        run(preset("default", **SMALL, output_path=tmp_path / "run"), broken, tokenizer)


def test_selection_is_the_weighted_accuracy_where_chosen_and_held_out(paper_run):
    settings, history, extra = paper_run
    result = extra["result"]
    best = history[result.factors.search["best_individual"]]
    baseline, found = (
        next(found for found in result.outcomes if found.candidate.name == name) for name in ("baseline", "lpes")
    )
    assert result.selection["chosen_of"] == 512
    assert result.selection["accuracy_where_chosen"] == pytest.approx(best["fitness"])
    for outcome, name in ((found, "accuracy_held_out"), (baseline, "baseline_held_out")):
        accuracies = outcome.main.mean(axis=0)[[0, 2, 4]]  # of positions 0 25 50 75 100
        assert result.selection[name] == pytest.approx(accuracies @ np.array([0.2, 0.3, 0.5]))


@pytest.mark.parametrize("curve", mostly_long(["linear", "step", "free", "authors"], "free", "authors"))
def test_other_curves_search_too(tmp_path, guesser, tokenizer, curve):
    changes = SMALL | {"generations": 1, "control_points": None if curve == "free" else 3}
    settings = preset("default", **changes, curve=curve, output_path=tmp_path / "run")
    history, _ = run_by_formula(settings, guesser, tokenizer)
    if curve == "free":
        assert all(line["factors"] == pytest.approx([y for _, y in line["control_points"]]) for line in history)
    assert len({tuple(line["factors"]) for line in history}) > 1


def test_the_curve_may_scale_some_layers_only(tmp_path, guesser, tokenizer):
    small = {"control_points": 2, "population_size": 6, "parents": 2, "mutations": 2, "crossovers": 0, "generations": 2}
    settings = preset("default", **TINY, **small, layers="1:", output_path=tmp_path / "run")
    history, extra = run_by_formula(settings, guesser, tokenizer)
    for line in history:  # a straight line of two points over layers 1 and 2
        assert line["factors"] == [1.0, *(y for _, y in np.array(line["control_points"]).round(7).tolist())]
    assert len({tuple(line["factors"]) for line in history}) > 3
    assert extra["result"].factors.curve["layers"] == [1, 2]


@pytest.mark.parametrize(("layers", "wanted"), [(":", range(3)), ("1:", range(1, 3)), (":2", range(2)), ("1:3", range(1, 3))])
def test_layers_are_a_slice(layers, wanted):
    assert scaled_layers(SearchSettings.of(layers=layers), 3) == wanted


@pytest.mark.parametrize("layers", ["", "2", "3:", "2:1", ":4", "-1:", "1:2:3", "a:b"])
def test_layers_that_are_none_are_refused(layers):
    with pytest.raises(UserError, match="--layers"):
        scaled_layers(SearchSettings.of(layers=layers), 3)


def test_log_likelihood_can_be_the_fitness(tmp_path, guesser, tokenizer):
    settings = preset("default", **SMALL, fitness="log_likelihood", output_path=tmp_path / "run")
    history, _ = run_by_formula(settings, guesser, tokenizer)
    for line in history:
        likelihood = line["log_likelihood"]
        weighted = 0.2 * likelihood["0"] + 0.3 * likelihood["50"] + 0.5 * likelihood["100"]
        assert line["fitness"] == pytest.approx(weighted, abs=1e-3)


def test_tie_break_never_outweighs_an_example():
    assert tie_break_scale((0.2, 0.3, 0.5), 200) == pytest.approx(0.1 / 200 / 2)
    assert tie_break_scale((0.0, 0.5, 0.5), 10) == pytest.approx(0.5 / 10 / 2)
    assert tie_break_scale((0.333, 0.333, 0.334), 1) == pytest.approx(0.001 / 2)


def test_tie_break_orders_equal_accuracies_by_likelihood(small_run):
    history = [json.loads(line) for line in small_run[1].splitlines()]
    for line in history:
        weighted = sum(w * line["accuracy"][p] for w, p in zip((0.2, 0.3, 0.5), ("0", "50", "100"), strict=True))
        assert 0 < line["fitness"] - weighted <= tie_break_scale((0.2, 0.3, 0.5), 3)
