"""JSON of every kind through everything that reads JSON: good, or refused in one line."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formula import Analytic, held_out_by_formula, scored_as
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from selection import drawn

from lpes_jax import cli
from lpes_jax.compare import PARTS
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.json_files import MOST_DEPTH, parse_json, read_json
from lpes_jax.methods.moice import Router
from lpes_jax.models.llama import LlamaConfig
from lpes_jax.models.llama.checkpoint import open_checkpoint
from lpes_jax.models.llama.tokenizer import stop_ids
from lpes_jax.results import outcome_of
from lpes_jax.search import loop, run_search
from lpes_jax.search.settings import search_space
from lpes_jax.search.uniform import read_sweep
from lpes_jax.settings.search import SearchSettings
from lpes_jax.store.files import write_json
from lpes_jax.store.parts import Parts
from lpes_jax.store.run_folder import RunFolder
from lpes_jax.tasks import make_task
from lpes_jax.tasks.multiple_choice import _chinese_names

SOON = settings(
    max_examples=drawn(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
BAD = {
    "brackets": "[" * 100_000,
    "closed brackets": "[" * 100_000 + "]" * 100_000,
    "braces": '{"a": ' * 100_000 + "1" + "}" * 100_000,
    "brackets beyond the bound": "[" * (MOST_DEPTH + 2) + "]" * (MOST_DEPTH + 2),
    "an integer of 10,000 digits": "1" * 10_000,
    "an integer of 200 digits": '{"a": [-' + "1" * 200 + "]}",
    "NaN": '{"a": NaN}',
    "infinity": "[-Infinity]",
    "is too large": "1e999",
    "half a pair": '{"a": ["\\ud800"]}',
    "half a pair as a key": '{"\\udfff": 1}',
    "empty": "",
    "zeros": "\0\0\0",
    "half": '{"a": ',
    "two": "{} {}",
    "words": "not json",
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_json_is_one_line(name, tmp_path):
    (tmp_path / "f.json").write_text(BAD[name])
    for read in (
        lambda: read_json(tmp_path / "f.json"),
        lambda: parse_json(BAD[name], "row 7"),
        lambda: parse_json(BAD[name].encode(), "x"),
    ):
        with pytest.raises(UserError) as refused:
            read()
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_what_is_json_is_read(tmp_path):
    record = {"a": [1, -2.5, 10**30, None, True, "\U0001f600 \u4e2d"], "b": {"c": []}}
    deep: Any = 1
    for _ in range(MOST_DEPTH - 2):
        deep = [deep]
    for text in (json.dumps(record | {"d": deep}), "\ufeff" + json.dumps(record | {"d": deep}, ensure_ascii=False)):
        (tmp_path / "f.json").write_text(text, encoding="utf-8")
        assert read_json(tmp_path / "f.json", dict) == record | {"d": deep}
    assert np.isnan(parse_json('{"a": NaN}', "x", finite=False)["a"]) and parse_json("1e999", "x", finite=False) == np.inf
    with pytest.raises(UserError, match="x: must be an object in JSON, got a list"):
        parse_json("[]", "x", dict)
    (tmp_path / "f.json").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "f.json", tmp_path, tmp_path / "none.json"):
        with pytest.raises(UserError, match=f"{path}: "):
            read_json(path)


NUMBERS = st.integers(-3, 9) | st.sampled_from([10**40, -(10**18), 0.5, 1e300, -1e-300, float("nan"), float("inf")])
LEAVES = st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "a", "0.5", "nan", "\ud800", "\0", "/", "x" * 300])
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4))


def paths_to_parts(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all parts of a record."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(way for key, part in inner for way in paths_to_parts(part, (*path, key)))]


@st.composite
def damaged(draw: st.DrawFn, record: Any) -> Any:
    """The record with one to three of its parts replaced by any JSON, or taken out; or any JSON in its place."""
    record = copy.deepcopy(record)
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from(paths_to_parts(record)[1:])) if paths_to_parts(record)[1:] else ("whole",)
        if last == "whole" or draw(st.integers(0, 19)) == 0:
            return draw(JSON)
        holder = record
        for key in way:
            holder = holder[key]
        if draw(st.integers(0, 3)) == 0:
            del holder[last]
        else:
            holder[last] = draw(JSON)
    return record


def refused_or(read: Callable[[], Any]) -> Any:
    """What `read` gives, or None for a UserError in one line."""
    try:
        return read()
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return None


FACTORS = {
    "format": "lpes-factors/1", "applies_to": "position / factor", "factors": [1.0, 1.5, 0.7], "granularity": "layer",
    "model": {"name": "tiny", "num_layers": 3, "sha256": "0"}, "rope": {"rope_theta": 1e4},
    "curve": {"type": "bezier", "control_points": [[0.0, 1.0], [1.0, 1.5], [2.0, 0.7]], "layers": [0, 2]},
    "search": {"individuals": 3, "uniform": {"factor": 1.0}}, "evaluation": {"lpes": {"acc,none": 0.5}},
}  # fmt: skip


@SOON
@given(damaged(FACTORS))
def test_factors(tmp_path, tiny_config, record):
    path = tmp_path / "f.json"
    path.write_text(json.dumps(record))
    found = refused_or(lambda: LayerFactors.load(path))
    if found is None:
        return
    refused_or(lambda: found.for_model(3, 2, 8))
    found.save(tmp_path / "again.json")
    for curve, points in (("bezier", 3), ("free", None)):
        from_file = SearchSettings.of(curve=curve, control_points=points, initial_factors=path)
        refused_or(lambda from_file=from_file: search_space(from_file, tiny_config, range(3)))


CONFIG = {
    "model_type": "llama", "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "rope_theta": 1e4, "eos_token_id": [1, 2], "tie_word_embeddings": True, "attention_bias": False,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "partial_rotary_factor": 1.0},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*no rope_theta")
@SOON
@given(damaged(CONFIG), st.sampled_from(["llama", "qwen2", "smollm3", "phi3", "mistral"]))
def test_configs(record, kind):
    if not isinstance(record, dict):
        return  # refused where the file is read: below
    if record.get("model_type") == "llama":
        record["model_type"] = kind
    refused_or(lambda: LlamaConfig.from_hf(record, "config.json"))


class Ends:
    eos_token_id = 3


@pytest.mark.filterwarnings("ignore:.*no rope_theta")
@SOON
@given(damaged(CONFIG), damaged({"eos_token_id": [1, 2]}))
def test_files_of_a_model_folder(tmp_path, config, generation):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "model.safetensors").write_bytes(b"")
    refused_or(lambda: open_checkpoint(tmp_path))
    ids = refused_or(lambda: stop_ids(tmp_path, Ends()))
    assert ids is None or all(0 <= index < 2**31 for index in ids)


@SOON
@given(damaged({"metadata": {"total_size": 7}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
def test_the_index_of_shards(tmp_path, record):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(record))
    found = refused_or(lambda: open_checkpoint(tmp_path))  # there are no shards, in any case
    assert found is None or not found.names()


PASSAGE = {"title": "T", "text": "some text", "isgold": False, "id": 7}
ROWS = {
    "kv": ({"num_pairs": 2}, {"ordered_kv_records": [["a", "b"], ["c", "d"], ["e", "f"]], "key": "c", "value": "d"}),
    "mdqa": (
        {"num_documents": 2},
        {"question": "who?", "answers": ["me"], "ctxs": [PASSAGE, PASSAGE | {"isgold": True, "text": "it was me"}]},
    ),
    "l_eval": ({"subset": "quality"}, {"instructions": ["q"], "outputs": ["A"], "input": "document", "evaluation": "exam"}),
    "l_eval sci_fi": (
        {"subset": "sci_fi"},
        {"instructions": ["q"], "outputs": ["True [fact: False]"], "input": "document", "evaluation": "exam"},
    ),
    "zero_scrolls": (
        {"subset": "qasper"},
        {
            "id": "1", "input": "document query", "output": "a", "document_start_index": 0, "query_start_index": 9,
            "truncation_seperator": "...",
        },
    ),
    "zero_scrolls qmsum": (
        {"subset": "qmsum"},
        {
            "meeting_transcripts": [{"speaker": "A", "content": "hello"}],
            "general_query_list": [{"query": "q", "answer": "a"}], "specific_query_list": [{"query": "r", "answer": "b"}],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
@SOON
@given(data=st.data())
def test_rows_of_data(tmp_path, name, data):
    flags, row = ROWS[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(data.draw(damaged(row))) + "\n")
    task = make_task(name.split()[0], data=path, **flags)
    for example in refused_or(lambda: task.examples("all", None, 0)) or ():
        for slot in range(task.num_items):
            prompt = task.prompt(example, slot)
            json.dumps([prompt.text, prompt.answers, prompt.references]).encode()
            prompt.text.encode()
            assert all(0 <= figure <= 1 for figure in task.score("it was me, A", prompt).values())


@pytest.mark.parametrize("name", BAD)
def test_bad_lines_of_data_are_named_with_their_number(tmp_path, name):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS["kv"][1]) + "\n" + BAD[name] + "\n")
    if name == "empty":
        return
    with pytest.raises(UserError, match="rows.jsonl, line 2: not a lost-in-the-middle row") as refused:
        make_task("kv", num_pairs=2, data=path).examples("all", None, 0)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


@SOON
@given(damaged({"law": ["Law", "法学", "x"], "art": ["Art", "艺术学", "x"]}))
def test_the_names_of_subjects(tmp_path, record):
    (tmp_path / "m.json").write_text(json.dumps(record))
    found = refused_or(lambda: _chinese_names(tmp_path / "m.json"))
    assert found is None or all(isinstance(name, str) for name in found.values())


@SOON
@given(damaged([10_000.0, 17_500.0]))
def test_the_bases_of_a_router(tmp_path, bases):
    weights = {"w1": np.ones((3, 8, 2), np.float32), "w2": np.ones((3, 2, 2), np.float32), "w3": np.ones((3, 8, 2), np.float32)}
    save_file(weights, tmp_path / "r.safetensors", metadata={"bases": json.dumps(bases)})
    refused_or(lambda: Router.load(tmp_path / "r.safetensors"))


LINE = {
    "id": 0, "generation": 0, "operator": "initial", "parents": [], "cut": None, "control_points": [[0, 1.0], [2, 1.0]],
    "factors": [1.0, 1.0, 1.0], "cached": False, "fitness": 0.5, "accuracy": {"0": 0.5}, "log_likelihood": {"0": -1.5},
}  # fmt: skip
LOOK = {
    "id": 0, "step": 0, "control_points": [[0, 1.0]], "factors": [1.0], "fitness": -0.5, "task_losses": [0.5],
    "accuracies": [0.5], "text_loss": None, "train_loss": None, "seconds": 0.5,
}  # fmt: skip
RAN = {"settings": {"seed": 0, "limit": 3}, "model": {"sha256": "0"}, "environment": {"git_commit": None}}


@pytest.mark.parametrize("line", [LINE, LINE | {"fitness": None, "not_finite": {"prompt": 0, "first_layer": 1}}, LOOK])
@SOON
@given(data=st.data())
def test_lines_of_a_history(tmp_path, line, data):
    (tmp_path / "history.jsonl").write_text(json.dumps(data.draw(damaged(line))) + "\n")
    (tmp_path / "config.json").write_text(json.dumps(RAN))

    def opened() -> list[dict[str, Any]]:
        with RunFolder(tmp_path, RAN, resume=True) as folder:
            return folder.recorded

    for record in refused_or(opened) or ():
        assert record["fitness"] is None or np.isfinite(record["fitness"])
        assert np.isfinite(np.nan_to_num(np.array(record["factors"], float)).sum())  # null: it stands still
        accuracies = [
            entry if isinstance(entry, dict) else {"": entry} for entry in record.get("accuracy", {}).values()
        ]  # of a mixture
        assert np.isfinite(sum(sum(accuracy.values()) for accuracy in accuracies) + sum(record.get("accuracies", [])))


@SOON
@given(damaged(RAN))
def test_the_config_of_a_run_and_of_a_comparison(tmp_path, record):
    run, comparison = tmp_path / "run", tmp_path / "comparison"
    for folder in (run, comparison / "unfinished"):
        folder.mkdir(parents=True, exist_ok=True)
    (run / "history.jsonl").write_text(json.dumps(LINE) + "\n")
    (run / "config.json").write_text(json.dumps(record))
    (comparison / "unfinished/begun.json").write_text(json.dumps(record))
    refused_or(lambda: RunFolder(run, RAN, resume=True).close())
    refused_or(lambda: Parts(comparison, RAN, PARTS, resume=True).close())
    assert json.loads((run / "history.jsonl").read_text()) == LINE  # refused or not, nothing is lost


MEASURED = {
    "scores": {"prefix": [[1.0, 0.0], [0.0, 1.0]]}, "log_likelihood": [["-0.5", "-inf"], ["-1.5", "-2.0"]],
    "prefix_of_outputs": None, "compilations": 3, "prompt_tokens": [7, 7, 8, 8], "counts": {"questions_skipped": 0},
    "outputs": ["a", "b", "", "c"], "output_tokens": [1, 1, 0, 1],
}  # fmt: skip
TUNED = {"setting": "factor 2", "tried": [{"setting": "factor 2", "accuracy": 0.5, "log_likelihood": None}]}


@SOON
@given(damaged(MEASURED), damaged(TUNED))
def test_what_a_comparison_goes_on_with(tmp_path, measured, tuned):
    folder = tmp_path / "unfinished"
    folder.mkdir(exist_ok=True)
    (folder / "begun.json").write_text(json.dumps(RAN))
    for name, record in (("yarn.measured", measured), ("yarn.tuned", tuned)):
        (folder / f"{name}.json").write_text(json.dumps(record))
    kept = refused_or(lambda: Parts(tmp_path, RAN, PARTS, resume=True))
    if kept is not None:
        kept.close()
        outcome = outcome_of(kept.records["measured"]["yarn"])
        assert all(values.shape == outcome.main.shape for values in outcome.scores.values())
        assert isinstance(kept.records["tuned"]["yarn"]["setting"], str)


@SOON
@given(
    damaged(
        {
            "factor": 1.0,
            "fitness": 0.5,
            "evaluations": 2,
            "sweep": [{"factor": 0.5, "fitness": None}, {"factor": 1.0, "fitness": 0.5}],
        }
    )
)
def test_the_sweep_of_uniform_factors(tmp_path, record):
    (tmp_path / "uniform.json").write_text(json.dumps(record))
    found = refused_or(lambda: read_sweep(tmp_path / "uniform.json", [0.5, 1.0, 2.0]))
    assert found is None or [entry["factor"] for entry in found["sweep"]] == [0.5, 1.0, 2.0][: len(found["sweep"])]


# A real run, damaged and resumed


@pytest.fixture(scope="module")
def ran(tmp_path_factory, model_folder) -> SearchSettings:
    settings = SearchSettings.of(
        model=str(model_folder), output_path=tmp_path_factory.mktemp("json") / "run", num_pairs=3, key_length=1, limit=2,
        test_limit=2, positions=(0, 100), control_points=2, population_size=3, parents=2, mutations=2, crossovers=1,
        generations=1, uniform_candidates=2,
    )  # fmt: skip
    with held_out_by_formula(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_scorer", scored_as(Analytic))
        run_search(settings)
    return settings


def line_changed(**changes: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        lines = (run / "history.jsonl").read_text().splitlines()
        record = json.loads(lines[2]) | changes
        lines[2] = json.dumps({name: value for name, value in record.items() if value != "gone"})
        (run / "history.jsonl").write_text("\n".join(lines) + "\n")
        (run / "results.json").unlink()

    return change


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda run: (run / name).write_text(text) and None


DAMAGED_RUNS = {
    "config is a list": (written("config.json", "[]"), "config.json: must be an object in JSON, got a list"),
    "config is deep": (written("config.json", BAD["braces"]), "config.json: not a JSON file"),
    "config of NaN": (written("config.json", '{"a": NaN}'), "config.json: not a JSON file"),
    "results are a list": (written("results.json", "[]"), "results.json: must be an object in JSON, got a list"),
    "factors are a list": (written("factors.json", "[]"), "factors.json: not a lpes-factors/2 file"),
    "search is a list": (
        written("factors.json", json.dumps(FACTORS | {"search": []})),
        "factors.json: search must be an object",
    ),
    "no fitness": (line_changed(fitness="gone"), "history.jsonl, line 3: not a line of a history .fitness missing"),
    "fitness is text": (line_changed(fitness="0.5"), "line 3: not a line of a history .fitness is '0.5'"),
    "fitness is null": (line_changed(fitness=None), "line 3: .*a fitness of null"),
    "accuracy is a list": (line_changed(accuracy=[1]), "line 3: .*accuracy is"),
    "accuracy of other positions": (line_changed(accuracy={"7": 1.0}), "individual 2 of .* is not the one"),
    "cached is a number": (line_changed(cached=1), "line 3: .*cached is 1"),
    "factors are text": (line_changed(factors="1 1 1"), "line 3: .*factors is"),
}


@pytest.mark.promotes
@pytest.mark.parametrize("name", DAMAGED_RUNS)
def test_a_damaged_run_is_not_resumed_and_stays_as_it_is(ran, tmp_path, name):
    damage, message = DAMAGED_RUNS[name]
    run = tmp_path / "run"
    run.mkdir()
    for file in ran.run.output_path.iterdir():
        (run / file.name).write_bytes(file.read_bytes())
    damage(run)
    before = {path: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(UserError, match=message) as refused:
        run_search(ran.replace(output_path=run, resume=True))
    assert "\n" not in str(refused.value)
    assert {path: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.parametrize("name", ["closed brackets", "an integer of 10,000 digits", "NaN", "half a pair", "words"])
def test_the_verbs_say_it_in_one_line(name, tmp_path, capfd):
    (tmp_path / "f.json").write_text(BAD[name])
    assert cli.main(["evaluate", "--factors", str(tmp_path / "f.json"), "--limit", "1"]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path}/f.json: not a ")


def test_nothing_is_written_that_would_not_be_read(tmp_path):
    with pytest.raises(ValueError):
        write_json(tmp_path / "f.json", {"a": float("nan")})
    assert not list(tmp_path.glob("f.json"))
