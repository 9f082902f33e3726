"""The experiments on rivals and benchmarks: known answers, the list of missing data, resuming."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lpes_jax.compare import NAMES
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama import Llama, LlamaConfig
from lpes_jax.rope import RopeParameters
from lpes_jax.tasks.perplexity import Window
from lpes_jax.tasks.prompts import Cut, Prompt

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))
import attention_by_position  # noqa: E402
import benchmarks  # noqa: E402
import extrapolation  # noqa: E402
import rope_decay  # noqa: E402
import table01_positions as table01  # noqa: E402
import table02_zero_scrolls as table02  # noqa: E402
import table03_l_eval as table03  # noqa: E402
import table04_general as table04  # noqa: E402
import table05_latency as table05  # noqa: E402
import table17_long as table17  # noqa: E402


@pytest.mark.long
def test_attention_is_shared_out_as_a_softmax_says(tiny_model: Llama):
    config, queries = tiny_model.config, 3
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 24))
    lengths, edges = [24, 19], [[0, 2, 8, 14, 20, 24], [0, 1, 5, 9, 13, 19]]
    factors = jnp.array([1.3, 0.8, 1.1])

    def looked(rows: list[int], width: int) -> tuple[np.ndarray, np.ndarray]:
        given = (jnp.asarray(np.array(array)[rows], jnp.int32) for array in (tokens[:, :width], lengths, edges))
        table = config.rope_table(width, factors)
        mass, entropy = attention_by_position.attention_of(tiny_model, *given, table, queries)
        return np.asarray(mass), np.asarray(entropy)

    mass, entropy = looked([0, 1], 24)
    np.testing.assert_allclose(mass.sum(axis=2), 1, rtol=1e-5)
    unpadded = looked([1], 19)  # padding changes nothing
    np.testing.assert_allclose(mass[:, 1], unpadded[0][:, 0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(entropy[:, 1], unpadded[1][:, 0], rtol=1e-4)

    # The first layer by hand: normalised embeddings, half-split rotation, grouped queries.
    weights = {name: np.asarray(getattr(tiny_model.layers, name)[...][0], np.float64) for name in ("query", "key")}
    x = np.asarray(tiny_model.embed[...], np.float64)[tokens[1, :19]]
    x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * np.asarray(tiny_model.layers.attention_norm[...][0])
    angles = np.arange(19)[:, None] / 1.3 * 10_000.0 ** (-np.arange(0, 8, 2) / 8)
    turn = np.exp(1j * angles)[:, None]

    def rotated(array: np.ndarray) -> np.ndarray:
        heads = array.reshape(19, -1, 8)
        return (heads[..., :4] + 1j * heads[..., 4:]) * turn  # the real part of a conj(b) is the product of two heads

    q, k = rotated(x @ weights["query"]), rotated(x @ weights["key"])
    expected_mass, expected_entropy = np.zeros(5), []
    for head in range(6):
        for query in range(16, 19):
            logits = (q[query, head] * k[: query + 1, head // 3].conj()).real.sum(axis=1) / np.sqrt(8)
            p = np.exp(logits - logits.max())
            p /= p.sum()
            expected_entropy.append(-(p * np.log(p)).sum())
            expected_mass += [p[a:b].sum() / 18 for a, b in zip(edges[1][:-1], edges[1][1:], strict=True)]
    np.testing.assert_allclose(mass[0, 1], expected_mass, rtol=1e-3)
    np.testing.assert_allclose(entropy[0, 1], np.mean(expected_entropy), rtol=1e-3)


def test_regions_are_thirds_of_what_is_left_of_the_context():
    whole = Prompt("ask:" + "c" * 30 + "\nend", (), "", "x", 0, 0, 1, cut=Cut(4, 34, "..."))
    letters = list(range(len(whole.text)))
    assert attention_by_position.edges_of(whole, whole, letters) == [0, 4, 14, 24, 34, 38]
    shorter = replace(whole, text="ask:" + "c" * 9 + "...\nend", was_cut=True)
    assert attention_by_position.edges_of(shorter, whole, letters[:20]) == [0, 4, 7, 10, 13, 20]


def test_decay_and_waves_are_the_closed_forms_of_distance_by_factor():
    distances = np.arange(0.0, 64)
    single = rope_decay.scaled(RopeParameters(rope_theta=10_000.0), 2, 1.0)
    np.testing.assert_allclose(rope_decay.waves(single, distances), np.cos(distances), atol=1e-12)
    np.testing.assert_allclose(rope_decay.decay(single, distances), 1)  # |exp(i d)|
    assert rope_decay.troughs(np.cos(distances[:20])) == [3, 9, 16]
    double = np.array([1.0, 0.25])  # |1| + |1 + exp(-0.75 i d)|, of at most 1 + 2
    expected = (1 + 2 * np.abs(np.cos(0.375 * distances))) / 3
    np.testing.assert_allclose(rope_decay.decay(double, distances), expected, atol=1e-12)
    one, two = (rope_decay.scaled(RopeParameters(rope_theta=10_000.0), 64, factor) for factor in (1.0, 2.0))
    np.testing.assert_allclose(one, 10_000.0 ** (-np.arange(0, 64, 2) / 64), rtol=1e-6)
    for curve in (rope_decay.waves, rope_decay.decay):
        np.testing.assert_allclose(curve(two, 2 * distances), curve(one, distances), atol=1e-6)


def test_layers_and_their_mean_are_one_method_where_all_factors_are_equal(tiny_config: LlamaConfig):
    def inv_freq(found: LayerFactors) -> dict[str, np.ndarray]:
        candidates = extrapolation.candidates_of(found, 2, 2.0)[1:]
        assert all(candidate.method is not None for candidate in candidates)
        return {
            candidate.name: np.asarray(candidate.method(tiny_config, 1024).tables.inv_freq)[0, :, 0]
            for candidate in candidates
            if candidate.method
        }

    equal, rising = inv_freq(LayerFactors.uniform(1.25, 3)), inv_freq(LayerFactors(np.array([1.0, 1.25, 1.5])))
    plain = 10_000.0 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(equal["PI"], np.tile(plain / 2, (3, 1)), rtol=1e-6)
    np.testing.assert_allclose(equal["LPES, PI"], np.tile(plain / 2.5, (3, 1)), rtol=1e-6)
    np.testing.assert_allclose(rising["LPES, PI"][:, 0], 1 / np.array([2.0, 2.5, 3.0]), rtol=1e-6)
    for kind in ("PI", "dynamic"):
        np.testing.assert_array_equal(equal[f"LPES, {kind}"], equal[f"{kind}, mean"])
        np.testing.assert_allclose(rising[f"{kind}, mean"], equal[f"{kind}, mean"], rtol=1e-6)  # of the same mean
    assert not np.allclose(equal["dynamic"], equal["dynamic, mean"])


def test_bins_leave_out_what_is_not_scored():
    windows = [Window([0] * 6, 1), Window([0] * 6, 2)]
    nlls = [np.array([9.0, 1, 2, 3, 4, 5]), np.array([9.0, 9, 7, 2, 4, 6])]
    np.testing.assert_allclose(extrapolation.binned(windows, nlls, 3), [[1.5, 4], [7, 4]])


def test_figures_and_their_differences():
    summaries = {"rouge": [0.4, 0.4], "rouge1": [0.2, 0.6], "rouge2": [0.1, 0.1], "rougeL": [0.5, 0.3]}
    scores = {metric: np.array(values) for metric, values in summaries.items()}
    assert benchmarks.figure(scores) == pytest.approx(100 * (0.4 * 0.1 * 0.4) ** (1 / 3))
    better, worse = {"f1": np.tile([0.5, 0.7], 50)}, {"f1": np.tile([0.1, 0.5], 50)}
    found = benchmarks.difference(better, worse)
    assert found["difference"] == pytest.approx(30) and found["p"] < 1e-3
    assert found["standard_error"] == pytest.approx(100 * 0.1 / np.sqrt(100), rel=0.1)
    assert benchmarks.difference(worse, worse) == {"difference": 0, "standard_error": 0, "p": 1}
    assert benchmarks.spread(list("abcdef"), 3) == ["a", "c", "e"] and benchmarks.spread("ab", 9) == ["a", "b"]


def test_paper_rows_have_a_value_for_each_column():
    for script in (table02, table03, table04, table17):
        columns = sum(column.in_paper for column in script.COLUMNS)
        rows = [len(row.split()) for rows_of_model in script.PAPER.values() for row in rows_of_model.values()]
        assert set(rows) == {columns + (script is not table04)}, script.__name__  # Table 4 has no average
    for task, rows_of_task in table01.PAPER.items():
        rows = [len(row.split()) for rows_of_model in rows_of_task.values() for row in rows_of_model.values()]
        assert set(rows) == {len(table01.POSITIONS[task]) + 1}


def _row(id: str, document: str, output: str) -> str:
    text = f"{document} Say it: "
    row = {"id": id, "input": text, "output": output, "document_start_index": 0, "document_end_index": len(document)}
    return json.dumps(row | {"query_start_index": len(document), "truncation_seperator": "..."})


@pytest.mark.promotes
def test_a_table_lists_what_ran_and_what_has_no_data(model_folder: Path, tmp_path: Path):
    data = tmp_path / "data" / "zero_scrolls"
    data.mkdir(parents=True)
    (data / "qasper_validation.jsonl").write_text(
        "\n".join(_row(f"q{index}", "x" * 40 + str(index), "yes") for index in range(4))
    )
    (data / "quality_validation.jsonl").write_text(_row("b", "y" * 40, "B"))
    (data / "narrative_qa_validation.jsonl").write_text('{"id": "n"}')
    factors = tmp_path / "factors.json"
    LayerFactors(np.linspace(1.0, 1.5, 3)).save(factors)
    s = table02.Settings(
        factors=factors, data_folder=tmp_path / "data", output_path=tmp_path / "out", model=str(model_folder), limit=2,
        max_new_tokens=4, dtype="float32",
    )  # fmt: skip
    with pytest.raises(SystemExit, match="part 1/3 is done"):
        table02.main(replace(s, part="1/3"))  # narrative_qa, which cannot be read
    assert not s.output_path.exists()
    table02.main(s)
    summary = json.loads((s.output_path / "summary.json").read_text())
    assert summary["ran"] == ["qasper", "quality"] and list(summary["not_measured"]) == ["narrative_qa"]
    assert summary["without_data"] == ["gov_report", "summ_screen_fd", "qmsum", "squality", "space_digest", "book_sum_sort"]
    assert set(summary["ours"]) == {"baseline", "pi", "lpes"}
    tables = (s.output_path / "tables.md").read_text()
    # of the paper's columns qasper alone was run
    assert "| paper: Vicuna-7B-v1.5, MoICE | 32.34 | - | 32.34 |" in tables
    assert "Without data: GovRpt (" in tables and "Not measured: narrative_qa. --data" in tables
    cell = s.output_path / "qasper.json"
    samples = cell.with_suffix(".samples.jsonl").read_text().splitlines()
    assert len(samples) == 3 * 2 and len(json.loads(cell.read_text())["methods"]["lpes"]["scores"]["f1"]) == 2
    written = cell.stat().st_mtime_ns
    table02.main(s)
    assert cell.stat().st_mtime_ns == written
    with pytest.raises(UserError, match="qasper.json was run with max_new_tokens=4, not 5"):
        table02.main(replace(s, max_new_tokens=5))
    with pytest.raises(UserError, match="has no file of this table"):
        table02.main(replace(s, data_folder=s.output_path, columns=("qasper",)))


@pytest.mark.long
def test_latency_has_every_method_and_lpes_is_the_program_of_the_baseline(
    tiny_config: LlamaConfig, model_folder: Path, tmp_path: Path
):
    assert set(table05.makers(tiny_config, 0)) == set(NAMES)
    s = table05.Settings(
        output_path=tmp_path, model=str(model_folder), tokens=(40,), methods=("attention_buckets", "lpes"), new_tokens=2,
        repeats=1, generation_repeats=1,
    )  # fmt: skip
    table05.main(s)
    record = json.loads((tmp_path / "summary.json").read_text())["ours"]["40"]
    for kind in ("prompt", "generation"):
        programs = {name: entry["program"] for name, entry in record[kind].items()}
        assert programs == {"baseline": 0, "attention_buckets": 1, "lpes": 0}
        assert (
            all(entry["seconds"] > 0 for entry in record[kind].values()) and record[kind]["baseline"]["against_baseline"] == 1
        )
    assert record["passes"]["attention_buckets"] == 7 and "| paper: moice |" in (tmp_path / "tables.md").read_text()
    config = replace(table05.config_of("qwen2.5-7b"), num_layers=2, hidden_size=64, intermediate_size=96, vocab_size=100)
    model = table05.random_model(config, 0, "bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("bfloat16")}
    assert model.layers.gate[...].shape == (2, 64, 96) and float(model.norm[...].min()) == 1
    assert float(model.layers.gate[...].astype(jnp.float32).std()) == pytest.approx(0.02, rel=0.05)


def test_comparisons_of_table_1():
    s = table01.Settings(tasks=("kv", "mdqa"), num_pairs=(5, 10), factors=Path("a.json"), mdqa_data=Path("oracle.jsonl.gz"))
    cells = table01.comparisons(replace(s, mdqa_factors=Path("b.json"), budget=3))
    assert list(cells) == ["kv_5_pairs", "kv_10_pairs", "mdqa_10_documents"]
    kv, _, mdqa = (SimpleNamespace(**cell.flat()) for cell in cells.values())
    assert (kv.factors, kv.positions, kv.num_pairs, kv.budget) == (Path("a.json"), (0, 20, 40, 60, 80, 100), 5, 3)
    assert (mdqa.factors, mdqa.distractors, mdqa.positions) == (Path("b.json"), "random", (0, 25, 50, 75, 100))
    with pytest.raises(UserError, match="--tasks mdqa needs --mdqa-data"):
        table01.comparisons(replace(s, mdqa_data=None))
