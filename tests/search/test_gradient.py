"""Gradient search: the gradient against finite differences, the result of a descent, and whole searches."""

import json
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from descents import haystacks, looks_of
from formula import Analytic, held_out_by_formula, scored_as
from selection import mostly_long

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama import Llama
from lpes_jax.rope import RopeTable
from lpes_jax.search import loop
from lpes_jax.search.algorithms import between_families, box_parameters, factors_applied
from lpes_jax.search.checks import check
from lpes_jax.search.gradient import answer_loss, descend, initial_state, text_loss
from lpes_jax.search.loop import SearchResult, search
from lpes_jax.search.minibatches import Data, pack, prompts_per_group, shared_groups
from lpes_jax.search.plain_text import text_windows
from lpes_jax.search.settings import lattice_of, search_space
from lpes_jax.search.space import Space
from lpes_jax.settings.search import GradientSettings, SearchSettings, TextSettings, preset
from lpes_jax.store.run_folder import RunFolder
from lpes_jax.tasks.flags import tasks_of
from lpes_jax.tasks.prompts import EncodedPrompt

pytestmark = pytest.mark.promotes
SMALL = {
    "algorithm": "gradient",
    "curve": "free",
    "num_pairs": 3,
    "key_length": 1,
    "limit": 4,
    "test_limit": 2,
    "uniform_candidates": 2,
    "steps": 4,
    "look_every": 2,
    "minibatch_size": 3,
}
SIZES = {"minibatch_size": 6, "learning_rate": 0.003}
loss_of, text_loss_of = jax.jit(answer_loss), jax.jit(text_loss)  # one program each, not one per operation


def prompts_of(seed: int, count: int = 6) -> list[EncodedPrompt]:
    """Random prompts of different lengths, with one or two answers."""
    rng = np.random.default_rng(seed)

    def ids(length: int) -> list[int]:
        return rng.integers(1, 250, length).tolist()

    return [EncodedPrompt(ids(20 + 3 * index), [ids(2 + index % 2) for _ in range(1 + index % 2)]) for index in range(count)]


def run(settings: SearchSettings, model: Llama, tokenizer) -> tuple[list[dict], SearchResult]:
    check(settings)
    identity = {"name": "tiny", "num_layers": 3, "sha256": "0"}
    with held_out_by_formula():
        result = search(settings, model, tokenizer, tasks_of(settings.task), identity)
    lines = (settings.run.output_path / "history.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines], result


@pytest.mark.parametrize(
    ("curve", "changes"),
    mostly_long(
        [
            ("free", {}),
            ("bezier", {"control_points": 3}),
            ("bezier", {"control_points": 3, "move_x": True}),
            ("free", {"box": "sigmoid"}),
            ("free", {"granularity": "layer_group_band", "bands": 2}),
        ],
        ("bezier", {"control_points": 3, "move_x": True}),
        names=2,
    ),
)
def test_gradient_equals_finite_differences_in_float64(tiny_model, tiny_config, curve, changes):
    settings = SearchSettings.of(curve=curve, **changes)
    space = search_space(settings, tiny_config, range(3))
    with jax.enable_x64(True):
        model = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), tiny_model)
        parameters, _, values = box_parameters(settings.gradient, space)
        rng = np.random.default_rng(0)
        # Away from the start, where x of the Bézier points would be even and all factors one number.
        parameters = {name: np.asarray(value) + 0.2 * rng.uniform(-1, 1, value.shape) for name, value in parameters.items()}
        if "x" in parameters:
            parameters["x"] = np.array([0.0, 0.37, 1.0])
        own = tiny_config.rope_table(64)
        apply = factors_applied(
            space, values, RopeTable(own.inv_freq.astype(jnp.float64), own.attention_scaling.astype(jnp.float64))
        )
        examples = pack(prompts_of(1), [0.2, 0.3, 0.5] * 2)
        examples = replace(examples, weights=examples.weights.astype(jnp.float64))

        @jax.jit
        def loss(parameters):
            return answer_loss(*(tuned := apply(model, parameters))[:1], examples, tuned[1])

        gradient = jax.device_get(jax.jit(jax.grad(loss))(parameters))
        checked = 0
        for name, value in parameters.items():
            for index in np.ndindex(value.shape):
                if name == "x" and index[0] in (0, 2):
                    continue  # the ends are put back after each step
                step = 1e-6

                def shifted(by: float, name=name, index=index) -> float:
                    moved = parameters[name].copy()
                    moved[index] += by
                    return float(loss(parameters | {name: moved}))

                # Fourth-order central difference.
                numeric = (8 * (shifted(step) - shifted(-step)) - (shifted(2 * step) - shifted(-2 * step))) / (12 * step)
                largest = max(np.abs(leaf).max() for leaf in gradient.values())
                assert float(gradient[name][index]) == pytest.approx(numeric, rel=1e-6, abs=1e-6 * largest)
                checked += 1
        assert checked >= 3 and largest > 1e-3


@pytest.fixture(scope="module")
def pieces(tiny_model, tiny_config):
    """A descent on random prompts: data, parameters, and `apply`."""
    settings = SearchSettings.of(curve="free", min_factor=0.9, max_factor=1.2)
    space = search_space(settings, tiny_config, range(3))
    parameters, project, values = box_parameters(settings.gradient, space)
    train, held_back = (Data([pack(prompts_of(seed), [0.2, 0.3, 0.5] * 2)]) for seed in (2, 3))
    return tiny_model, train, held_back, parameters, factors_applied(space, values, tiny_config.rope_table(64)), project


def test_descent_lowers_the_loss_stays_in_the_box_and_keeps_the_best_look(pieces):
    model, train, _, parameters, apply, _ = pieces
    looks, best = looks_of(pieces, GradientSettings(**SIZES, steps=12, look_every=3), held_back=train)
    assert [measured.step for measured in looks] == [0, 3, 6, 9, 12]
    assert best.loss == min(measured.loss for measured in looks) < looks[0].loss - 0.01
    for measured in looks:
        assert (measured.parameters["y"] >= 0.9).all() and (measured.parameters["y"] <= 1.2).all()
        assert measured.loss == pytest.approx(measured.task_losses[0]) and 0 <= measured.accuracies[0] <= 1
    # The loss of a look is the weighted mean of -log p, here against the objective that steps see.
    assert looks[0].loss == pytest.approx(float(loss_of(model, train.tasks[0], apply(model, parameters)[1])), rel=1e-5)


def test_patience_ends_early_and_a_resumed_descent_is_the_uninterrupted_one(pieces):
    settings = GradientSettings(**SIZES, steps=8, look_every=2)
    whole, best = looks_of(pieces, settings)
    states = []
    model, train, held_back, parameters, apply, project = pieces

    def stop(measured, state):
        states.append(state)
        if measured.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        descend(model, train, held_back, parameters, apply, settings, TextSettings(), project=project, on_look=stop)
    rest, resumed_best = looks_of(pieces, settings, resume=states[-1])
    assert [measured.step for measured in rest] == [6, 8]
    assert [measured.loss for measured in rest] == [measured.loss for measured in whole[3:]] and resumed_best.loss == best.loss
    stuck, _ = looks_of(pieces, settings.replace(learning_rate=1e-12, patience=1))
    assert [measured.step for measured in stuck] == [0, 2]
    like = initial_state(parameters, 1)  # the structure in which a state is read again
    assert all(jax.tree.structure(state) == jax.tree.structure(like) for state in states) and math.isnan(like.best.loss)


def test_weights_are_in_the_loss_or_in_the_draws(pieces):
    model, _, held_back, parameters, apply, project = pieces
    prompts = prompts_of(4)
    never = pack(prompts, [0.0, 0.0, 0.5, 0.0, 0.5, 0.5])
    separate = pack([prompts[2], prompts[4], prompts[5]], [1.0, 1.0, 1.0])
    table = apply(model, parameters)[1]
    assert float(loss_of(model, never, table)) == pytest.approx(float(loss_of(model, separate, table)), rel=1e-5)
    # Prompts that are never drawn: three remain, and a minibatch is three.
    by_draws, _ = looks_of(
        (model, Data([never]), held_back, parameters, apply, project),
        GradientSettings(minibatch_size=3, steps=1, look_every=1, weights_in="sampling"),
    )
    assert by_draws[1].train_loss == pytest.approx(float(loss_of(model, separate, table)), rel=1e-5)


