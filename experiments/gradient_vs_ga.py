"""Table 11's searches and tables: gradient runs with as many steps as a GA's cost pays for, and Appendix C.

What is compared is said in specs/table11_gradient_vs_ga.toml; `python experiments/run_table.py table11` is the command.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from grid import (
    collect,
    figures,
    header,
    held_out,
    in_part,
    loaded_once,
    markdown_table,
    paper_row,
    record_of,
    row,
    run_cells,
    scores,
    show_p,
)
from table_spec import Spec, about, provenance

from lpes_jax.evaluation import BASELINE, slots_of
from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama import Loaded
from lpes_jax.results import figures_of
from lpes_jax.search import SearchSettings
from lpes_jax.statistics import paired_permutation_test
from lpes_jax.tasks.flags import task_of

GAS = ("ga_accuracy", "ga_likelihood")


def run(spec: Spec, s: Any) -> dict[str, Any]:
    """Run the searches of the part that are not finished; what summary.json holds of all. A part ends the program."""
    groups = list(product(spec.own["curves"], spec.own["boxes"], s.seeds)) if s.grid else []
    for number, group in enumerate(groups):
        if in_part(number, s.part):
            run_group(spec, s, *group)
    appendix = appendix_cells(spec, s) if s.appendix else {}
    run_cells({name: it for number, (name, it) in enumerate(appendix.items(), len(groups)) if in_part(number, s.part)}, s)
    records = collect(appendix, s)
    summary: dict[str, Any] = {"paper": spec.paper}
    if groups:
        summary["grid"], of_grid = grid_summary(spec, s)
        summary |= provenance(of_grid)
    if appendix:
        loaded = loaded_once(s.model, s.search().devices.dtype)
        summary["appendix"] = {name: appendix_figures(appendix[name], record, loaded) for name, record in records.items()}
        summary |= provenance(list(records.values()))
    return summary


def tables(spec: Spec, s: Any, summary: Mapping[str, Any]) -> list[str]:
    """The tables in Markdown, from what `run` left."""
    parts = [summary.get("about") or about(spec, s)]
    if "grid" in summary:
        parts.append(grid_table(spec, s, summary["grid"]))
    return parts + (appendix_tables(spec, s, summary["appendix"]) if "appendix" in summary else [])


def group_cells(spec: Spec, s: Any, curve: str, box: str, seed: int) -> dict[str, SearchSettings]:
    """The searches of a group whose sizes are known; the others' sizes are the results of these."""
    common = s.search(curve=curve, seed=seed, **spec.fixed, **spec.own["boxes"][box]["flags"])
    others = common.replace(uniform_candidates=1)  # the uniform factor is tuned once a group, in its first search
    return {
        "ga_accuracy": common.replace(move_x=False),
        "ga_likelihood": others.replace(fitness="log_likelihood", move_x=False),
        "gradient": others.replace(algorithm="gradient", move_x=s.move_x and curve == "bezier"),
    }


def run_group(spec: Spec, s: Any, curve: str, box: str, seed: int) -> dict[str, dict[str, Any]]:
    """Run a group's searches that are not finished, in the order in which they need each other; returns their records."""
    cells, done = group_cells(spec, s, curve, box, seed), {}

    def run_one(name: str, settings: SearchSettings) -> None:
        cell = f"{curve}_{box}/{name}_seed{seed}"
        run_cells({cell: settings}, s)
        done[name] = record_of(s.output_path / cell, settings)

    for name, settings in cells.items():
        run_one(name, settings)
    gradient, ga = cells["gradient"], done["ga_likelihood"]
    run_one("gradient_prompts", gradient.replace(steps=steps_for_prompts(s, done["gradient"], prompts(s, ga))))
    if s.equal_seconds:
        run_one("gradient_seconds", gradient.replace(steps=steps_for_seconds(done["gradient"], seconds(ga))))
    return done


def seconds(record: dict[str, Any]) -> float:
    """What a search took, with compilation."""
    return record["factors"]["search"]["seconds"]


def prompts(s: Any, record: dict[str, Any]) -> float:
    """Forward passes of one prompt that a search paid for, without the tuning of the uniform factor."""
    search = record["factors"]["search"]
    if search["algorithm"] == "ga":
        return search["evaluations_of_algorithm"] * search["limit"] * len(search["search_positions"])
    steps, looks = record["history"][-1]["step"], len(record["history"])
    return steps * search["prompts_a_step"] * s.passes_per_step + looks * search["prompts_a_look"]


def steps_for_prompts(s: Any, record: dict[str, Any], budget: float) -> int:
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


def grid_summary(spec: Spec, s: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures, sizes and paired tests of each curve, box and optimiser, and of the controls; and all records."""
    summary, controls, everything = {}, {}, []
    for curve, (box, it) in product(spec.own["curves"], spec.own["boxes"].items()):
        of_seeds = [run_group(spec, s, curve, box, seed) for seed in s.seeds]
        controls |= {
            BASELINE: [figures(done["ga_accuracy"], BASELINE) for done in of_seeds],
            f"{it['title']}: tuned uniform factor": [figures(done["ga_accuracy"], "uniform") for done in of_seeds],
        }
        for name in of_seeds[0]:
            records = [done[name] for done in of_seeds]
            against = () if name in GAS else GAS
            summary[f"{curve}, {it['title']}: {spec.own['optimisers'][name]}"] = {
                "figures": [figures(record) for record in records],
                "factors": [record["factors"]["factors"] for record in records],
                "p_against": {ga: paired(records, [done[ga] for done in of_seeds]) for ga in against},
                "size": mean([size_of(record) for record in records]),
                "prompts": mean([prompts(s, record) for record in records]),
                "seconds": mean([seconds(record) for record in records]),
            }
            everything += records
    return summary | {"controls": controls}, everything


def grid_table(spec: Spec, s: Any, summary: Mapping[str, Any]) -> str:
    """One row for each curve, box and optimiser, with paired tests against the two GAs."""
    rows = [[*row(title, of_seeds), *["-"] * 5] for title, of_seeds in summary["controls"].items()]
    for title, it in summary.items():
        if title != "controls":
            tests = [show_p(it["p_against"][ga]) if ga in it["p_against"] else "-" for ga in GAS]
            sizes = [f"{it['size']:.0f}", f"{it['prompts'] / 1000:.1f}", f"{it['seconds']:.0f}"]
            rows.append([*row(title, it["figures"]), *tests, *sizes])
    rows += [[*it, *["-"] * 5] for it in paper_rows(spec)]
    positions = summary["controls"][BASELINE][0]["acc_by_position"]
    columns = [*header("", positions)[:-1], "p baseline", "p GA acc.", "p GA log-l.", "size", "1000 prompts", "seconds"]
    explained = (
        "p GA acc. and p GA log-l.: paired permutation against the two GAs of the same curve, box and seed; question i of all "
        "seeds is drawn together. size: individuals that the model scored for the GA, or steps of the gradient; 1000 prompts: "
        f"forward passes of a prompt, a step of the gradient counting for {s.passes_per_step:g} of its minibatch; all three "
        "are means over seeds.\n"
    )
    return explained + "\n" + markdown_table(columns, rows)


def paper_rows(spec: Spec) -> list[list[str]]:
    """With the averages, which Table 11 leaves out."""
    return [paper_row(name, f"{values} {mean([*map(float, values.split())]):.1f}") for name, values in spec.paper.items()]


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


def appendix_cells(spec: Spec, s: Any) -> dict[str, SearchSettings]:
    """The paper's gradient baseline from both starts."""
    flags, sizes = replace(s, preset="paper", move_x=False), {"limit": s.appendix_limit, "steps": s.appendix_steps}
    return {
        f"appendix_c/from_{start}": flags.search(algorithm="gradient", initial_factor=start, seed=s.seeds[0], **sizes)
        for start in spec.own["starts"]
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


def appendix_tables(spec: Spec, s: Any, of_starts: Mapping[str, dict[str, Any]]) -> list[str]:
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
    rows += paper_rows(spec)
    positions = next(iter(of_starts.values()))["figures"][BASELINE]["acc_by_position"]
    columns = ["start", "steps", "mean distance", "least", "most", "loss at start", "loss at end", "p end against start"]
    title = (
        f"Appendix C: {s.appendix_limit} questions x 3 positions, batches of 32 drawn by weight, Adam at 1e-5, no choice of "
        "the best step. Distance: of a layer's factor from its start; loss: weighted -log p of the answer, validation prompts."
    )
    return [title + "\n\n" + markdown_table(columns, distances), markdown_table(header("", positions), rows)]
