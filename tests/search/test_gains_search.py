"""Searches of gains, of factors and gains together, of multipliers that may be 0: their records, and the descent itself."""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formula import held_out_by_formula
from selection import mostly_long

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.rope import RopeTable
from lpes_jax.search.__main__ import main
from lpes_jax.search.algorithms import box_parameters, factors_applied
from lpes_jax.search.checks import check
from lpes_jax.search.genetic import PaperGA, is_valid
from lpes_jax.search.gradient import answer_loss, descend
from lpes_jax.search.lattice import Lattice
from lpes_jax.search.minibatches import Data, pack
from lpes_jax.search.settings import lattice_of, search_space
from lpes_jax.search.space import Numbers
from lpes_jax.settings.search import GradientSettings, SearchSettings, SpaceSettings, TextSettings
from lpes_jax.tasks.prompts import EncodedPrompt

sys.path.append(str(Path(__file__).parents[2] / "experiments"))

pytestmark = pytest.mark.promotes
SMALL = "--num-pairs 3 --key-length 1 --limit 4 --test-limit 2 --uniform-candidates 2 --min-gain 0.2 --max-gain 4".split()
ALGORITHMS = {
    "ga": "--curve bezier --control-points 3 --generations 2 --population-size 5 --parents 3 --mutations 3 --crossovers 1",
    "cma_es": "--algorithm cma_es --curve linear --control-points 2 --population-size 4 --generations 2 --max-evaluations 9",
    "gradient": "--algorithm gradient --curve free --granularity layer_band --bands 0 --steps 4 --look-every 2 "
    "--minibatch-size 3",
}


@pytest.fixture
def held_out() -> Iterator[None]:
    with held_out_by_formula():
        yield


