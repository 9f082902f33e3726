"""The verb search: `run_search`."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from lpes_jax import hosts
from lpes_jax.curves import bezier_outline
from lpes_jax.evaluation import BASELINE, PLAIN
from lpes_jax.factors import LayerFactors
from lpes_jax.mark import refuse_marked
from lpes_jax.mesh import make_mesh
from lpes_jax.models.llama import Loaded, load
from lpes_jax.models.llama.chat import make_chat
from lpes_jax.models.llama.eight_bits import check_eight_bits
from lpes_jax.report.html import write_page
from lpes_jax.report.plots import factors_by_layer, search_history, u_curve
from lpes_jax.report.tables import ScreenTable, by_task, differences, markdown, position_table, show
from lpes_jax.results import results_record, rows, write_samples
from lpes_jax.same_model import check_loaded
from lpes_jax.search.checks import check, tasks_asked
from lpes_jax.search.loop import SearchResult, search
from lpes_jax.search.mixture import file_stem
from lpes_jax.settings.search import SearchSettings, as_record, preset_values
from lpes_jax.store import output
from lpes_jax.store.files import write_json, write_text
from lpes_jax.store.provenance import check_deterministic
from lpes_jax.store.run_folder import RunFolder
from lpes_jax.tasks.chat import ChatTask
from lpes_jax.tasks.flags import title_of

_RACE_IS_DEPRECATED = "note: --race is deprecated and will be removed: it saves prompts, but where it was measured no time"


def run_search(settings: SearchSettings, loaded: Loaded | None = None, measured: dict[Any, Any] | None = None) -> SearchResult:
    """Load the model, search, measure the found factors on held-out questions, and write the run's folder.

    A run that is interrupted while it measures on held-out questions repeats that measurement when it is resumed.

    Args:
        settings: The settings of the search.
        loaded: The result of `load` for the settings' model, dtype and mesh, to run several searches on one model.
        measured: A dict that several searches share, empty at first, so that common measurements are made once.

    Returns:
        The result of the search.

    Raises:
        UserError: The settings, the model or the data are unusable. Raised before the search starts.
        Interrupted: SIGINT or SIGTERM arrived (a KeyboardInterrupt). The current batch is scored and saved; `resume` continues.
    """
    started = time.time()
    check(settings)
    if settings.ga.race:
        print(_RACE_IS_DEPRECATED, file=sys.stderr)
    check_deterministic(settings.devices.deterministic)
    if settings.devices.score_dtype is not None:
        check_eight_bits(settings.devices.score_dtype)
    run = settings.run
    hosts.from_first(lambda: output.check(run.output_path, "search", overwrite=run.overwrite, resume=run.resume))
    mixture, tasks = tasks_asked(settings)
    titles = [title_of(settings.task, task) for task in tasks] if mixture is None else mixture.titles
    start = None if settings.start.initial_factors is None else LayerFactors.load(settings.start.initial_factors)
    loaded = loaded or load(
        run.model, settings.devices.dtype, make_mesh(settings.devices.model_axis), weight_format=settings.devices.weight_format
    )
    refuse_marked(
        loaded.model.config.mark, f"--model {loaded.identity['name']}"
    )  # factors found for it could not be used with it
    chat = make_chat(loaded.tokenizer, **settings.prompt.flat())
    if chat is not None:
        tasks = [ChatTask(task, chat.render) for task in tasks]
        mixture = mixture and mixture.with_tasks(lambda task: ChatTask(task, chat.render))
    identity = loaded.identity | {"chat": chat and chat.record}
    mixture_record = mixture.record() if mixture else {}
    config = as_record(settings) | {"model_identity": identity} | ({"mixture": mixture_record} if mixture else {})
    if start is not None:
        start_flag = f"--initial-factors {settings.start.initial_factors}"
        config["factors_model"] = check_loaded(start, loaded, start_flag, settings.start.other_model)
    shown: list[ScreenTable | str] = []

    def finish(result: SearchResult, folder: RunFolder) -> SearchResult:
        records = [results_record(report.task, report.outcomes, report.slots, config, started) for report in result.reports]
        evaluation = records[0] if len(records) == 1 and mixture is None else _together(titles, records)
        if mixture is not None:
            evaluation["data_sha256"] = {
                title: record["data_sha256"] for title, record in mixture_record.items() if "data" in record
            }
            evaluation["prompts_sha256"] = {
                title: record["prompts_sha256"] for title, record in zip(titles, records, strict=True)
            }
        evaluation |= {"selection": result.selection}
        result = replace(result, factors=replace(result.factors, evaluation=evaluation["methods"]))
        result.factors.save(folder.path / "factors.json")
        outcomes = [outcome for report in result.reports for outcome in report.outcomes]
        outcome_titles = [report.title for report in result.reports for _ in report.outcomes] if mixture else []
        write_samples(folder.path / "samples.jsonl", outcomes, outcome_titles)
        name = loaded.identity["name"]
        text, pictures, parts = _report(result, settings, folder.path, titles, name, [record["methods"] for record in records])
        history = [json.loads(line) for line in folder.history_path.read_text(encoding="utf-8").splitlines()]
        named = titles if mixture else []
        pictures["All individuals"] = search_history(folder.path / "history", history, f"{name}: {settings.algorithm}", named)[
            1
        ]
        head = f"Search: {name}, {', '.join(titles)}"
        from_file = settings.task.mixture is not None
        given = preset_values(run.preset, settings.algorithm, mixture=from_file)
        write_page(folder.path, "search", head, settings, evaluation, text, pictures, result.factors.search, given)
        folder.settle()
        write_json(folder.path / "results.json", evaluation)  # written last: if it exists, everything does
        shown.extend(parts)
        return result

    asked = tasks if mixture is None else mixture
    result = search(settings, loaded.model, loaded.tokenizer, asked, identity, loaded.stop_ids, finish, measured)
    if not result.reports:
        shown.append(f"the run in {settings.run.output_path} is complete, nothing was done")
    show(*shown)
    return result


def _together(titles: Sequence[str], records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the records of several lengths; entries by task become entries by title."""
    merged = dict(records[-1])
    merged["results"] = {title: next(iter(record["results"].values())) for title, record in zip(titles, records, strict=True)}
    merged["methods"] = {title: record["methods"] for title, record in zip(titles, records, strict=True)}
    merged["n-samples"] = {
        title: next(iter(record["n-samples"].values())) for title, record in zip(titles, records, strict=True)
    }
    return merged


