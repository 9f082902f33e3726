"""The contents of a result: differences from the baseline, computed by hand, and its origin."""

import hashlib
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lpes_jax.errors import UserError
from lpes_jax.evaluation import BASELINE, SINGLE, Candidate, Outcome, evaluate, slots_of
from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama import Llama
from lpes_jax.report.tables import differences
from lpes_jax.results import results_record
from lpes_jax.store.content import content_sha256
from lpes_jax.store.provenance import environment
from lpes_jax.tasks.key_value import KeyValue

TASK = KeyValue(num_pairs=3, key_length=1)
PLACES = slots_of(TASK, (0, 100))


def outcome(name: str, verdicts: list[list[int]]) -> Outcome:
    """Of questions at two positions."""
    examples = TASK.examples("test", len(verdicts), 0)
    prompts = [TASK.prompt(example, *task_slot) for example in examples for task_slot in PLACES]
    counts = {"questions_skipped": 0}
    return Outcome(Candidate(name), prompts, {"prefix": np.array(verdicts, float)}, None, 0, [9] * len(prompts), counts)


def test_differences_by_hand(tmp_path):
    # At position 0 six of eight questions are won and none lost; at 100 one is won and one lost.
    wrong = [[0, 0]] * 7 + [[0, 1]]
    better = [[1, 0]] * 5 + [[1, 1], [0, 0], [0, 0]]
    outcomes = [outcome(BASELINE, wrong), outcome("same", wrong), outcome("better", better)]
    (tmp_path / "data.jsonl").write_text("{}")
    record = results_record(TASK, outcomes, PLACES, {"data": str(tmp_path / "data.jsonl")}, 0.0)
    assert record["data_sha256"] == hashlib.sha256(b"{}").hexdigest()
    assert "against_baseline" not in record["methods"][BASELINE]
    against, same = (record["methods"][name]["against_baseline"] for name in ("better", "same"))
    assert against["by_position"]["0"]["difference"] == 0.75 and against["by_position"]["100"]["difference"] == 0
    assert against["by_position"]["0"]["p_mcnemar"] == 2 / 2**6 and against["by_position"]["100"]["p_mcnemar"] == 1
    assert against["difference"] == 0.375 and against["interval"][0] < 0.375 < against["interval"][1]
    assert against["by_position"]["0"]["interval"][0] > 0.25 and against["by_position"]["0"]["interval"][1] == 1
    assert against["p_holm"] == pytest.approx(2 * against["p"]) and same["p_holm"] == 1 and same["interval"] == [0, 0]
    low, high = record["methods"]["better"]["acc_interval_by_position"]["0"]  # Wilson's of 6 in 8
    assert (low, high) == pytest.approx((0.40927, 0.92852), abs=1e-4)

    table = differences(record["methods"])
    assert "| points against baseline | 0 % | 100 % | mean | p | p (Holm) |" in table
    assert (
        "| better | +75.0 [+" in table and "], p 0.031 | +0.0 [" in table and "| same | +0.0 [+0.0, +0.0], p 1.000 |" in table
    )
    assert "correction covers all 2 comparisons" in table and "McNemar" in table
    assert differences({BASELINE: record["methods"][BASELINE]}) == ""
    # Scores between 0 and 1 are no verdicts: McNemar's test has nothing to say.
    half = [replace(measured, scores={"prefix": measured.main / 2}) for measured in outcomes]
    figures = results_record(TASK, half, PLACES, {}, 0.0)["methods"]["better"]
    assert figures["against_baseline"]["by_position"]["0"]["p_mcnemar"] is None
    assert figures["against_baseline"]["difference"] == 0.1875


def test_prompts_have_a_hash_that_no_path_or_verdict_moves():
    first = results_record(TASK, [outcome(BASELINE, [[0, 0]])], PLACES, {}, 0.0)
    again = results_record(TASK, [outcome(BASELINE, [[1, 0]])], PLACES, {}, 1.0)
    more = results_record(TASK, [outcome(BASELINE, [[0, 0], [0, 0]])], PLACES, {}, 0.0)
    assert first["prompts_sha256"] == again["prompts_sha256"] != more["prompts_sha256"] and first["data_sha256"] is None


def test_a_folder_has_a_hash_of_names_and_contents(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("1")
    before = content_sha256(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert content_sha256(tmp_path) != before
    with pytest.raises(UserError, match="--data .*nowhere: cannot be read"):
        content_sha256(tmp_path / "nowhere", "--data ")


def test_the_environment_is_this_one(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--some=flag")
    record = environment()
    assert record["versions"]["jax"] == jax.__version__ and record["xla_flags"] == "--some=flag"
    assert record["devices"]["platform"] == "cpu" and record["deterministic"] is True  # a CPU is, whatever its flags
    root = Path(__file__).parent.parent
    if (root / ".git").exists():
        head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        assert record["git_commit"].removesuffix("-dirty") == head


def test_verdicts_are_looked_at_alone_in_16_bits_only(tiny_model: Llama, model_folder: Path):
    from lpes_jax.models.llama import load

    tokenizer, examples = load(str(model_folder), "float32").tokenizer, TASK.examples("test", 2, 0)
    for dtype, counted in ((jnp.float32, False), (jnp.bfloat16, True)):
        model = jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), tiny_model)
        [baseline] = evaluate(model, tokenizer, TASK, examples, PLACES, [Candidate(BASELINE)])
        assert ("verdicts_changed_alone" in baseline.counts) == counted
        assert 0 <= baseline.counts.get("verdicts_changed_alone", 0) <= min(SINGLE, 4)


def test_what_was_measured_is_not_measured_again(tiny_model: Llama, model_folder: Path):
    from lpes_jax.models.llama import load

    tokenizer, examples = load(str(model_folder), "float32").tokenizer, TASK.examples("test", 2, 0)
    ones, other = (LayerFactors.uniform(factor, 3) for factor in (1.0, 1.2))
    candidates = [Candidate(BASELINE), Candidate("ones", ones), Candidate("other", other)]
    measured, done = {}, []
    run = partial(evaluate, tiny_model, tokenizer, TASK, on_prompts=done.append, measured=measured)
    first = run(examples, PLACES, candidates)
    assert len(measured) == 2 and sum(done) == 3 * len(first[0].prompts)  # the model as it is has factors of 1
    assert [found.candidate.name for found in first] == ["baseline", "ones", "other"] and first[1].main is first[0].main
    assert not np.array_equal(first[2].log_likelihood, first[0].log_likelihood)
    [again] = run(examples, PLACES, [Candidate("lpes", other)])
    assert len(measured) == 2 and again.candidate.name == "lpes" and again.main is first[2].main
    run(TASK.examples("test", 2, 1), PLACES, [Candidate("lpes", other)])  # other questions
    run(examples, PLACES[:1], [Candidate("lpes", other)])
    assert len(measured) == 4