def history_of(folder: Path) -> list[dict]:
    lines = (folder / "history.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "seconds"} for line in lines]


def prompts_of(seed: int, count: int = 6) -> list[EncodedPrompt]:
    rng = np.random.default_rng(seed)
    return [
        EncodedPrompt(rng.integers(1, 250, 20 + 3 * index).tolist(), [rng.integers(1, 250, 2).tolist()])
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("algorithm", "learns"),
    [
        ("gradient", ("both",)),
        *(pytest.param(algorithm, ("gains", "both"), marks=pytest.mark.long) for algorithm in ("ga", "cma_es", "gradient")),
    ],
)
@pytest.mark.usefixtures("held_out")
def test_searches_of_gains_and_of_both(model_folder, tmp_path, algorithm, learns, capsys):
    command = ["--model", str(model_folder), *SMALL, *ALGORITHMS[algorithm].split()]
    for learn in learns:
        run = tmp_path / learn
        assert main([*command, "--learn", learn, "--output-path", str(run)]) == 0, capsys.readouterr().err
        history, found = history_of(run), LayerFactors.load(run / "factors.json")
        gains = np.array([line["gains"] for line in history])
        assert (gains[0] == 1).all() and (gains >= 0.2).all() and (gains <= 4).all() and (gains[1:] != 1).any()
        factors = np.array([line["factors"] for line in history])
        assert factors.shape == (gains.shape if learn == "both" else (len(history), 3))
        assert (factors != 1).any() == (learn == "both")
        best = max(history, key=lambda line: -np.inf if line["fitness"] is None else line["fitness"])
        np.testing.assert_array_equal(found.gains, best["gains"])
        np.testing.assert_array_equal(found.factors, best["factors"])
        assert found.gains_granularity == ("layer_band" if algorithm == "gradient" else "layer")
        if algorithm == "gradient":
            assert history[0]["control_points"] is None
        else:
            points = np.array([line["control_points"] for line in history])
            assert points.shape[2] == (3 if learn == "both" else 2)
            np.testing.assert_allclose(gains[:, [0, -1]], points[:, [0, -1], -1], atol=1e-6)  # a curve's ends are its points
            assert found.curve is not None and found.curve["learn"] == learn
        pictures = {"gains.png", "factors.png"} if learn == "both" else {"gains.png"}
        assert {path.name for path in run.glob("*s.png")} - {"positions.png"} == pictures
    if len(learns) > 1:  # what was cut off goes on to the same end
        cut = tmp_path / "cut"
        shutil.copytree(run, cut)
        (cut / "results.json").unlink()
        lines = (cut / "history.jsonl").read_text().splitlines(keepends=True)
        (cut / "history.jsonl").write_text("".join(lines[: len(lines) - 1]))
        assert main([*command, "--learn", learns[-1], "--output-path", str(cut), "--resume"]) == 0, capsys.readouterr().err
        assert history_of(cut) == history
    # Another search starts from it.
    further = [
        *command,
        "--learn",
        "both",
        "--initial-factors",
        str(run / "factors.json"),
        "--output-path",
        str(tmp_path / "on"),
    ]
    if algorithm == "gradient":
        assert main(further) == 0, capsys.readouterr().err
        first = history_of(tmp_path / "on")[0]
        np.testing.assert_allclose(first["gains"], found.gains, atol=1e-6)
        np.testing.assert_allclose(first["factors"], found.factors, atol=1e-6)
        capsys.readouterr()
        assert main([*further[:-1], str(tmp_path / "no"), "--learn", "factors"]) == 2
        assert "has gains, which --learn factors would ignore; use --learn both" in capsys.readouterr().err
        assert not (tmp_path / "no").exists()


@pytest.mark.usefixtures("held_out")
def test_a_frequency_may_stand_still(model_folder, tmp_path, capsys):
    """Multipliers whose box ends in 0, one row for all layers: some reach it, and the file has them."""
    command = ["--model", str(model_folder), *SMALL, "--algorithm", "gradient", "--curve", "shared", "--learn", "both"]
    command += "--parameter multiplier --min-factor 0 --initial-factor 0 --steps 2 --look-every 1 --minibatch-size 3".split()
    assert main([*command, "--output-path", str(tmp_path / "run")]) == 0, capsys.readouterr().err
    history, found = history_of(tmp_path / "run"), LayerFactors.load(tmp_path / "run" / "factors.json")
    assert history[0]["factors"] == [[None] * 4] * 3  # at the start all do
    assert any(isinstance(factor, float) for line in history[1:] for factor in line["factors"][0])  # a gradient arrives there
    assert all(line["factors"] == [line["factors"][0]] * 3 and line["gains"] == [line["gains"][0]] * 3 for line in history)
    assert found.granularity == found.gains_granularity == "layer_band" and np.isinf(found.factors).any()
    assert main([*command, "--output-path", str(tmp_path / "run"), "--resume"]) == 0


@pytest.mark.long
@pytest.mark.parametrize("curve", ["free", "shared"])
def test_pruning_leaves_few_numbers_and_fits_them_on(model_folder, tmp_path, curve, capsys):
    command = ["--model", str(model_folder), *SMALL, "--algorithm", "gradient", "--learn", "both", "--prune", "0.1"]
    command += [
        "--curve",
        curve,
        *"--steps 12 --look-every 3 --minibatch-size 9".split(),
        "--output-path",
        str(tmp_path / "run"),
    ]
    assert main(command) == 0, capsys.readouterr().err
    history, found = history_of(tmp_path / "run"), LayerFactors.load(tmp_path / "run" / "factors.json")
    assert [line["step"] for line in history] == [0, 3, 6, 9, 12]
    assert history[1]["fitness"] is None and None not in [line["fitness"] for line in history[2:]]  # the numbers yet to go
    numbers = np.array([[line["factors"], line["gains"]] for line in history])
    stay = numbers[2] != 1
    assert (
        0 < stay.sum() < stay.size and (numbers[3:][:, ~stay] == 1).all() and (numbers[3:][:, stay] != numbers[2][stay]).any()
    )
    search = found.search
    rows = 3 if curve == "shared" else 1
    assert search["numbers"] == (8 if curve == "shared" else 6)
    assert search["numbers_not_1"] * rows == (found.factors != 1).sum() + (found.gains != 1).sum()
    lines = (tmp_path / "run" / "history.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "history.jsonl").write_text("".join(lines[:-1]))
    assert main([*command, "--resume"]) == 0, capsys.readouterr().err
    assert history_of(tmp_path / "run") == history


def test_one_table_of_factors_or_of_multipliers(tiny_config):
    own, rng = tiny_config.rope_table(9), np.random.default_rng(0)
    for parameter in ("factor", "multiplier", "log"):
        settings = SearchSettings.of(curve="free", granularity="layer_band", bands=0, learn="both", parameter=parameter)
        space = search_space(settings, tiny_config, range(1, 3))
        y, g = rng.uniform(0.5, 2, (2, 2, 4)).astype(np.float32)
        numbers = Numbers(space.x, y, g)
        table = space.table(own, numbers)
        factors, gains = space.individual(numbers)
        wanted = own.scaled(factors, "layer_band").with_gains(gains, "layer_band")
        np.testing.assert_allclose(table.inv_freq, wanted.inv_freq, rtol=3e-7)
        np.testing.assert_array_equal(table.gains, wanted.gains)
        np.testing.assert_allclose(factors[1:], 1 / y if parameter == "multiplier" else y, rtol=1e-6)
        assert (factors[0] == 1).all() and (gains[0] == 1).all() and (gains[1:] == g).all()


@pytest.mark.parametrize(
    ("parameter", "box"),
    mostly_long(
        [("factor", "clip"), ("multiplier", "clip"), ("log", "clip"), ("factor", "sigmoid")],
        *[("multiplier", "clip"), ("factor", "sigmoid")],
        names=2,
    ),
)
def test_gradients_of_both_are_those_of_finite_differences(tiny_model, tiny_config, parameter, box):
    lowest = 0.0 if parameter == "multiplier" else 0.5
    settings = SearchSettings.of(
        algorithm="gradient", curve="free", learn="both", parameter=parameter, box=box, min_factor=lowest
    )
    check(settings)
    space = search_space(settings, tiny_config, range(3))
    with jax.enable_x64(True):
        model = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), tiny_model)
        parameters, _, values = box_parameters(settings.gradient, space)
        rng = np.random.default_rng(0)
        parameters = {name: np.asarray(value) + 0.2 * rng.uniform(-1, 1, value.shape) for name, value in parameters.items()}
        if parameter == "multiplier":
            parameters["y"][1] = 0  # stands still, and is told where to go
        single = tiny_config.rope_table(64)
        own = RopeTable(single.inv_freq.astype(jnp.float64), single.attention_scaling.astype(jnp.float64))
        apply = factors_applied(space, values, own)
        examples = pack(prompts_of(1, 2), [0.2, 0.8])
        examples = replace(examples, weights=examples.weights.astype(jnp.float64))

        @jax.jit
        def loss(parameters):
            return answer_loss(*(tuned := apply(model, parameters))[:1], examples, tuned[1])

        gradient = jax.device_get(jax.jit(jax.grad(loss))(parameters))
        assert gradient.keys() == {"y", "g"}
        largest = max(np.abs(leaf).max() for leaf in gradient.values())
        for name in gradient:
            for index in range(3):

                def shifted(by: float, name: str = name, index: int = index) -> float:
                    moved = parameters[name].copy()
                    moved[index] += by * 1e-6
                    return float(loss(parameters | {name: moved}))

                numeric = (8 * (shifted(1) - shifted(-1)) - (shifted(2) - shifted(-2))) / 12e-6
                assert float(gradient[name][index]) == pytest.approx(numeric, rel=1e-5, abs=1e-6 * largest) and numeric != 0