def _report(
    result: SearchResult,
    settings: SearchSettings,
    folder: Path,
    titles: Sequence[str],
    model: str,
    figures: Sequence[dict[str, Any]],
) -> tuple[str, dict[str, Path], list[ScreenTable | str]]:
    """Write results.md and the plots. Returns the text, the plots by their captions, and the text to print at the end."""
    drawn_numbers = _numbers_by_layer(result, settings, folder, model)
    shown: list[ScreenTable | str] = []
    tables: list[str] = []
    pictures: dict[str, Path] = {}
    for number, (title, report, methods) in enumerate(zip(titles, result.reports, figures, strict=True), 1):
        positions = [position for _, position in report.slots]
        heading = f"{model}, {title}, {len(report.outcomes[0].main)} held-out questions"
        drawn = [outcome for outcome in report.outcomes if outcome.candidate.name != PLAIN]
        curves = {
            _LABELS.get(outcome.candidate.name, outcome.candidate.name): (
                outcome.main.mean(axis=0).tolist(),
                len(outcome.main),
            )
            for outcome in drawn
        }
        name = "positions" if len(titles) == 1 else f"positions_{file_stem(title)}"
        name = f"positions_{number}_{file_stem(title)[:60]}" if report.title else name  # titles may be long and similar
        pictures[f"Accuracy by position: {title}"] = u_curve(folder / name, positions, curves, heading)[1]
        tables += [f"{title}\n"] if len(titles) > 1 or report.title else []
        for metric in report.outcomes[0].scores if report.title else [None]:
            table_rows = rows(report.outcomes, metric)
            tables += [f"{metric}\n"] if report.title else []
            tables.append(f"{markdown(table_rows, positions)}\n")
            shown.append(position_table(table_rows, positions, f"{heading}{f': {metric}' if report.title else ''}"))
        tables.append(f"{differences(methods)}\n")
    if "tasks" in result.selection:
        searched = by_task(result.selection["tasks"])
        tables += ["The search's own questions, as the model is and with the found factors\n", f"{searched}\n"]
        shown.append(searched)
    luck = _winners_curse(result.selection)
    if settings.devices.score_dtype is not None:
        luck += (
            f" The search scored with {settings.devices.score_dtype} products (--score-dtype); the held-out figures are of the "
            "model in its own dtype."
        )
    tables.append(f"{luck}\n")
    text = "\n".join(tables)
    write_text(folder / "results.md", text)
    search = result.factors.search
    shown.append(
        f"{search['individuals']} individuals, {search['evaluations']} scored by the model, "
        f"{search['prompts_scored']:,} prompts scored, {search['seconds']:.0f} s. "
        f"'{PLAIN}' has no forced opener after the prompt; p is against '{BASELINE}', over questions."
    )
    shown += [luck, f"run folder: {folder}"]
    return text, pictures | drawn_numbers, shown


