"""Table 11's searches and tables: gradient runs with as many steps as cost the same as a GA, and Appendix C.

specs/table11_gradient_vs_ga.toml describes the comparison; the command is `python experiments/run_table.py table11`.
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

from lpes_jax.errors import UserError
from lpes_jax.evaluation import BASELINE, slots_of
from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama import Loaded
from lpes_jax.results import figures_of
from lpes_jax.search import SearchSettings
from lpes_jax.statistics import paired_permutation_test
from lpes_jax.tasks.flags import task_of

GAS = ("ga_accuracy", "ga_likelihood")


def run(spec: Spec, s: Any) -> dict[str, Any]:
    """Run the unfinished searches of the part; returns the contents of summary.json. A part ends the program."""
    for flag, chosen, known in (("boxes", s.boxes, spec.own["boxes"]), ("curves", s.curves, spec.options["curves"]["default"])):
        if unknown := [name for name in chosen if name not in known]:
            raise UserError(f"--{flag} {unknown[0]}: the {flag} are {', '.join(known)}")
    groups = list(product(s.curves, s.boxes, s.seeds)) if s.grid else []
    for number, group in enumerate(groups):
        if in_part(number, s.part):
            run_group(spec, s, *group)
    appendix = appendix_cells(spec, s) if s.appendix else {}
    own_part = {name: cell for number, (name, cell) in enumerate(appendix.items(), len(groups)) if in_part(number, s.part)}
    run_cells(own_part, s)
    records = collect(appendix, s)
    summary: dict[str, Any] = {"paper": spec.paper}
    if groups:
        summary["grid"], grid_records = grid_summary(spec, s)
        summary |= provenance(grid_records)
    if appendix:
        loaded = loaded_once(s.model, s.search().devices.dtype, s.search().devices.weight_format)
        summary["appendix"] = {name: appendix_figures(appendix[name], record, loaded) for name, record in records.items()}
        summary |= provenance(list(records.values()))
    return summary


def tables(spec: Spec, s: Any, summary: Mapping[str, Any]) -> list[str]:
    """The tables in Markdown, from the result of `run`."""
    parts = [summary.get("about") or about(spec, s)]
    if "grid" in summary:
        parts.append(grid_table(spec, s, summary["grid"]))
    return parts + (appendix_tables(spec, s, summary["appendix"]) if "appendix" in summary else [])


def group_cells(spec: Spec, s: Any, curve: str, box: str, seed: int) -> dict[str, SearchSettings]:
    """A group's searches of known size; the sizes of its others depend on the results of these."""
    common = s.search(curve=curve, seed=seed, **spec.fixed, **spec.own["boxes"][box]["flags"])
    others = common.replace(uniform_candidates=1)  # the uniform factor is tuned once per group, in its first search
    return {
        "ga_accuracy": common.replace(move_x=False),
        "ga_likelihood": others.replace(fitness="log_likelihood", move_x=False),
        "gradient": others.replace(algorithm="gradient", move_x=s.move_x and curve == "bezier"),
    }


def run_group(spec: Spec, s: Any, curve: str, box: str, seed: int) -> dict[str, dict[str, Any]]:
    """Run a group's unfinished searches in the order of their dependencies; returns all of its records."""
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
    """The seconds of a search, including compilation."""
    return record["factors"]["search"]["seconds"]


def prompts(s: Any, record: dict[str, Any]) -> float:
    """The cost of a search in forward passes of one prompt, without tuning the uniform factor."""
    search = record["factors"]["search"]
    if search["algorithm"] == "ga":
        return search["evaluations_of_algorithm"] * search["limit"] * len(search["search_positions"])
    steps, measurements = record["history"][-1]["step"], len(record["history"])
    return steps * search["prompts_a_step"] * s.passes_per_step + measurements * search["prompts_a_look"]


def steps_for_prompts(s: Any, record: dict[str, Any], budget: float) -> int:
    """Steps of a gradient run like the record's, including validations, that cost at most `budget` prompts."""
    search = record["factors"]["search"]
    cost_of_step = search["prompts_a_step"] * s.passes_per_step + search["prompts_a_look"] / search["look_every"]
    return max(1, int((budget - 2 * search["prompts_a_look"]) / cost_of_step))


def steps_for_seconds(record: dict[str, Any], budget: float) -> int:
    """Steps that take `budget` seconds at the rate of a run, whose start and compilations count once."""
    measurements = record["history"][1:]
    first, last = measurements[0], measurements[-1]
    if last["step"] == first["step"]:
        return last["step"]
    pace = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
    return max(1, first["step"] + int((budget - first["seconds"]) / pace))


