"""Factors that a search starts from: those that break its rules are refused by value, bound and flag, and nothing is moved."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama import LlamaConfig
from lpes_jax.rope import RopeParameters
from lpes_jax.search.algorithms import make_algorithm
from lpes_jax.search.settings import lattice_of, scaled_layers, search_space
from lpes_jax.search.space import Space
from lpes_jax.settings.search import SearchSettings

pytestmark = pytest.mark.promotes
SIZES = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 96, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8}
CONFIG = LlamaConfig(**SIZES, num_layers=6, rms_norm_eps=1e-5, max_position_embeddings=512, rope=RopeParameters(10_000.0))
POINTS = [[0, 1.0], [1.5, 1.2], [3, 0.8], [5, 1.9]]


def found(path: Path, points: Any = None, factors: Any = None, **curve: Any) -> Path:
    """A factors.json with these control points, which a search need not be able to write."""
    record = {"format": "lpes-factors/1", "factors": [1.1] * 6 if factors is None else factors}
    if points is not None:
        record["curve"] = {"type": "bezier", "control_points": points, "layers": [0, 5]} | curve
    if factors is not None and np.ndim(factors) == 2:
        record["granularity"] = "layer_band"
    path.write_text(json.dumps(record))  # with NaN where there is one, as Python writes it
    return path


def space(path: Path, **changes: Any) -> Space:
    s = SearchSettings.of(**{"initial_factors": path} | changes)
    return search_space(s, CONFIG, scaled_layers(s, CONFIG.num_layers))


def refused(path: Path, message: str, **changes: Any) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        space(path, **changes)
    assert str(refusal.value).startswith((f"--initial-factors {path}: ", f"{path}: ")) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "points, message",
    [
        ([[0, 1], [1, math.nan], [3, 1], [5, 1]], "control_points of the curve must be lists of finite numbers"),
        ([[0, 1], [1, 1], [3, 1], [5, -math.inf]], "control_points of the curve must be lists of finite numbers"),
        ([[0, 1], [1, 1], [3, 9.5], [5, 1]], "control point 2 has the factor 9.5, above --max-factor 2; widen --max-factor"),
        ([[0, 0.01], [1, 1], [3, 9.5], [5, 1]], "control point 0 has the factor 0.01, below --min-factor 0.5; widen --min-f"),
        ([[0, 2.00001], [1, 1], [3, 1], [5, 1]], "control point 0 has the factor 2.00001, above --max-factor 2"),
        ([[0, 1], [0, 1], [3, 1], [5, 1]], r"the control points 0 and 1 have x 0 and 0; x must increase \(Eq. 10\)"),
        ([[0, 1], [3, 1], [2, 1], [5, 1]], "the control points 1 and 2 have x 3 and 2; x must increase"),
        ([[-5, 1], [1, 1], [3, 1], [5, 1]], "control point 0 has x -5; x must be from 0 to 5, the last layer"),
        ([[0, 1], [1, 1], [3, 1], [30, 1]], "control point 3 has x 30; x must be from 0 to 5"),
        ([[0, 1], [1, 1], [math.nan, 1], [5, 1]], "control_points of the curve must be lists of finite numbers"),
        ([[0, 1], [1, 1], ["a", 1], [5, 1]], "control_points of the curve must be lists of finite numbers"),
        ([[0, 1], [1, 1], [3], [5, 1]], "control_points of the curve must be lists of finite numbers"),
        ([[0, 1], [1, 1], None, [5, 1]], "control_points of the curve must be lists of finite numbers"),
        ([[0, 1], [5, 1]], "does not contain 4 control points"),
        ([0, 1, 3, 5], "does not contain 4 control points"),
        ("abcd", "control_points of the curve must be lists of finite numbers"),
        ({"x": 1}, "control_points of the curve must be lists of finite numbers"),
    ],
)
def test_control_points_against_the_rules(tmp_path, points, message):
    refused(found(tmp_path / "f.json", points), message)


def test_control_points_of_other_layers(tmp_path):
    path = found(tmp_path / "f.json", [[0, 1], [1, 1], [2, 1], [3, 1]], layers=[2, 5])
    refused(
        path, r"its curve spans the layers \[2, 5\] \(first and last\), and this search spans \[0, 5\]; use the same --layers"
    )
    assert space(path, layers="2:").x.tolist() == [0, 1, 2, 3]
    refused(found(tmp_path / "g.json", POINTS), "spans the layers .0, 5.*spans .2, 5.", layers="2:")
    old = found(tmp_path / "old.json", POINTS)  # the first release wrote no layers
    record = json.loads(old.read_text())
    del record["curve"]["layers"]
    old.write_text(json.dumps(record))
    assert space(old).x.tolist() == [x for x, _ in POINTS]
    refused(old, "control point 3 has x 5; x must be from 0 to 3", layers="2:")


def test_free_factors_outside_the_box(tmp_path):
    path = found(tmp_path / "f.json", factors=[9, 9, 9, 1, 1, 0.01])
    refused(path, "layer 0 has the factor 9, above --max-factor 2; widen --max-factor", curve="free")
    refused(path, "layer 5 has the factor 0.01, below --min-factor 0.5; widen --min-factor", curve="free", max_factor=9.0)
    wide = space(path, curve="free", min_factor=0.01, max_factor=9.0)
    assert wide.y.tolist() == [9, 9, 9, 1, 1, 0.01]
    bands = found(tmp_path / "b.json", factors=[[1, 1]] * 3 + [[1, 2.5]] + [[1, 1]] * 2)
    refused(bands, "layer 3 has the factor 2.5, above --max-factor 2", curve="free", granularity="layer_band", bands=2)


def test_layers_that_are_left_out_have_factor_1(tmp_path):
    path = found(tmp_path / "f.json", factors=[1, 1.25, 1.5, 1, 1, 1])
    refused(
        path, "layer 1 has factor 1.25, and --layers does not include that layer; widen --layers", curve="free", layers="2:"
    )
    assert space(path, curve="free", layers="1:").y.tolist() == [1.25, 1.5, 1, 1, 1]
    assert space(path, curve="free", layers="1:3").y.tolist() == [1.25, 1.5]


def test_what_fits_is_where_the_search_starts(tmp_path):
    path = found(tmp_path / "f.json", POINTS)
    start = space(path)
    assert np.stack([start.x, start.y], axis=1).tolist() == POINTS
    low, high = (float(np.float32(bound)) for bound in (0.7, 1.1))  # as a search in float32 leaves the bounds
    assert low < 0.7 and high > 1.1
    path = found(tmp_path / "g.json", [[0, low], [1, low], [3, high], [5, high]])
    assert space(path, min_factor=0.7, max_factor=1.1).y.tolist() == [0.7, 0.7, 1.1, 1.1]


def test_a_lattice_may_not_join_control_points(tmp_path):
    path = found(tmp_path / "f.json", [[0, 1], [0.4, 1], [3, 1], [5, 1]])
    s = SearchSettings.of(initial_factors=path)
    with pytest.raises(
        UserError, match=f"--initial-factors {path}: the x 0 and 0.4 are the same on the lattice of --x-step 1; "
    ):
        lattice_of(s, space(path))
    s = SearchSettings.of(initial_factors=path, x_step=0.0)
    assert lattice_of(s, space(path, x_step=0.0)).initial_genes[:, 0] == pytest.approx([0, 0.4, 3, 5])


def test_a_gradient_moves_x_only_from_where_it_may_stand(tmp_path):
    for points, fits in (
        (POINTS, True),
        ([[1, 1], [2, 1], [3, 1], [5, 1]], False),
        ([[0, 1], [0.01, 1], [3, 1], [5, 1]], False),
    ):
        s = SearchSettings.of(initial_factors=found(tmp_path / "f.json", points), algorithm="gradient", move_x=True)
        start = space(s.start.initial_factors)
        if fits:
            make_algorithm(s, start)
        else:
            with pytest.raises(
                UserError, match="--move-x keeps control points from the first scaled layer to the last, 0.05 apart"
            ):
                make_algorithm(s, start)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.floats(-1, 6), st.floats(0.3, 2.2)), min_size=4, max_size=4))
def test_a_start_is_taken_as_it_is_or_refused(tmp_path_factory, points):
    path = found(tmp_path_factory.getbasetemp() / "any.json", points)
    x, y = np.array(points).T
    near = np.abs(np.concatenate([x, x - 5, y - 0.5, y - 2])) < 1e-5
    near[:8] &= np.concatenate([x, x - 5]) != 0
    good = (np.diff(x) > 0).all() and 0 <= x[0] and x[-1] <= 5 and 0.5 <= y.min() and y.max() <= 2
    if good:
        start = space(path)
        assert start.x.tolist() == x.tolist() and start.y.tolist() == y.tolist()
    elif not near.any():
        refused(path, "has x|have x|has the factor")


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=3),
        lambda values: st.lists(values, max_size=4),
        max_leaves=12,
    )
)
def test_no_control_points_end_in_a_traceback(tmp_path_factory, points):
    path = found(tmp_path_factory.getbasetemp() / "junk.json", points)
    try:
        start = space(path)
    except UserError:
        return
    assert np.isfinite(start.x).all() and np.isfinite(start.y).all()


def test_the_searches_of_the_repository_may_go_on_from_what_they_found():
    results = Path(__file__).parents[2] / "experiments" / "results"
    for name in ("smollm2_search/default", "smollm2_search/paper", "gradient/smollm2_seed0"):
        path = results / name / "factors.json"
        record = LayerFactors.load(path)
        layers, curve = record.num_layers, record.curve or {}
        config = LlamaConfig(**SIZES, num_layers=layers, rms_norm_eps=1e-5, max_position_embeddings=9, rope=CONFIG.rope)
        same = {name: record.search[name] for name in ("min_factor", "max_factor", "initial_factor", "y_step")}
        s = SearchSettings.of(initial_factors=path, curve=curve["type"], **same)
        start = search_space(s, config, scaled_layers(s, layers))
        if s.space.curve == "free":
            np.testing.assert_array_equal(start.y, record.factors)
        else:
            assert np.stack([start.x, start.y], axis=1).tolist() == curve["control_points"]