def _numbers_by_layer(result: SearchResult, settings: SearchSettings, folder: Path, model: str) -> dict[str, Path]:
    """Plots of the learnt factors and gains, by their captions."""
    found, pictures = result.factors, {}
    learnt = ("factors", "gains") if settings.space.learn == "both" else (settings.space.learn,)
    columns = {"factors": (found.factors, found.granularity), "gains": (found.gains, found.gains_granularity)}
    for index, name in enumerate(learnt):
        values, granularity = columns[name]
        assert values is not None and granularity is not None  # learnt numbers exist
        points, outline = None, None
        if result.control_points is not None and settings.space.curve in ("bezier", "linear", "step"):
            points = result.control_points[:, [0, 1 + index]]
            if settings.space.curve == "bezier":
                outline = np.array(bezier_outline(jnp.asarray(points, jnp.float32)))
            if name == "factors" and settings.space.parameter == "multiplier":
                with np.errstate(divide="ignore"):
                    for drawn in (points, outline):
                        if drawn is not None:
                            drawn[:, 1] = 1 / drawn[:, 1]
        _, pictures[f"{name.capitalize()} by layer"] = factors_by_layer(
            folder / name,
            values,
            points,
            outline,
            f"{model}: {name.removesuffix('s')} by layer",
            granularity,
            layers=tuple(found.curve["layers"]) if found.curve else None,
            what="gain" if name == "gains" else "factor",
        )
    return pictures


def _winners_curse(selection: dict[str, Any]) -> str:
    """A sentence on how far the search score overestimates the result."""
    chosen = f"Accuracy by the search's weights: the found factors, the best of {selection['chosen_of']}, have "
    chosen += f"{100 * selection['accuracy_where_chosen']:.1f} % on the questions that they were chosen on"
    curse = "the best of many is partly the luckiest (winner's curse)"
    if "baseline_held_out" not in selection:
        return f"{chosen}, of which some is luck, as {curse}: quote the held-out figures."
    held_out, baseline = (f"{100 * selection[name]:.1f} %" for name in ("accuracy_held_out", "baseline_held_out"))
    return f"{chosen} and {held_out} on held-out ones (baseline {baseline}). Quote the second: {curse}."


_LABELS = {"uniform": "tuned uniform factor", "pi": "mean of the factors (PI)", "lpes": "found factors (LPES)"}
