"""Table 11 and Appendix C: the paper's claim that gradient descent fails on layer factors and the GA does not, taken apart.

    python experiments/table11_gradient_vs_ga.py --num-pairs 5 --limit 100 --test-limit 200
    python experiments/table11_gradient_vs_ga.py --task mdqa --data nq-open-oracle.jsonl.gz --model MODEL --metrics prefix

The grid: {Bézier with 4 points, one free factor a layer} x {[1, 2] from 1.5 (the paper's), [0.5, 2] from 1} x seeds. In each
cell the GA with the paper's sizes and lattice runs twice, on accuracy (ties stay ties, as in the paper) and on the answers'
log-likelihood, and Adam on the log-likelihood: once with its own --steps, and once with as many as the prompts of the GA on
log-likelihood pay for. --equal-seconds adds one with as many as the seconds of that GA pay for.

A step counts for --passes-per-step forward passes of its minibatch (one forward, one that rematerialises, about two backward),
and each look at the validation prompts for one; a prompt counts as one whether it shares its beginning or not. The GA counts
the individuals that the model scored. Seconds are of the whole search, compilation included and, in the GA on accuracy, the
uniform factor's tuning; held-out measurement not; of a run that was cut off and resumed they are those of its last part.

Appendix C: three sets of 2,000 prompts, batches of 32, learning rate 1e-5, 1,875 steps, from 1.5 and from 1 (first seed), with
the distance that each factor moved.
"""

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from grid import (
    GridFlags,
    collect,
    figures,
    header,
    held_out,
    in_part,
    loaded_once,
    markdown_table,
    other_model,
    paper_row,
    record_of,
    row,
    run_cells,
    run_script,
    scores,
    show_p,
    write_tables,
)

from lpes_jax.evaluation import BASELINE, figures_of, slots_of
from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama import Loaded
from lpes_jax.search import SearchSettings
from lpes_jax.statistics import paired_permutation_test
from lpes_jax.tasks.flags import task_of

CURVES = ("bezier", "free")
BOXES: dict[str, dict[str, float]] = {
    "narrow": {"min_factor": 1.0, "max_factor": 2.0, "initial_factor": 1.5},
    "wide": {"min_factor": 0.5, "max_factor": 2.0, "initial_factor": 1.0},
}
BOX_TITLES = {"narrow": "[1, 2] from 1.5", "wide": "[0.5, 2] from 1"}
OPTIMISERS = {
    "ga_accuracy": "GA, accuracy",
    "ga_likelihood": "GA, log-likelihood",
    "gradient": "gradient",
    "gradient_prompts": "gradient, the GA's prompts",
    "gradient_seconds": "gradient, the GA's seconds",
}
STARTS = (1.5, 1.0)
PAPER = {
    "Vicuna-7B-v1.5, baseline": "70.4 58.0 55.4 55.4 60.4",
    "Vicuna-7B-v1.5, gradient-based": "67.4 54.0 51.2 52.8 55.8",
    "Qwen2.5-7B, baseline": "69.4 61.0 62.6 58.6 63.6",
    "Qwen2.5-7B, gradient-based": "68.7 56.6 57.6 55.8 57.8",
}


@dataclass(frozen=True, kw_only=True)
class Settings(GridFlags):
    """Which model, on what, and which parts."""

    output_path: Path = Path("runs/table11_gradient_vs_ga")
    preset: Literal["paper", "default", "quick"] = "default"
    seeds: tuple[int, ...] = (0, 1, 2)
    grid: bool = True
    """The grid of searches."""
    appendix: bool = True
    """Appendix C."""
    appendix_limit: int = 2000
    """Questions of Appendix C, each at three positions."""
    appendix_steps: int = 1875
    """Steps of Appendix C."""
    equal_seconds: bool = False
    """Another gradient run with as many steps as the GA's seconds pay for."""
    passes_per_step: float = 4.0
    """Forward passes that a step of the gradient counts for."""
    move_x: bool = False
    """The gradient moves the Bézier points' x as well, as the GA does."""


def main(s: Settings) -> None:
    """Run the cells of the part, and write the tables when all are finished."""
    groups = list(product(CURVES, BOXES, s.seeds)) if s.grid else []
    for number, group in enumerate(groups):
        if in_part(number, s.part):
            run_group(s, *group)
    appendix = appendix_cells(s) if s.appendix else {}
    run_cells({name: it for number, (name, it) in enumerate(appendix.items(), len(groups)) if in_part(number, s.part)}, s)
    moved_of = collect(appendix, s)
    tables, summary = [s.describe(other_model("Vicuna-7B-v1.5 with 10 and Qwen2.5-7B with 20 documents, 500 questions"))], {}
    if groups:
        table, summary["grid"] = grid_table(s)
        tables.append(table)
    if appendix:
        loaded = loaded_once(s.model, s.search().devices.dtype)
        of_starts = {name: appendix_figures(appendix[name], record, loaded) for name, record in moved_of.items()}
        tables += appendix_tables(s, of_starts)
        summary["appendix"] = of_starts
    write_tables(s, "Table 11: gradient against GA", tables, summary | {"paper": PAPER})