def test_prompts_that_are_alike_are_grouped_where_that_halves_the_cost(tiny_config):
    assert [prompts_per_group(size) for size in (1, 2, 4, 8, 16, 24)] == [0, 1, 2, 4, 4, 6]
    prompts = haystacks([5, 7, 3])
    assert shared_groups(prompts, tiny_config, 4) == [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9, 10, 11], [12, 13, 14]]
    mixed = [prompts[index] for index in (5, 0, 6, 1, 7, 2)]
    assert shared_groups(mixed, tiny_config, 4) == [[0, 2, 4], [1, 3, 5]]
    # Groups of two halve nothing, and neither do prompts that are alike up to their middle.
    assert (
        shared_groups(prompts[:4], tiny_config, 2) == shared_groups(haystacks([1] * 4), tiny_config, 4) == [[0], [1], [2], [3]]
    )
    half = [EncodedPrompt(p.ids[:32] + [index] * 32, p.answers) for index, p in enumerate(prompts[:4])]
    assert shared_groups(half, tiny_config, 4) == [[0], [1], [2], [3]]
    # Two prompts a question: the border between questions goes where no haystack is cut.
    questions = haystacks([6, 6, 4])
    assert [between_families(questions, 2, border) for border in (2, 3, 4, 5, 6, 7)] == [3, 3, 3, 6, 6, 6]
    assert between_families(haystacks([16]), 2, 6) == 6


def test_loss_and_gradient_of_shared_prompts_are_those_of_separate_prompts(tiny_model, tiny_config):
    prompts = haystacks([3, 4])
    groups = shared_groups(prompts, tiny_config, 4)
    assert groups == [[0, 1, 2], [3, 4, 5, 6]]
    weights = np.random.default_rng(1).uniform(0.1, 1, 7).tolist()
    both = pack(prompts, weights, groups), pack(prompts, weights)
    assert both[0].batch.groups.tokens.size < both[1].batch.groups.tokens.size / 2
    assert [examples.groups_per_step(4) for examples in both] == [1, 4] and [
        examples.groups_per_step(6) for examples in both
    ] == [
        2,
        6,
    ]
    with jax.enable_x64(True):
        model = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), tiny_model)
        own = tiny_config.rope_table(96)

        @jax.jit
        @partial(jax.value_and_grad, argnums=2)
        def loss(model, examples, factors):
            inv_freq = own.inv_freq.astype(factors.dtype) / factors[:, None, None]
            return answer_loss(model, examples, RopeTable(inv_freq, own.attention_scaling.astype(factors.dtype)))

        shared, separate = (loss(model, examples, jnp.array([1.0, 1.2, 1.5])) for examples in both)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9), shared, separate)
        assert float(jnp.abs(separate[1]).max()) > 1e-2


@pytest.mark.long
def test_search_with_shared_prompts_holds_whole_haystacks_back(guesser, tokenizer, tmp_path):
    changes = {"num_pairs": 6, "key_length": 4, "limit": 7, "queries_per_haystack": 3, "minibatch_size": 12, "test_limit": 1}
    settings = SearchSettings.of(**SMALL | changes | {"steps": 1, "uniform_candidates": 1}, output_path=tmp_path / "run")
    history, result = run(settings, guesser, tokenizer)
    # Questions of haystacks of 3, 3 and 1, with 3 prompts each: 2 would be held back, but one of them is of the second.
    sizes = {name: result.factors.search[name] for name in ("prompts_a_step", "trees_a_step", "prompts_a_look")}
    assert sizes == {"prompts_a_step": 12, "trees_a_step": 4, "prompts_a_look": 3}
    assert [line["step"] for line in history] == [0, 1] and history[1]["fitness"] != history[0]["fitness"]


