"""The control that LPES has to beat: one factor for all layers, tuned on the same search examples (`uniform.json`)."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lpes_jax import hosts
from lpes_jax.errors import UserError
from lpes_jax.json_files import is_number, read_json
from lpes_jax.search.history import History
from lpes_jax.settings.search import SearchSettings
from lpes_jax.store.files import write_json


def tune_uniform(settings: SearchSettings, history: History, num_layers: int) -> dict[str, Any]:
    """The best of evenly spaced uniform factors on the search examples, and the whole sweep.

    The factors are within the bounds, and within 0.5 to 2 if the box is wider: no model's best single factor lies beyond.
    `uniform.json` is written after each block, and a resumed run continues after the last one.
    """
    evaluator, folder, when = history.evaluator, history.folder, "tuning one uniform factor"
    path = folder.path / "uniform.json"
    least, most = settings.space.min_factor, settings.space.max_factor
    low, high = max(least, min(0.5, most)), min(most, max(2.0, least))
    candidates = np.linspace(low, high, settings.objective.uniform_candidates).round(4)
    record: dict[str, Any] = {"sweep": [], "evaluations": 0}
    if folder.resumed:
        with contextlib.suppress(UserError):  # a missing or damaged file is written anew
            record = hosts.from_first(lambda: read_sweep(path, candidates.tolist()))
    evaluations_before, sweep = evaluator.evaluations, record["sweep"]
    evaluator.count_earlier(record["evaluations"])
    block_size = evaluator.scorer.individuals_at_once
    for start in range(len(sweep), len(candidates), block_size):
        block = candidates[start : start + block_size]
        summaries = evaluator.score_factors(np.repeat(block[:, None], num_layers, axis=1).astype(np.float32))
        sweep += [{"factor": float(factor)} | summary for factor, summary in zip(block, summaries, strict=True)]
        best = max(sweep, key=lambda entry: -np.inf if entry["fitness"] is None else entry["fitness"])
        factor_records = [{"factors": [entry["factor"]]} | entry for entry in sweep]
        evaluator.check_model(when, factor_records)
        if len(sweep) == len(candidates):
            evaluator.check_any(when, factor_records)
        scored = evaluator.evaluations - evaluations_before
        record = {"factor": best["factor"], "fitness": best["fitness"], "evaluations": scored, "sweep": sweep}
        if hosts.is_first():
            with folder.writing():
                write_json(path, record)
        history.stop.check()
    return record


def read_sweep(path: Path, candidates: Sequence[float]) -> dict[str, Any]:
    """The sweep in `uniform.json`. Raises UserError if it is not a search's sweep over these candidates."""
    record = read_json(path, dict)
    sweep = record.get("sweep")
    entries = sweep if isinstance(sweep, list) and all(isinstance(entry, dict) for entry in sweep) else [{}]
    if [entry.get("factor") for entry in entries] != list(candidates[: len(entries)]) or not (
        all("fitness" in entry and (entry["fitness"] is None or is_number(entry["fitness"])) for entry in entries)
        and is_number(record.get("factor"))
        and is_number(record.get("evaluations"))
    ):
        raise UserError(f"{path}: not the sweep of this search")
    return record