@pytest.mark.long
def test_a_descent_in_gains_is_that_of_temperatures_in_the_weights(tiny_model, tiny_config):
    from control_parameters import temperature

    settings = SearchSettings.of(
        algorithm="gradient", curve="free", granularity="layer_band", bands=0, learn="gains", max_gain=4.0
    )
    space = search_space(settings, tiny_config, range(3))
    parameters, project, values = box_parameters(settings.gradient, space)
    own = tiny_config.rope_table(64)
    train, held_back = (Data([pack(prompts_of(seed), [1.0] * 6)]) for seed in (2, 3))
    steps = GradientSettings(steps=4, look_every=2, minibatch_size=6, learning_rate=0.01)
    looks: dict[str, list] = {"gains": [], "temperatures": []}
    for name, start, apply, into_box in (
        ("gains", parameters, factors_applied(space, values, own), project),
        ("temperatures", {"g": jnp.ones((3, 4))}, lambda m, p: temperature(m, own, p["g"]),
         lambda p: {"g": jnp.clip(p["g"], 0.2, 4.0)}),
    ):  # fmt: skip
        descend(tiny_model, train, held_back, start, apply, steps, TextSettings(), project=into_box, seed=0,
                on_look=lambda measured, _, seen=looks[name]: seen.append(measured))  # fmt: skip
    for one, other in zip(*looks.values(), strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4) and one.accuracies == other.accuracies
        np.testing.assert_allclose(one.parameters["g"], other.parameters["g"], atol=2e-4)
    assert abs(looks["gains"][-1].loss - looks["gains"][0].loss) > 0.1