def test_text_term_penalty_and_gate(pieces):
    model, train, held_back, parameters, apply, project = pieces
    text = jnp.asarray(np.random.default_rng(0).integers(1, 250, (4, 40)), jnp.int32)
    with_text = (model, Data(train.tasks, text), Data(held_back.tasks, text), parameters, apply, project)
    settings = GradientSettings(**SIZES, steps=4, look_every=2)
    text_settings = TextSettings(text_weight=2.0, text_minibatch=2, max_text_loss_rise=0.0)
    looks, best = looks_of(with_text, settings, text_settings, penalty=lambda p: 0.5 * jnp.square(p["y"] - 1).mean())
    plain = float(text_loss_of(model, text, apply(model, parameters)[1]))
    assert looks[0].text_loss == pytest.approx(plain, rel=1e-5)
    for measured in looks:
        distance = 0.5 * float(jnp.square(measured.parameters["y"] - 1).mean())
        assert measured.loss == pytest.approx(measured.task_losses[0] + 2 * measured.text_loss + distance, rel=1e-5)
    # The gate: where text may not become less likely at all, looks after which it has are refused.
    assert [measured.allowed for measured in looks] == [measured.text_loss <= looks[0].text_loss for measured in looks]
    assert best.text_loss <= looks[0].text_loss


def test_a_loss_that_is_not_finite_is_an_error(pieces):
    model, train, held_back, parameters, _, project = pieces
    own = model.config.rope_table(64)

    def broken(model, parameters):
        y = parameters["y"]
        return model, RopeTable(own.inv_freq / y[:, None, None] * jnp.where(y[0] == 1, 1, jnp.nan), own.attention_scaling)

    with pytest.raises(UserError, match="not finite after 1 steps; lower --learning-rate"):
        looks_of((model, train, held_back, parameters, broken, project), GradientSettings(**SIZES, steps=1, look_every=1))


def test_a_gradient_that_is_not_finite_is_not_blamed_on_a_flag(pieces):
    """The loss is finite, and its gradient is not, as with a faulty kernel."""
    model, train, held_back, parameters, _, project = pieces
    own = model.config.rope_table(64)

    def apply(model, parameters):
        y = parameters["y"] + jnp.sqrt(0 * parameters["y"])  # y, with the derivative NaN
        return model, RopeTable(own.inv_freq / y[:, None, None], own.attention_scaling)

    with pytest.raises(UserError, match="the gradient is not finite within the first 2 steps, though the loss was"):
        looks_of((model, train, held_back, parameters, apply, project), GradientSettings(**SIZES, steps=2, look_every=2))