def group_cells(s: Settings, curve: str, box: str, seed: int) -> dict[str, SearchSettings]:
    """The searches of a group whose sizes are known; the others' sizes are the results of these."""
    common = s.search(curve=curve, seed=seed, y_step=0.1, tie_break=False, **BOXES[box])
    others = common.replace(uniform_candidates=1)  # the uniform factor is tuned once a group, in its first search
    return {
        "ga_accuracy": common.replace(move_x=False),
        "ga_likelihood": others.replace(fitness="log_likelihood", move_x=False),
        "gradient": others.replace(algorithm="gradient", move_x=s.move_x and curve == "bezier"),
    }


def run_group(s: Settings, curve: str, box: str, seed: int) -> dict[str, dict[str, Any]]:
    """Run a group's searches that are not finished, in the order in which they need each other; returns their records."""
    cells, done = group_cells(s, curve, box, seed), {}

    def run(name: str, settings: SearchSettings) -> None:
        cell = f"{curve}_{box}/{name}_seed{seed}"
        run_cells({cell: settings}, s)
        done[name] = record_of(s.output_path / cell, settings)

    for name, settings in cells.items():
        run(name, settings)
    gradient, ga = cells["gradient"], done["ga_likelihood"]
    run("gradient_prompts", gradient.replace(steps=steps_for_prompts(s, done["gradient"], prompts(s, ga))))
    if s.equal_seconds:
        run("gradient_seconds", gradient.replace(steps=steps_for_seconds(done["gradient"], seconds(ga))))
    return done


def seconds(record: dict[str, Any]) -> float:
    """What a search took, with compilation."""
    return record["factors"]["search"]["seconds"]


def prompts(s: Settings, record: dict[str, Any]) -> float:
    """Forward passes of one prompt that a search paid for, without the tuning of the uniform factor."""
    search = record["factors"]["search"]
    if search["algorithm"] == "ga":
        return search["evaluations_of_algorithm"] * search["limit"] * len(search["search_positions"])
    steps, looks = record["history"][-1]["step"], len(record["history"])
    return steps * search["prompts_a_step"] * s.passes_per_step + looks * search["prompts_a_look"]


def steps_for_prompts(s: Settings, record: dict[str, Any], budget: float) -> int:
    """Steps of a gradient run like that of the record, with their looks, that cost at most `budget` prompts."""
    search = record["factors"]["search"]
    cost_of_step = search["prompts_a_step"] * s.passes_per_step + search["prompts_a_look"] / search["look_every"]
    return max(1, int((budget - 2 * search["prompts_a_look"]) / cost_of_step))


def steps_for_seconds(record: dict[str, Any], budget: float) -> int:
    """Steps that take `budget` seconds at the pace of a run, whose start and compilations count once."""
    looks = record["history"][1:]
    first, last = looks[0], looks[-1]
    if last["step"] == first["step"]:
        return last["step"]
    pace = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
    return max(1, first["step"] + int((budget - first["seconds"]) / pace))


def grid_table(s: Settings) -> tuple[str, Any]:
    """One row for each curve, box and optimiser, with paired tests against the two GAs."""
    positions = s.search().questions.positions
    columns = [*header("", positions)[:-1], "p baseline", "p GA acc.", "p GA log-l.", "size", "1000 prompts", "seconds"]
    rows, summary, controls = [], {}, {}
    for curve, box in product(CURVES, BOXES):
        of_seeds = [run_group(s, curve, box, seed) for seed in s.seeds]
        controls |= {
            BASELINE: [figures(done["ga_accuracy"], BASELINE) for done in of_seeds],
            f"{BOX_TITLES[box]}: tuned uniform factor": [figures(done["ga_accuracy"], "uniform") for done in of_seeds],
        }
        for name in of_seeds[0]:
            records = [done[name] for done in of_seeds]
            title = f"{curve}, {BOX_TITLES[box]}: {OPTIMISERS[name]}"
            p = {}
            for ga in ("ga_accuracy", "ga_likelihood"):
                if not name.startswith("ga_"):
                    p[ga] = paired(records, [done[ga] for done in of_seeds])
            sizes = {
                "size": mean([size_of(record) for record in records]),
                "prompts": mean([prompts(s, record) for record in records]),
                "seconds": mean([seconds(record) for record in records]),
            }
            shown = [f"{sizes['size']:.0f}", f"{sizes['prompts'] / 1000:.1f}", f"{sizes['seconds']:.0f}"]
            tests = [show_p(p[ga]) if ga in p else "-" for ga in ("ga_accuracy", "ga_likelihood")]
            rows.append([*row(title, [figures(record) for record in records]), *tests, *shown])
            summary[title] = {
                "figures": [figures(record) for record in records],
                "factors": [record["factors"]["factors"] for record in records],
                "p_against": p,
                **sizes,
            }
    of_controls = [[*row(name, of_seeds), *["-"] * 5] for name, of_seeds in controls.items()]
    of_paper = [[*it, *["-"] * 5] for it in paper_rows()]
    explained = (
        "p GA acc. and p GA log-l.: paired permutation against the two GAs of the same curve, box and seed; question i of all "
        "seeds is drawn together. size: individuals that the model scored for the GA, or steps of the gradient; 1000 prompts: "
        f"forward passes of a prompt, a step of the gradient counting for {s.passes_per_step:g} of its minibatch; all three "
        "are means over seeds.\n"
    )
    return explained + "\n" + markdown_table(columns, of_controls + rows + of_paper), summary | {"controls": controls}


def paper_rows() -> list[list[str]]:
    """With the averages, which Table 11 leaves out."""
    return [paper_row(name, f"{values} {mean([*map(float, values.split())]):.1f}") for name, values in PAPER.items()]


def mean(values: list[float]) -> float:
    """As a Python float."""
    return float(np.mean(values))


def size_of(record: dict[str, Any]) -> int:
    """Individuals scored by the model, or steps."""
    search = record["factors"]["search"]
    return search["evaluations_of_algorithm"] if search["algorithm"] == "ga" else record["history"][-1]["step"]


def paired(ours: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """Paired permutation over questions; those of the same number in all seeds count as one, for with a file they are one."""
    of_ours, of_others = (np.concatenate([scores(it) for it in records], axis=1) for records in (ours, others))
    return paired_permutation_test(of_ours, of_others)


def appendix_cells(s: Settings) -> dict[str, SearchSettings]:
    """The paper's gradient baseline from both starts."""
    flags, sizes = replace(s, preset="paper", move_x=False), {"limit": s.appendix_limit, "steps": s.appendix_steps}
    return {
        f"appendix_c/from_{start}": flags.search(algorithm="gradient", initial_factor=start, seed=s.seeds[0], **sizes)
        for start in STARTS
    }


def appendix_figures(settings: SearchSettings, record: dict[str, Any], loaded: Loaded) -> dict[str, Any]:
    """How far the factors went in all steps, and what that did to held-out accuracy and to the loss."""
    first, last = record["history"][0], record["history"][-1]
    start, end = np.array(first["factors"]), np.array(last["factors"])
    outcomes = held_out(settings, loaded, {"start": LayerFactors(start), "end": LayerFactors(end)})
    return {
        "start": settings.space.initial_factor,
        "steps": last["step"],
        "moved": (end - start).tolist(),
        "loss": [first["task_losses"][0], last["task_losses"][0]],
        "figures": figures_of(list(outcomes.values()), slots_of(task_of(settings.task), settings.questions.positions)),
        "p_end_against_start": paired_permutation_test(outcomes["end"].main, outcomes["start"].main),
    }


def appendix_tables(s: Settings, of_starts: dict[str, dict[str, Any]]) -> list[str]:
    """The distances, and the accuracies at the last step, whatever the validation prompts would choose."""
    distances, rows = [], []
    for it in of_starts.values():
        moved = np.abs(it["moved"])
        distances.append(
            [
                f"{it['start']:g}",
                f"{it['steps']:,}",
                f"{moved.mean():.5f}",
                f"{moved.min():.5f} (layer {moved.argmin()})",
                f"{moved.max():.5f} (layer {moved.argmax()})",
                f"{it['loss'][0]:.4f}",
                f"{it['loss'][1]:.4f}",
                show_p(it["p_end_against_start"]),
            ]
        )
        if not rows:
            rows.append(row(BASELINE, [it["figures"][BASELINE]]))
        rows += [row(f"from {it['start']:g}: {when}", [it["figures"][when]]) for when in ("start", "end")]
    rows += paper_rows()
    columns = ["start", "steps", "mean distance", "least", "most", "loss at start", "loss at end", "p end against start"]
    title = (
        f"Appendix C: {s.appendix_limit} questions x 3 positions, batches of 32 drawn by weight, Adam at 1e-5, no choice of "
        "the best step. Distance: of a layer's factor from its start; loss: weighted -log p of the answer, validation prompts."
    )
    return [
        title + "\n\n" + markdown_table(columns, distances),
        markdown_table(header("", s.search().questions.positions), rows),
    ]


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