def test_logarithms_start_where_factors_do_and_take_steps_of_one_size(tiny_config):
    settings = SearchSettings.of(algorithm="gradient", curve="free", learn="both", parameter="log", max_factor=3.0)
    space = search_space(settings, tiny_config, range(3))
    parameters, project, values = box_parameters(settings.gradient, space)
    start = values(parameters)
    assert (start.y == 1).all() and (start.g == 1).all()
    far = values(project({name: value + 9 for name, value in parameters.items()}))
    np.testing.assert_allclose([far.y, far.g], [[3.0] * 3, [4.0] * 3], rtol=1e-6)
    near = values(project({name: value - 9 for name, value in parameters.items()}))
    np.testing.assert_allclose([near.y, near.g], [[0.5] * 3, [0.2] * 3], rtol=1e-6)


def test_the_genetic_algorithm_moves_factors_and_gains_over_one_x(tiny_config):
    config = replace(tiny_config, num_layers=8)
    settings = SearchSettings.of(learn="both", control_points=3, population_size=64, min_factor=0.5, max_gain=2.0)
    ga = PaperGA(lattice_of(settings, search_space(settings, config, range(8))), settings.ga)
    params = ga.default_params
    genes, lineage = ga.initial_population(jax.random.key(0), params)
    points = ga.recorded_points(genes)
    assert genes.shape == (64, 3, 3) and points[0].tolist() == [[0, 1, 1], [4, 1, 1], [7, 1, 1]]
    state = ga.init(jax.random.key(1), genes, jnp.asarray(points[:, :, 2].sum(axis=1)), params)
    for step in range(6):
        genes, state = ga.ask(jax.random.key(2 + step), state, params)
        points = ga.recorded_points(genes.reshape(-1, 3, 3))
        assert np.asarray(is_valid(genes.reshape(-1, 3, 3))).all()
        assert (points[..., 1] >= 0.5).all() and (points[..., 1] <= 2).all()
        assert (points[..., 2] >= 0.2).all() and (points[..., 2] <= 2).all()
        np.testing.assert_allclose(points[..., 1:] * 20, np.round(points[..., 1:] * 20), atol=1e-9)  # lattices of 0.05
        state, _ = ga.tell(jax.random.key(20 + step), genes, jnp.asarray(points[:, :, 2].sum(axis=1)), state, params)
    assert points[:, :, 2].mean() < 0.75  # what it was told to lower
    box = {"min_factor": 0.5, "max_factor": 1.0, "initial_factor": 1.0, "min_gain": 0.5, "max_gain": 1.5}
    sizes = Lattice(8, 3, SpaceSettings(learn="both", y_step=0.5, **box)).search_space()
    assert sizes == {"paper": (8 * 2 * 3) ** 3, "valid": 56 * 6**3, "brute_force": 6**8}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"min_gain": -0.1, "learn": "gains"}, "--min-gain must be at least 0, got -0.1"),
        ({"initial_gain": 5.0, "learn": "both"}, "--initial-gain 5.0 must lie from --min-gain 0.2 .* to --max-gain 4.0"),
        ({"min_gain": 0.0, "learn": "both", "parameter": "log", "algorithm": "gradient"}, r"--min-gain 0.0 \(above 0\)"),
        ({"min_factor": 0.0}, "--min-factor must be above 0, got 0.0"),
        ({"prune": 1.5, "algorithm": "gradient"}, "--prune must be at most 1 .* got 1.5"),
        ({"prune": 0.5}, "--prune needs --algorithm gradient, --box clip and --curve free or shared"),
        ({"prune": 0.5, "algorithm": "gradient", "curve": "free", "steps": 1}, "--prune needs --steps of at least 2"),
        ({"parameter": "log"}, "--parameter log needs --algorithm gradient; --algorithm ga takes factor or multiplier"),
        ({"parameter": "log", "algorithm": "gradient", "box": "sigmoid"}, "--parameter log and --box sigmoid are two scales"),
        ({"learn": "gains", "min_gain": 0.21, "control_points": 3}, "--max-gain 4.0 is not on the lattice 0.21"),
        (
            {"learn": "gains", "granularity": "layer_band", "bands": 2, "curve": "free"},
            "ga searches one gain per layer, not --granularity layer_band",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused(tiny_config, changes, words):
    with pytest.raises(UserError, match=words) as refusal:
        settings = SearchSettings.of(**changes)
        check(settings)
        lattice_of(settings, search_space(settings, tiny_config, range(3)))
    assert "\n" not in str(refusal.value)


def test_a_search_starts_from_gains_and_multipliers_that_were_found(tiny_config):
    def space(**changes):
        settings = SearchSettings.of(**{"algorithm": "gradient", "curve": "free", "learn": "both"} | changes)
        return search_space(settings, tiny_config, range(3))

    found = LayerFactors(np.array([1.0, 2.0, np.inf]), gains=np.array([0.5, 1.0, 3.0]))
    started = space(parameter="multiplier", min_factor=0.0).starting_from(found, "f.json")
    np.testing.assert_array_equal(started.y, [1, 0.5, 0])
    np.testing.assert_array_equal(started.g, [0.5, 1, 3])
    wide = space(granularity="layer_band", bands=2, learn="gains")
    np.testing.assert_array_equal(
        wide.starting_from(replace(found, factors=np.ones(3)), "f.json").g, [[0.5] * 2, [1] * 2, [3] * 2]
    )
    plain = space().starting_from(LayerFactors(np.array([1.0, 1.5, 2.0])), "f.json")
    assert plain.y.tolist() == [1, 1.5, 2] and plain.g is not None and plain.g.tolist() == [1, 1, 1]
    low = space(max_gain=2.0, parameter="multiplier", min_factor=0.0)
    for words, where, file in (
        ("f.json: has gains, which --learn factors would ignore", space(learn="factors"), found),
        ("f.json: has factors other than 1, which --learn gains would ignore", space(learn="gains"), found),
        ("f.json: layer 2 has the factor inf, which is not finite", space(), found),
        ("f.json: .* has the gain .* above --max-gain 2; widen --max-gain", low, found),
        ("f.json: 2 layers of factors, but the model has 3", space(), LayerFactors(np.ones(2), gains=np.ones(2))),
        ("does not contain 3 control points of a bezier", space(curve="bezier", control_points=3), found),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            where.starting_from(file, "f.json")
