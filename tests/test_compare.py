"""The verb compare, on a tiny random model: everything is measured, nothing is claimed of its accuracy."""

import json
import os
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from nursery import VERB
from schemas import check_folder

from lpes_jax.compare import NAMES, CompareSettings, run_comparison
from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors, read_json
from lpes_jax.methods.moice import Router
from lpes_jax.models.llama import LlamaConfig
from lpes_jax.statistics import holm
from lpes_jax.store.files import write_json

SMALL = {"num_pairs": 3, "key_length": 1, "limit": 2, "test_limit": 2, "budget": 2, "repeats": 1, "channel_strings": 4}
TUNED = ("uniform", "ntk_by_base", "yarn", "attention_buckets", "self_extend", "hidden_channel", "zero_tuning")


@pytest.fixture(scope="module")
def compared(model_folder: Path, tiny_config: LlamaConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("compare")
    LayerFactors(np.array([1.0, 1.5, 0.7])).save(folder / "factors.json")
    Router.init(jax.random.key(0), tiny_config).save(folder / "router.safetensors")
    settings = CompareSettings.of(
        **SMALL, model=str(model_folder), factors=folder / "factors.json", router=folder / "router.safetensors",
        positions=(0, 100), output_path=folder / "out",
    )  # fmt: skip
    return folder, run_comparison(settings)


def test_all_methods_are_measured_on_the_same_prompts(compared):
    folder, record = compared
    assert list(record["methods"]) == list(NAMES) and record["refused"] == {}
    samples = [json.loads(line) for line in (folder / "out/samples.jsonl").read_text().splitlines()]
    prompts = {name: [entry["prompt_hash"] for entry in samples if entry["method"] == name] for name in NAMES}
    assert len(prompts["baseline"]) == 4 and all(hashes == prompts["baseline"] for hashes in prompts.values())
    assert {path.name for path in (folder / "out").iterdir()} == {
        *("results.json", "results.md", "samples.jsonl", "positions.png", "positions.svg", "report.html"),
    }
    check_folder(folder / "out", "results.json", "samples.jsonl")
    text = (folder / "out/results.md").read_text()
    assert all(f"| {name} |" in text for name in NAMES) and "against baseline" in text


def test_costs_and_tuning_are_recorded(compared):
    methods = compared[1]["methods"]
    assert [methods[name]["passes_per_token"] for name in ("baseline", "lpes", "attention_buckets")] == [1, 1, 7]
    assert methods["baseline"]["seconds_against_baseline"] == 1
    for name, entry in methods.items():
        assert entry["seconds_per_prompt"] > 0 and entry["program_memory_bytes"] > 0
        tried = entry["tuning"]["tried"]
        if name in TUNED:
            assert len(tried) == 2  # the budget
            best = max(tried, key=lambda one: (one["accuracy"], one["log_likelihood"]))
            assert entry["setting"] == best["setting"]
        else:
            assert len(tried) in (0, 2)
    # The log-likelihood tells methods apart where accuracy does not: none is the plain model under another name. (SEAL may be:
    # from one question it learns nothing that makes the other likelier, and its start is kept.)
    plain = methods["baseline"]["log_likelihood_by_position"]
    others = ("pi", "attention_buckets", "moice", "hidden_channel", "zero_tuning", "lpes")
    assert all(methods[name]["log_likelihood_by_position"] != plain for name in others)
    first, second = (entry["setting"].split(", ") for entry in methods["hidden_channel"]["tuning"]["tried"])
    assert first[0] == second[0] and (first[1], second[1]) == ("factor 0", "factor 0.5")


def test_what_cannot_be_had_is_named(model_folder, tmp_path):
    def settings(**changes) -> CompareSettings:
        return CompareSettings.of(**SMALL | {"model": str(model_folder), "output_path": tmp_path / "out"} | changes)

    with pytest.raises(UserError, match="--methods 'lpse' is not known; the methods are: all, baseline"):
        run_comparison(settings(methods=("lpse",)))
    with pytest.raises(UserError, match="--methods lpes needs --factors"):
        run_comparison(settings(methods=("lpes",)))
    with pytest.raises(UserError, match="--budget must be at least 1"):
        run_comparison(settings(budget=0))
    with pytest.raises(UserError, match="--metrics substrng: --task kv has"):  # before any tuning
        run_comparison(settings(metrics=("substrng",), methods=("uniform",)))
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_comparison_that_is_killed_goes_on(compared, nursery, model_folder, tmp_path):
    folder, whole = compared
    names = ("baseline", "uniform", "self_extend", "lpes")
    out, flags = tmp_path / "out", ["--positions", "0", "100", "--model", str(model_folder)]
    for name, value in SMALL.items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    flags += ["--factors", str(folder / "factors.json")]
    measured, log, end = out / "unfinished/uniform.measured.json", tmp_path / "log.txt", time.monotonic() + 600
    pid = nursery.run(VERB, log, "compare", *flags, "--output-path", out, "--methods", *names)
    while not measured.exists():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    assert nursery.wait(pid) == 143 and log.read_text().strip().splitlines()[-1].endswith("--resume to continue")
    assert not (out / "results.json").exists()

    settings = CompareSettings.of(
        **SMALL, model=str(model_folder), factors=folder / "factors.json", positions=(0, 100), output_path=out, methods=names,
    )  # fmt: skip
    with pytest.raises(
        UserError, match="contains an interrupted comparison; pass --resume to continue, give another folder, or"
    ):
        run_comparison(settings)
    with pytest.raises(UserError, match=r"was run with --test-limit 2 \(now 3\); use the same settings or another"):
        run_comparison(settings.replace(test_limit=3, resume=True))
    # What stands there is taken as it is: a figure that no run gives comes out again.
    record, tuned = read_json(measured), read_json(out / "unfinished/uniform.tuned.json")
    write_json(measured, record | {"scores": {"prefix": [[0.25, 0.25], [0.25, 0.25]]}})
    write_json(out / "unfinished/uniform.tuned.json", tuned | {"tried": [tuned["tried"][0] | {"accuracy": 0.125}]})
    resumed = run_comparison(settings.replace(resume=True))
    assert resumed["resumed"] and resumed["methods"]["uniform"]["acc,none"] == 0.25
    assert [entry["accuracy"] for entry in resumed["methods"]["uniform"]["tuning"]["tried"]] == [0.125]
    assert list(resumed["methods"]) == list(names) and not (out / "unfinished").exists()
    for name in ("baseline", "self_extend", "lpes"):
        now, before = resumed["methods"][name], whole["methods"][name]
        assert now["setting"] == before["setting"] and now["acc_by_position"] == before["acc_by_position"]
        likelihoods = before["log_likelihood_by_position"]
        assert now["log_likelihood_by_position"] == pytest.approx(likelihoods, abs=1e-3)
    # Where nothing says what the figures are of, they are not taken.
    (out / "unfinished").mkdir()
    write_json(out / "unfinished/uniform.measured.json", record | {"scores": {"prefix": [[0.25, 0.25], [0.25, 0.25]]}})
    again = run_comparison(settings.replace(resume=True, methods=("baseline", "uniform")))
    assert again["methods"]["uniform"]["acc,none"] == whole["methods"]["uniform"]["acc,none"] != 0.25
    with pytest.raises(UserError, match="contains no interrupted comparison; remove --resume to start one"):
        run_comparison(settings.replace(resume=True))


def test_holm_by_hand():
    assert holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []
