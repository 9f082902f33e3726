"""The verb profile: `run_profile`."""

import time
from pathlib import Path
from typing import Any

from lpes_jax import process
from lpes_jax.errors import UserError
from lpes_jax.evaluation import BASELINE, Candidate
from lpes_jax.factors import LayerFactors
from lpes_jax.mesh import make_mesh
from lpes_jax.models.llama import load
from lpes_jax.profile.checks import SHORTEST, check
from lpes_jax.profile.grid import Grid, ProfilePlan
from lpes_jax.profile.page import draw, record_of, tables
from lpes_jax.profile.text_loss import WINDOWS, text_loss, text_windows
from lpes_jax.report.html import write_page
from lpes_jax.report.progress import SearchProgress
from lpes_jax.report.tables import show
from lpes_jax.same_model import check_loaded
from lpes_jax.settings.profile import ProfileSettings
from lpes_jax.store import output
from lpes_jax.store.files import write_json, write_text
from lpes_jax.store.provenance import check_deterministic
from lpes_jax.tasks.perplexity import Window

_CEILING_SHARE = 0.08  # of the time, for further questions with only the fact
_REPORT_SECONDS = 10.0  # reserved for the plots and the page


def run_profile(settings: ProfileSettings) -> Grid:
    """Measure for the given time, write the folder, print the conclusion; return the measurements.

    The time of a command counts from its start, with imports, loading and the report.

    Raises UserError if the settings, the model or the factors are unusable.
    """
    started = process.started()
    check(settings)
    check_deterministic(settings.devices.deterministic)
    output.check(settings.run.output_path, "profile", overwrite=settings.run.overwrite)
    factors = None if settings.factors.factors is None else LayerFactors.load(settings.factors.factors)
    loaded = load(
        settings.run.model,
        settings.devices.dtype,
        make_mesh(settings.devices.model_axis),
        weight_format=settings.devices.weight_format,
    )
    candidates, factors_model = [Candidate(BASELINE)], None
    if factors is not None:
        factors_model = check_loaded(factors, loaded, str(settings.factors.factors), settings.factors.other_model)
        candidates.append(Candidate("factors", factors))
    window = loaded.model.config.max_position_embeddings
    plan = ProfilePlan(
        tasks=settings.grid.tasks,
        lengths=tuple(sorted(settings.grid.lengths)) or default_lengths(window),
        positions=settings.grid.positions,
        threshold=settings.judgement.threshold,
        confidence=settings.judgement.confidence,
        seed=settings.run.seed,
        key_length=8
        if settings.grid.key_length is None and settings.run.model == "tiny-retriever"
        else settings.grid.key_length,
    )
    if plan.lengths[-1] > window:
        raise UserError(f"--lengths {plan.lengths[-1]}: the model's window is {window} tokens; give lengths up to that")
    windows = text_windows(loaded, plan.lengths[-1], settings.grid.text, plan.seed)  # refused before anything is measured
    grid = Grid(loaded, plan, candidates, batch_size=settings.devices.batch_size)
    deadline = started + 60 * settings.judgement.minutes - _REPORT_SECONDS
    with SearchProgress(grid.prompts_of_first_blocks(), deadline=deadline) as progress:
        progress.note(f"profiling {loaded.identity['name']}")
        grid.on_prompts = progress.prompts
        grid.ceilings(time.time() + _CEILING_SHARE * (deadline - time.time()))
        text = _measure(grid, windows, settings, deadline, progress)
    found: dict[str, Any] = record_of(grid, text, _config(settings, grid), started)
    found["factors_model"] = factors_model
    with output.staged(settings.run.output_path) as folder:
        shown, pictures = tables(grid, found), draw(folder, grid, found)
        write_text(folder / "profile.md", shown)
        write_page(folder, "profile", found["says"][BASELINE], settings, found, shown, pictures)
        write_json(folder / "profile.json", found)
    show(*found["says"].values(), f"profile: {settings.run.output_path}")
    return grid


def default_lengths(window: int) -> tuple[int, ...]:
    """An eighth, a quarter, a half and all of the window, or of 8,192 tokens if that is less."""
    longest = min(window, 8192)
    return tuple(sorted({max(SHORTEST, longest // part) for part in (8, 4, 2, 1)}))


def _config(settings: ProfileSettings, grid: Grid) -> dict[str, Any]:
    config = {name: str(value) if isinstance(value, Path) else value for name, value in settings.flat().items()}
    config |= {"lengths": list(grid.plan.lengths), "key_length": grid.plan.key_length}
    return config | {"model_identity": grid.loaded.identity}


def _measure(
    grid: Grid, windows: list[Window], settings: ProfileSettings, deadline: float, progress: SearchProgress
) -> dict[str, Any] | None:
    """Measure blocks of questions until the deadline. The text's loss follows the first blocks, if time allows."""
    text, text_considered, skipped, before = None, False, set[int](), None
    while True:
        column = grid.next(skipped)
        if not text_considered and (column is None or column.blocks):
            text_considered, length, began = True, grid.plan.lengths[-1], time.time()
            if began + grid.seconds_of_text(WINDOWS * length) < deadline:
                progress.note(f"the loss of plain text in {length:,} tokens")
                text = text_loss(grid.loaded, grid.candidates, windows, settings.grid.text, settings.devices.batch_size)
                text["seconds"] = round(time.time() - began, 3)
        elif column is None:
            return text
        elif time.time() + grid.seconds(column) > deadline:
            skipped.add(id(column))
        else:
            if column.blocks:
                progress.skip(-grid.prompts_of_block(column))
            if column is not before:
                progress.note(f"{column.name} of {column.length:,} tokens")
            grid.add(column)
            before = column
