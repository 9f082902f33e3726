"""Search a model's layer factors: `run_search(preset("quick"))`, or `python -m lpes_jax.search`."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from lpes_jax.curves import bezier_outline
from lpes_jax.errors import UserError
from lpes_jax.evaluation import BASELINE, PLAIN, results_record, rows, write_samples
from lpes_jax.factors import write_json
from lpes_jax.models.llama import load
from lpes_jax.models.llama.chat import make_chat
from lpes_jax.report.plots import factors_by_layer, u_curve
from lpes_jax.report.tables import console, markdown, position_table
from lpes_jax.search.loop import SearchResult, search
from lpes_jax.search.settings import SearchSettings, as_record, check, preset
from lpes_jax.tasks.chat import ChatTask
from lpes_jax.tasks.flags import tasks_of, title_of

__all__ = ["SearchResult", "SearchSettings", "preset", "run_search"]


def run_search(settings: SearchSettings) -> SearchResult:
    """Load the model, search, measure what was found on held-out questions, and leave the run's folder.

    Raises UserError where the settings, the model or the data cannot be used, before anything is searched.
    """
    started = time.time()
    check(settings)
    if settings.task == "perplexity":
        raise UserError("--task perplexity has no questions to search on; search on another task and evaluate on this one")
    tasks = tasks_of(settings, max_new_tokens=settings.max_new_tokens)
    titles = [title_of(settings, task) for task in tasks]
    loaded = load(settings.model, settings.dtype)
    chat = make_chat(
        loaded.tokenizer,
        apply_chat_template=settings.apply_chat_template,
        prompt_form=settings.prompt_form,
        system_prompt=settings.system_prompt,
    )
    if chat is not None:
        tasks = [ChatTask(task, chat.render) for task in tasks]
    identity = loaded.identity | {"chat": chat and chat.record}
    result = search(settings, loaded.model, loaded.tokenizer, tasks, identity, loaded.stop_ids)
    folder = settings.output_path
    config = as_record(settings) | {"model_identity": identity}
    records = [results_record(it.task, it.outcomes, it.places, config, started) for it in result.reports]
    evaluation = records[0] if len(records) == 1 else _together(titles, records)
    factors = replace(result.factors, evaluation=evaluation["methods"])
    factors.save(folder / "factors.json")
    write_samples(folder / "samples.jsonl", [outcome for report in result.reports for outcome in report.outcomes])
    write_json(folder / "results.json", evaluation)
    _report(replace(result, factors=factors), settings, folder, titles, loaded.identity["name"])
    return result


def _together(titles: Sequence[str], records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The records of several lengths as one: what a record has by task, it has by title."""
    merged = dict(records[-1])
    merged["results"] = {title: next(iter(it["results"].values())) for title, it in zip(titles, records, strict=True)}
    merged["methods"] = {title: it["methods"] for title, it in zip(titles, records, strict=True)}
    merged["n-samples"] = {title: next(iter(it["n-samples"].values())) for title, it in zip(titles, records, strict=True)}
    return merged


def _report(result: SearchResult, settings: SearchSettings, folder: Path, titles: Sequence[str], model: str) -> None:
    bezier = settings.curve == "bezier" and result.control_points is not None
    factors_by_layer(
        folder / "factors",
        result.factors.factors,
        result.control_points if settings.curve in ("bezier", "linear", "step") else None,
        np.asarray(bezier_outline(jnp.asarray(result.control_points, jnp.float32))) if bezier else None,
        f"{model}: factor by layer",
        result.factors.granularity,
        layers=tuple(result.factors.curve["layers"]) if result.factors.curve else None,
    )
    out, tables = console(), []
    for what, report in zip(titles, result.reports, strict=True):
        positions = [position for _, position in report.places]
        title = f"{model}, {what}, {len(report.outcomes[0].main)} held-out questions"
        drawn = [outcome for outcome in report.outcomes if outcome.candidate.name != PLAIN]
        curves = {
            _LABELS.get(outcome.candidate.name, outcome.candidate.name): (
                outcome.main.mean(axis=0).tolist(),
                len(outcome.main),
            )
            for outcome in drawn
        }
        name = "positions" if len(titles) == 1 else f"positions_{what.replace(' ', '_').replace('-', '_')}"
        u_curve(folder / name, positions, curves, title)
        tables.append(("" if len(titles) == 1 else f"{what}\n\n") + markdown(rows(report.outcomes), positions) + "\n")
        out.print(position_table(rows(report.outcomes), positions, title))
    (folder / "results.md").write_text("\n".join(tables), encoding="utf-8")
    search = result.factors.search
    out.print(
        f"{search['individuals']} individuals, {search['evaluations']} scored by the model, "
        f"{search['compilations']} compiled shapes, {search['seconds']:.0f} s. "
        f"'{PLAIN}' has no forced opener behind the prompt; p is against '{BASELINE}', over questions.",
        highlight=False,
    )
    out.print(f"run folder: {folder}", highlight=False, soft_wrap=True)


_LABELS = {"uniform": "tuned uniform factor", "pi": "mean of the factors (PI)", "lpes": "found factors (LPES)"}
