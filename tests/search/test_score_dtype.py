"""Searches with `--score-dtype`: the history says so, and the held-out figures are those of the model itself."""

import json

import jax
import numpy as np
import pytest
from formula import held_out_by_formula

from lpes_jax.errors import UserError
from lpes_jax.evaluation import evaluate
from lpes_jax.models.llama.model import with_eight_bits
from lpes_jax.scoring import Scorer
from lpes_jax.search import loop, run_search
from lpes_jax.search.checks import check
from lpes_jax.settings.search import preset
from lpes_jax.tasks.flags import task_of
from lpes_jax.tasks.prompts import encode, slot

pytestmark = pytest.mark.promotes
TINY = {
    **{"num_pairs": 3, "key_length": 1, "limit": 3, "test_limit": 2, "uniform_candidates": 2, "control_points": 3},
    **{"population_size": 4, "parents": 2, "mutations": 2, "crossovers": 1, "generations": 1, "fitness": "log_likelihood"},
    **{"search_positions": (0, 100), "weights": (0.5, 0.5), "positions": (0, 100), "dtype": "float32"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_folder):
    """A search in 8 bits: its settings, its lines, and the dtypes of the weights that the held-out report was measured with."""
    folder, measured = tmp_path_factory.mktemp("runs") / "int8", []
    settings = preset("default", **TINY, model=str(model_folder), output_path=folder, score_dtype="int8")

    def recorded(model, *arguments, **options):
        measured.append({str(leaf.dtype) for leaf in jax.tree.leaves(model)})
        with held_out_by_formula():
            return evaluate(model, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "evaluate", recorded)
        run_search(settings)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return settings, lines, measured


def test_each_line_says_what_scored_it_and_has_the_scores_of_the_8_bit_model(run, tiny_model, tokenizer):
    settings, lines, _ = run
    assert {line["score_dtype"] for line in lines} == {"int8"}
    task = task_of(settings.task)
    prompts = [
        task.prompt(example, slot(position, task.num_items), position)
        for example in task.examples("search", 3, 0)
        for position in (0, 100)
    ]
    encoded = encode(prompts, tokenizer, tiny_model.config.max_position_embeddings)
    factors = np.array([line["factors"] for line in lines], np.float32)
    ours, full = (
        Scorer(model, encoded)(factors).log_likelihood.mean(axis=1)
        for model in (with_eight_bits(tiny_model, "int8"), tiny_model)
    )
    np.testing.assert_allclose([line["fitness"] for line in lines], ours, rtol=0, atol=2e-4)
    assert np.abs(ours - full).max() > 0.05


def test_held_out_figures_are_those_of_the_model_itself(run):
    settings, _, measured = run
    assert measured == [{"float32"}]
    folder = settings.run.output_path
    assert "scored with int8 products" in (folder / "results.md").read_text()
    factors = json.loads((folder / "factors.json").read_text())
    assert factors["search"]["score_dtype"] == "int8" and factors["model"]["dtype"] == "float32"


def test_another_score_dtype_does_not_resume(run):
    settings, _, _ = run
    with pytest.raises(UserError, match=r"was run with --score-dtype 'int8' \(now None\); use the same settings or another"):
        run_search(settings.replace(resume=True, score_dtype=None))


def test_what_it_does_not_go_with_is_refused(run):
    settings, _, _ = run
    with pytest.raises(UserError, match="--score-dtype int8 scores individuals, and --algorithm gradient has none; remove it"):
        check(settings.replace(algorithm="gradient"))
    with pytest.raises(UserError, match="--score-dtype fp8: the CPU has no fp8 products"):
        run_search(settings.replace(score_dtype="fp8", overwrite=True))
    assert (settings.run.output_path / "results.json").exists()  # refused before anything is dropped
