"""The verb profile on the bundled model: its page, and its claims against the model's own scores."""

import json

import numpy as np
import pytest
from schemas import check_folder

import lpes_jax as lj
from lpes_jax.cli import main
from lpes_jax.profile import default_lengths, run_profile
from lpes_jax.profile.grid import UNITS
from lpes_jax.scoring import Scorer
from lpes_jax.settings.profile import ProfileSettings
from lpes_jax.tasks.key_value import KeyValue
from lpes_jax.tasks.prompts import encode, slot

QUESTIONS = 2  # per haystack
FAST = {"tasks": ("kv", "single_1"), "lengths": (128, 192), "positions": (0, 100), "seed": 3}


def test_before_and_with_factors_on_the_same_questions(tmp_path, monkeypatch):
    lj.LayerFactors.uniform(2.0, 10).save(tmp_path / "factors.json")
    monkeypatch.setattr("lpes_jax.profile.grid.QUESTIONS", QUESTIONS)
    monkeypatch.setattr("lpes_jax.profile.grid.MOST_UNITS", 2 * UNITS)
    monkeypatch.setattr("lpes_jax.profile.grid.MOST_CEILING", 20)
    settings = ProfileSettings.of(factors=tmp_path / "factors.json", output_path=tmp_path / "out", minutes=20.0, **FAST)
    grid = run_profile(settings)
    record = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert list(record)[0] == "effective_length"
    check_folder(tmp_path / "out", "profile.json")

    # The model reads kv without a haystack but not single_1, so single_1 was not measured at length.
    assert record["fact_alone"]["kv"]["mean"] == 1.0 and record["fact_alone"]["single_1"]["mean"] == 0.0
    kv_columns, single_columns = record["columns"][:2], record["columns"][2:]
    assert {change["missing"] for change in single_columns} == {"0 % right without a haystack"}
    assert [column["units"] for column in kv_columns] in ([UNITS] * 2, [2 * UNITS] * 2)
    assert record["effective_length"]["factors"] == {
        "reliable_up_to": None,
        "ruler_mean": None,
        "by_task": {"kv": {"length": None, "lost_at": 128, "estimate": None}},
    }
    for column in kv_columns:
        assert column["baseline"]["accuracy"] == [1.0, 1.0] and column["factors"]["accuracy"] == [0.0, 0.0]
        assert column["factors"]["status"] == "below" and column["tokens_saved"] > 0.6
    assert len(record["changes"]) == 4 and all(
        change["worse"] == kv_columns[0]["units"] and change["better"] == 0 for change in record["changes"]
    )
    assert all(change["p"] <= change["p_holm"] < 0.05 for change in record["changes"])

    # The same questions, each on its own: the same verdicts.
    model, tokenizer = grid.loaded.model, grid.loaded.tokenizer
    column = grid.columns["kv", 192]
    task = KeyValue(column.task.num_pairs, 8, queries_per_haystack=QUESTIONS)
    assert task == column.task
    prompts = [
        task.prompt(example, slot(position, task.num_items), position)
        for example in task.examples("test", 2 * QUESTIONS, 3000)
        for position in (0, 100)
    ]
    encoded = encode(prompts, tokenizer, 2048)
    assert max(len(change.ids) + len(change.answers[0]) for change in encoded) <= 192
    scorer = Scorer(model, encoded, share_prefixes=False)
    separate = np.asarray(scorer(np.stack([np.ones(10), np.full(10, 2.0)])).correct, float)
    np.testing.assert_array_equal(separate.reshape(2, 2, QUESTIONS, 2).mean(axis=2).transpose(1, 0, 2), column.values[:2])

    page = (tmp_path / "out" / "report.html").read_text()
    assert f"<h1>{record['says']['baseline']}</h1>" in page and page.count("data:image/svg+xml") == 2
    assert record["says"]["factors"].startswith(
        "tiny-retriever with factors does not find a fact at every position, not even in"
    )
    assert {change.name for change in (tmp_path / "out").iterdir()} == {
        *("profile.json", "profile.md", "report.html", "heat_kv.png", "heat_kv.svg", "text_loss.png", "text_loss.svg")
    }
    losses = record["text_loss"]["nats_a_token"]
    assert list(losses) == ["baseline", "factors"] and len(losses["factors"]) == len(record["text_loss"]["from_position"]) == 8


def test_no_time_is_no_error(tmp_path, model_folder, capfd):
    flags = ["--model", str(model_folder), "--tasks", "kv", "--lengths", "200", "--key-length", "2", "--minutes", "0.01"]
    assert main(["profile", *flags, "--output-path", str(tmp_path / "out")]) == 0
    record = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert record["says"]["baseline"] in capfd.readouterr().out and record["text_loss"] is None
    assert "missing" in record["columns"][0]
    assert main(["profile", *flags, "--output-path", str(tmp_path / "out")]) == 2
    assert "contains a finished run (profile.json)" in capfd.readouterr().err
    assert main(["evaluate", "--limit", "1", "--output-path", str(tmp_path / "out")]) == 2
    assert "contains a profile (profile.json)" in capfd.readouterr().err


def test_default_lengths():
    assert default_lengths(131_072) == (1024, 2048, 4096, 8192)
    assert default_lengths(2048) == (256, 512, 1024, 2048)
    assert default_lengths(64) == (16, 32, 64)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lengths", "4096"], "--lengths 4096: the model's window is 512 tokens; give lengths up to that"),
        (["--lengths", "200", "200"], "--lengths 200 200: 200 is repeated; give it once"),
        (["--positions", "0", "120"], "--positions must be at most 100"),
        (["--threshold", "0"], "--threshold must be above 0"),
        (["--confidence", "1"], "--confidence must be between 0 and 1"),
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--tasks", "cwe"], "--tasks"),
        (["--text", "no.txt"], "--text no.txt: no such file"),
    ],
)
def test_settings_that_cannot_be(tmp_path, model_folder, capfd, flags, said):
    arguments = ["profile", "--model", str(model_folder), *flags, "--output-path", str(tmp_path / "out")]
    assert main(arguments) == 2
    [line] = capfd.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("error: ") and said in line and not (tmp_path / "out").exists()