def grid_summary(spec: Spec, s: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures, sizes and paired tests of each curve, box and optimiser, and of the controls; also returns all records."""
    summary, controls, everything = {}, {}, []
    for curve, box in product(s.curves, s.boxes):
        described = spec.own["boxes"][box]
        groups = [run_group(spec, s, curve, box, seed) for seed in s.seeds]
        controls |= {
            BASELINE: [figures(group["ga_accuracy"], BASELINE) for group in groups],
            f"{described['title']}: tuned uniform factor": [figures(group["ga_accuracy"], "uniform") for group in groups],
        }
        for name in groups[0]:
            records = [group[name] for group in groups]
            against = () if name in GAS else GAS
            summary[f"{curve}, {described['title']}: {spec.own['optimisers'][name]}"] = {
                "figures": [figures(record) for record in records],
                "factors": [record["factors"]["factors"] for record in records],
                "p_against": {ga: paired(records, [group[ga] for group in groups]) for ga in against},
                "size": mean([size_of(record) for record in records]),
                "prompts": mean([prompts(s, record) for record in records]),
                "seconds": mean([seconds(record) for record in records]),
            }
            everything += records
    return summary | {"controls": controls}, everything


def grid_table(spec: Spec, s: Any, summary: Mapping[str, Any]) -> str:
    """One row per curve, box and optimiser, with paired tests against the two GAs."""
    rows = [[*row(title, seeds), *["-"] * 5] for title, seeds in summary["controls"].items()]
    for title, entry in summary.items():
        if title != "controls":
            tests = [show_p(entry["p_against"][ga]) if ga in entry["p_against"] else "-" for ga in GAS]
            sizes = [f"{entry['size']:.0f}", f"{entry['prompts'] / 1000:.1f}", f"{entry['seconds']:.0f}"]
            rows.append([*row(title, entry["figures"]), *tests, *sizes])
    rows += [[*paper, *["-"] * 5] for paper in paper_rows(spec)]
    positions = summary["controls"][BASELINE][0]["acc_by_position"]
    columns = [*header("", positions)[:-1], "p baseline", "p GA acc.", "p GA log-l.", "size", "1000 prompts", "seconds"]
    explained = (
        "p GA acc. and p GA log-l.: paired permutation against the two GAs of the same curve, box and seed; question i is "
        "permuted together in all seeds. size: individuals that the model scored for the GA, or steps of the gradient. 1000 "
        f"prompts: forward passes of a prompt, with {s.passes_per_step:g} passes per prompt of a gradient step. All three "
        "are means over seeds.\n"
    )
    return explained + "\n" + markdown_table(columns, rows)


def paper_rows(spec: Spec) -> list[list[str]]:
    """The paper's rows with the averages, which Table 11 does not print."""
    return [paper_row(name, f"{values} {mean([*map(float, values.split())]):.1f}") for name, values in spec.paper.items()]


def mean(values: list[float]) -> float:
    """The mean as a Python float."""
    return float(np.mean(values))


def size_of(record: dict[str, Any]) -> int:
    """Individuals scored by the model, or steps of the gradient."""
    search = record["factors"]["search"]
    return search["evaluations_of_algorithm"] if search["algorithm"] == "ga" else record["history"][-1]["step"]


def paired(ours: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """Paired permutation over questions; those of the same number in all seeds count as one, as they are the same in a file."""
    first, second = (np.concatenate([scores(record) for record in records], axis=1) for records in (ours, others))
    return paired_permutation_test(first, second)


def appendix_cells(spec: Spec, s: Any) -> dict[str, SearchSettings]:
    """The paper's gradient baseline from both starts."""
    flags, sizes = replace(s, preset="paper", move_x=False), {"limit": s.appendix_limit, "steps": s.appendix_steps}
    return {
        f"appendix_c/from_{start}": flags.search(algorithm="gradient", initial_factor=start, seed=s.seeds[0], **sizes)
        for start in spec.own["starts"]
    }


def appendix_figures(settings: SearchSettings, record: dict[str, Any], loaded: Loaded) -> dict[str, Any]:
    """How far the factors moved in all steps, and the effect on held-out accuracy and on the loss."""
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


def appendix_tables(spec: Spec, s: Any, starts: Mapping[str, dict[str, Any]]) -> list[str]:
    """The distances, and the accuracies at the last step, without a choice of the best step."""
    distances, rows = [], []
    for entry in starts.values():
        moved = np.abs(entry["moved"])
        distances.append(
            [
                f"{entry['start']:g}",
                f"{entry['steps']:,}",
                f"{moved.mean():.5f}",
                f"{moved.min():.5f} (layer {moved.argmin()})",
                f"{moved.max():.5f} (layer {moved.argmax()})",
                f"{entry['loss'][0]:.4f}",
                f"{entry['loss'][1]:.4f}",
                show_p(entry["p_end_against_start"]),
            ]
        )
        if not rows:
            rows.append(row(BASELINE, [entry["figures"][BASELINE]]))
        rows += [row(f"from {entry['start']:g}: {when}", [entry["figures"][when]]) for when in ("start", "end")]
    rows += paper_rows(spec)
    positions = next(iter(starts.values()))["figures"][BASELINE]["acc_by_position"]
    columns = ["start", "steps", "mean distance", "least", "most", "loss at start", "loss at end", "p end against start"]
    title = (
        f"Appendix C: {s.appendix_limit} questions x 3 positions, batches of 32 drawn by weight, Adam at 1e-5, no choice of "
        "the best step. Distance: of a layer's factor from its start; loss: weighted -log p of the answer, validation prompts."
    )
    return [title + "\n\n" + markdown_table(columns, distances), markdown_table(header("", positions), rows)]
