"""Search a model's layer factors: `run_search(preset("quick"))`, or `python -m lpes_jax.search`."""

import time
from dataclasses import replace
from pathlib import Path

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
from lpes_jax.tasks.flags import task_of, title_of

__all__ = ["SearchResult", "SearchSettings", "preset", "run_search"]


def run_search(settings: SearchSettings) -> SearchResult:
    """Load the model, search, measure what was found on held-out questions, and leave the run's folder.

    Raises UserError where the settings, the model or the data cannot be used, before anything is searched.
    """
    started = time.time()
    check(settings)
    task = task_of(settings, max_new_tokens=settings.max_new_tokens)
    if settings.task == "perplexity":
        raise UserError("--task perplexity has no questions to search on; search on another task and evaluate on this one")
    what = title_of(settings, task)
    loaded = load(settings.model, settings.dtype)
    chat = make_chat(
        loaded.tokenizer,
        apply_chat_template=settings.apply_chat_template,
        prompt_form=settings.prompt_form,
        system_prompt=settings.system_prompt,
    )
    if chat is not None:
        task = ChatTask(task, chat.render)
    identity = loaded.identity | {"chat": chat and chat.record}
    result = search(settings, loaded.model, loaded.tokenizer, task, identity, loaded.stop_ids)
    folder = settings.output_path
    evaluation = results_record(
        task, result.outcomes, result.places, as_record(settings) | {"model_identity": identity}, started
    )
    factors = replace(result.factors, evaluation=evaluation["methods"])
    factors.save(folder / "factors.json")
    write_samples(folder / "samples.jsonl", result.outcomes)
    write_json(folder / "results.json", evaluation)
    _report(replace(result, factors=factors), settings, folder, f"{loaded.identity['name']}, {what}", loaded.identity["name"])
    return result


def _report(result: SearchResult, settings: SearchSettings, folder: Path, title: str, model: str) -> None:
    positions = [position for _, position in result.places]
    table_rows = rows(result.outcomes)
    title = f"{title}, {len(result.outcomes[0].main)} held-out questions"
    u_curve(
        folder / "positions",
        positions,
        {
            _LABELS.get(outcome.candidate.name, outcome.candidate.name): (
                outcome.main.mean(axis=0).tolist(),
                len(outcome.main),
            )
            for outcome in result.outcomes
            if outcome.candidate.name != PLAIN
        },
        title,
    )
    bezier = settings.curve == "bezier"
    factors_by_layer(
        folder / "factors",
        result.factors.factors,
        result.control_points if settings.curve not in ("free", "authors") else None,
        np.asarray(bezier_outline(jnp.asarray(result.control_points, jnp.float32))) if bezier else None,
        f"{model}: factor by layer",
        layers=tuple(result.factors.curve["layers"]) if result.factors.curve else None,
    )
    (folder / "results.md").write_text(markdown(table_rows, positions) + "\n", encoding="utf-8")
    out = console()
    out.print(position_table(table_rows, positions, title))
    search = result.factors.search
    out.print(
        f"{search['individuals']} individuals, {search['evaluations']} scored by the model, "
        f"{search['compilations']} compiled shapes, {search['seconds']:.0f} s. "
        f"'{PLAIN}' has no forced opener behind the prompt; p is against '{BASELINE}', over questions.",
        highlight=False,
    )
    out.print(f"run folder: {folder}", highlight=False, soft_wrap=True)


_LABELS = {"uniform": "tuned uniform factor", "pi": "mean of the factors (PI)", "lpes": "found factors (LPES)"}