@pytest.mark.long
def test_search_by_gradient_with_bands_text_and_two_lengths(guesser, tokenizer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    settings = SearchSettings.of(
        **SMALL | {"num_pairs": (2, 3)}, granularity="layer_band", bands=4, text=text, text_weight=0.5, text_window=64,
        text_minibatch=2, search_positions=(0, 25, 50, 100), weights=(0.25,) * 4, output_path=tmp_path / "run",
    )  # fmt: skip
    history, result = run(settings, guesser, tokenizer)
    assert [line["step"] for line in history] == [0, 2, 4]
    assert np.array(history[0]["factors"]).shape == (3, 4) and (np.array(history[0]["factors"]) == 1).all()
    assert result.factors.granularity == "layer_band" and result.factors.factors.shape == (3, 4)
    best = max((line for line in history if line["fitness"] is not None), key=lambda line: line["fitness"])
    assert result.factors.factors.tolist() == best["factors"] and result.control_points is None
    assert [len(report.outcomes[0].main) for report in result.reports] == [2, 2]
    assert [report.task.num_items for report in result.reports] == [2, 3]
    assert len(history[0]["task_losses"]) == 2 and history[0]["text_loss"] > 0


@pytest.mark.long
def test_killed_gradient_search_resumes_to_the_same_history(guesser, tokenizer, tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    states, save = [], RunFolder.save_state
    monkeypatch.setattr(RunFolder, "save_state", lambda folder, state: (states.append(state), save(folder, state)))
    history, _ = run(SearchSettings.of(**SMALL, output_path=whole), guesser, tokenizer)
    steps = {state.step: state for state in states}
    # The newest state cut in two, with the line behind it; then a state whose line was lost: the one before is gone on from.
    for damage in ("state", "line"):
        cut.mkdir()
        for name in ("config.json", "history.jsonl"):
            (cut / name).write_bytes((whole / name).read_bytes())
        config = json.loads((cut / "config.json").read_text())
        with RunFolder(cut, config, resume=True) as folder:
            save(folder, steps[2])
            save(folder, steps[4])
            if damage == "line":
                folder.keep(2)
            else:
                folder.state_path.write_bytes(folder.state_path.read_bytes()[:500])
        with (cut / "history.jsonl").open("a") as file:
            file.write('{"id": 3, "st')
        before = len(states)
        resumed, _ = run(SearchSettings.of(**SMALL, output_path=cut, resume=True), guesser, tokenizer)
        assert resumed == history and [state.step for state in states[before:]] == [4]
        shutil.rmtree(cut)


def test_spaces_start_from_factors_found_before(tiny_config, tmp_path):
    points = [[0, 0.8], [1, 1.3], [2, 1.5]]
    LayerFactors(np.array([0.8, 1.25, 1.5]), curve={"type": "bezier", "control_points": points}).save(tmp_path / "found.json")

    def space(**changes) -> Space:
        settings = SearchSettings.of(**{"curve": "free", "initial_factors": tmp_path / "found.json"} | changes)
        return search_space(settings, tiny_config, range(changes.pop("first", 0), 3))

    assert space().y.tolist() == [0.8, 1.25, 1.5]
    assert space(max_factor=1.5).y.tolist() == [0.8, 1.25, 1.5]
    assert space(granularity="layer_band", bands=2).y.tolist() == [[0.8, 0.8], [1.25, 1.25], [1.5, 1.5]]
    bezier = space(curve="bezier", control_points=3)
    assert np.stack([bezier.x, bezier.y], axis=1).tolist() == points
    settings = SearchSettings.of(curve="bezier", control_points=3, initial_factors=tmp_path / "found.json")
    assert lattice_of(settings, bezier).initial_genes.tolist() == [[0, 6], [1, 16], [2, 20]]  # 0.5 + 0.05 k
    for changes in ({"control_points": 2}, {"curve": "linear", "control_points": 3}):
        with pytest.raises(UserError, match="found.json: does not contain .* control points"):
            space(**{"curve": "bezier"} | changes)


def test_spaces_give_factors_of_their_granularity(tiny_config):
    def space(**changes) -> Space:
        return search_space(SearchSettings.of(**changes), tiny_config, range(1, 3))

    for granularity, units in (("layer_band", (2,)), ("layer_group", (2,)), ("layer_group_band", (2, 2))):
        fine = space(curve="free", granularity=granularity, bands=2)
        y = np.arange(2 * np.prod(units), dtype=np.float32).reshape(2, *units) + 1
        assert fine.factors(fine.x, y).tolist() == [np.ones(units).tolist(), *y.tolist()]
    curves = space(curve="linear", control_points=2, granularity="layer_band", bands=2)
    assert curves.factors(curves.x, np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)).tolist() == [[1, 1], [1, 2], [3, 4]]
    assert curves.in_order(jnp.array([0.5, -1.0])).tolist() == [0, 1]
    shared = space(curve="shared")
    assert shared.granularity == "layer_band"
    assert shared.factors(shared.x, np.array([1.0, 2.0, 3.0, 4.0], np.float32)).tolist() == [[1] * 4, *[[1, 2, 3, 4]] * 2]
    wide = search_space(SearchSettings.of(curve="bezier", control_points=4), replace(tiny_config, num_layers=10), range(10))
    moved = np.asarray(wide.in_order(jnp.array([3.0, 8.0, 2.0, 1.0])))
    assert moved[0] == 0 and moved[-1] == 9 and (np.diff(moved) > 0.049).all() and moved[1] == 8


@pytest.mark.parametrize("algorithm", mostly_long(["ga", "cma_es"], "ga"))
def test_a_budget_of_evaluations_is_kept_to_the_evaluation(guesser, tokenizer, tmp_path, algorithm, monkeypatch):
    monkeypatch.setattr(loop, "make_scorer", scored_as(Analytic))  # scores are not tested here
    settings = SearchSettings.of(
        **SMALL | {"algorithm": algorithm, "population_size": 6, "parents": 3, "mutations": 4, "crossovers": 1},
        max_evaluations=17, output_path=tmp_path / "run",
    )  # fmt: skip
    history, result = run(settings, guesser, tokenizer)
    assert sum(not line["cached"] for line in history) == result.factors.search["evaluations_of_algorithm"] == 17
    assert not history[-1]["cached"]
    assert all(0.5 <= factor <= 2 for line in history for factor in line["factors"])


def test_text_windows_of_a_file_and_of_the_model(guesser, tokenizer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abcdefghij" * 30, encoding="utf-8")
    windows = text_windows(text, guesser, tokenizer, seed=0, length=20)
    assert windows.shape == (6, 20)  # 120 of 300 tokens are for searching
    assert tokenizer.decode(windows[1]) == "abcdefghij" * 2
    with pytest.raises(UserError, match="--text .*: 1 windows of 200 tokens asked for"):
        text_windows(text, guesser, tokenizer, seed=0, length=200)
    written, again, other = (text_windows(None, guesser, tokenizer, seed, length=12) for seed in (0, 0, 1))
    assert written.shape == (64, 12) and (written == again).all() and (written != other).any()
    # Drawn from the model's own distribution: nearly always a hexadecimal digit, and not always the same one.
    digits = {tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789abcdef"}
    inside = np.isin(written[:, 1:], list(digits))
    assert 0.5 < inside.mean() and len(np.unique(written[:, 1:][inside])) > 8


def test_quick_preset_of_the_gradient_has_few_steps():
    quick, ga = preset("quick", algorithm="gradient"), preset("quick")
    assert (quick.gradient.steps, quick.gradient.minibatch_size, quick.gradient.look_every) == (20, 6, 5)
    assert quick.task == ga.task and quick.questions == ga.questions and quick.space == ga.space
    assert preset("quick", algorithm="gradient", steps=7).gradient.steps == 7


def test_paper_preset_of_the_gradient_is_appendix_c():
    settings = preset("paper", algorithm="gradient")
    gradient, objective = settings.gradient, settings.objective
    assert (settings.questions.limit, gradient.minibatch_size, gradient.learning_rate, gradient.steps) == (
        2000,
        32,
        1e-5,
        30 * 2000 // 32,
    )
    assert (gradient.weights_in, objective.weights, settings.space.initial_factor) == ("sampling", (0.2, 0.3, 0.5), 1.5)
    assert preset("paper").questions.limit == 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "cma-es"}, "--algorithm 'cma-es' is not known; did you mean cma_es"),
        ({"weights": (0.5, 0.5)}, "--weights 0.5 0.5: give one number for each of --search-positions 0 50 100"),
        ({"max_evaluations": 5}, "--max-evaluations counts individuals"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"learning_rate": 0.0}, "--learning-rate must be above 0"),
        ({"validation_share": 1.0}, "--validation-share must be between 0 and 1"),
        ({"max_text_loss_rise": -1.0}, "--max-text-loss-rise must be at least 0"),
        ({"fitness": "metric"}, "--fitness metric has no gradient"),
        ({"limit": 1}, "--limit 1 leaves no question to learn from"),
        ({"granularity": "layer_band", "bands": 3}, "--bands 3 must divide the 4 frequencies"),
        ({"granularity": "layer_band", "bands": 2, "algorithm": "ga"}, "--algorithm ga searches one factor per layer"),
        ({"curve": "shared", "granularity": "layer_band", "bands": 2}, "remove --granularity"),
        ({"curve": "shared", "control_points": 3}, "one control point per dimension, 4"),
        ({"move_x": True}, "--move-x: --curve free has no x to move"),
        ({"initial_factor": 3.0}, "--initial-factor 3.0 must lie from --min-factor 0.5"),
        ({"num_pairs": (3, 3)}, "--num-pairs 3 3: a length is repeated"),
        ({"text": Path("missing.txt"), "text_weight": 1.0}, "--text missing.txt"),
    ],
)
def test_mistakes_are_one_line(guesser, tokenizer, tmp_path, changes, message):
    with pytest.raises(UserError) as error:
        run(SearchSettings.of(**SMALL | changes, output_path=tmp_path / "run"), guesser, tokenizer)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run/history.jsonl").exists() or not (tmp_path / "run/history.jsonl").read_text()
