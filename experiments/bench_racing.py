"""Racing: the same searches with and without `--race`, on several seeds: results, prompts and seconds.

    python experiments/bench_racing.py --model tiny-retriever --num-pairs 8 --limit 48 --test-limit 40 --seeds 0 1 2
    python experiments/bench_racing.py --model qwen2.5-coder-0.5b-instruct --preset default --num-pairs 20 --limit 120 \
        --haystack-queries 1 4 --fitnesses accuracy log_likelihood --seeds 0 1 2 --replay

The two searches of a seed have the same questions and random numbers. Those of the genetic algorithm are identical, individual
for individual, until a race drops one by mistake. `parts at` is the first generation with a different individual. `mistakes`
counts the individuals dropped before it that would have become parents, by their fitness in the other search. p is the paired
permutation test over the held-out questions of all seeds, between the race's result and the other search's. Results are equal
if all pairs have the same best individual.

Seconds are those of the search, including uniform factors but not the held-out report. Every search runs twice, into `first`,
then `second`; the seconds are those of the second run, which finds the first one's programs compiled. With `--no-warm` it runs
once, and seconds include compilation. Run it on one device that nothing else uses.

`--haystack-queries` repeats everything with these numbers of questions per haystack. These share a prefix, so their prompts
cost less, but a race counts a haystack as one unit. `--replay` scores all individuals of the genetic algorithm's whole searches
again and replays their generations: the prompts of a race with the test of `racing.py` (`paired`), and with control variates
(`controlled`): the differences to the bar are regressed on what is known on all questions: the values of the worst parent, the
mean values of all parents, and the parents' mean probability of the answers (the likelihood). The estimate of the difference on
all questions is the regression's at the controls' means over all questions; its error is that of the residuals. A replay does
not change the course of the search. Its seconds are estimated, as those of the race times the ratio of the prompts.

Letters: P individuals, Q questions, U units, C controls.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from grid import (
    GridFlags,
    end_part,
    figures,
    in_part,
    loaded_once,
    markdown_table,
    record_of,
    run_cells,
    run_script,
    scores,
    show_p,
    write_tables,
)
from jaxtyping import Bool, Float, Int
from scipy.special import stdtrit

from lpes_jax.evaluation import slots_of
from lpes_jax.search.objective import Objective
from lpes_jax.search.racing import CONFIDENCE, Bar, Race, hopeless
from lpes_jax.search.scorers import make_staged_scorer
from lpes_jax.settings.search import SearchSettings
from lpes_jax.statistics import paired_permutation_test
from lpes_jax.store.provenance import environment
from lpes_jax.tasks.flags import task_of

# (values so far, values to compare with, units, the most of a verdict, controls on all units) -> who is dropped
Test = Callable[[np.ndarray, np.ndarray, int, float, np.ndarray], Bool[np.ndarray, "P"]]


@dataclass(frozen=True, kw_only=True)
class Settings(GridFlags):
    """The model, the questions and the algorithms."""

    output_path: Path = Path("runs/bench_racing")
    preset: Literal["paper", "default", "quick"] = "quick"
    algorithms: tuple[str, ...] = ("ga",)
    """The algorithms."""
    fitnesses: tuple[Literal["accuracy", "log_likelihood"], ...] = ("accuracy",)
    """The fitnesses."""
    haystack_queries: tuple[int, ...] = (1,)
    """Questions per haystack; each number is a set of searches."""
    warm: bool = True
    """Run every search twice and count the second run's seconds."""
    replay: bool = False
    """Replay the genetic algorithm's generations with other tests."""


def main(s: Settings) -> None:
    """Run the pairs of searches and write the table."""
    variants = list(itertools.product(s.algorithms, s.fitnesses, s.haystack_queries))
    cells: dict[str, SearchSettings] = {}
    for (name, fitness, queries), seed, race in itertools.product(variants, s.seeds, (False, True)):
        how = {"algorithm": name, "fitness": fitness, "race": race, "seed": seed}
        how |= {"queries_per_haystack": queries} if queries > 1 else {}
        cells[f"{name}_{fitness}_{queries}/{'race' if race else 'whole'}/seed{seed}"] = s.search(**how)
    for number, (name, cell) in enumerate(cells.items()):
        if in_part(number, s.part):
            run_cells({f"{run}/{name}": cell for run in (("first", "second") if s.warm else ("first",))}, s)
    end_part(s.part)
    last = "second" if s.warm else "first"
    records = {name: record_of(s.output_path / last / name, cell) for name, cell in cells.items()}
    summary, rows = {}, []
    for name, fitness, queries in variants:
        title = f"{name}, {fitness.replace('_', '-')}" + (f", {queries} per haystack" if queries > 1 else "")
        folder = f"{name}_{fitness}_{queries}"
        whole, race = ([records[f"{folder}/{kind}/seed{seed}"] for seed in s.seeds] for kind in ("whole", "race"))
        theirs, ours = (np.concatenate([scores(record) for record in searches]) for searches in (whole, race))
        p = paired_permutation_test(ours, theirs)
        seeds = [
            compared(*pair, parents=s.search().ga.parents if name == "ga" else 0) for pair in zip(whole, race, strict=True)
        ]
        summary[title] = {"p": p, "seeds": seeds}
        for kind in ("baseline", "whole", "race"):
            mean = {key: float(np.mean([searches[kind][key] for searches in seeds])) for key in seeds[0][kind]}
            summary[title][kind] = mean
            cost = [f"{mean['prompts']:.0f}", f"{mean['seconds']:.1f}"] if kind != "baseline" else ["-", "-"]
            best = f"{mean['fitness']:.4f}" if kind != "baseline" else "-"
            rows.append([f"{title}, {kind}", f"{mean['held_out']:.2f}", show_p(p) if kind == "race" else "-", best, *cost])
        whole_mean, race_mean = summary[title]["whole"], summary[title]["race"]
        saved = {key: 1 - race_mean[key] / whole_mean[key] for key in ("prompts", "seconds")}
        summary[title]["saved"] = saved
        if s.replay and name == "ga":
            settings = [cells[f"{folder}/race/seed{seed}"] for seed in s.seeds]
            replays = [replayed(cell, record) for cell, record in zip(settings, whole, strict=True)]
            summary[title]["replay"] = replays
            for test in replays[0]:
                prompts = float(np.mean([each[test]["prompts"] for each in replays]))
                about = f"about {race_mean['seconds'] * prompts / race_mean['prompts']:.1f}"
                wrong = sum(each[test]["mistakes"] for each in replays)
                rows.append([f"{title}, replay {test}, {wrong} by mistake", "-", "-", "-", f"{prompts:.0f}", about])
        by_seed = "; ".join(f"seed {seed}: {told(searches)}" for seed, searches in zip(s.seeds, seeds, strict=True))
        summary[title]["told"] = (
            f"{title}: {saved['prompts']:.1%} of the prompts and {saved['seconds']:.1%} of the seconds saved. {by_seed}.\n"
        )
    columns = ["search", "held-out accuracy", "p against whole", "fitness of best", "prompts scored", "seconds"]
    about = s.describe("Figures are means over seeds.")
    parts = [about, markdown_table(columns, rows), *(record["told"] for record in summary.values())]
    write_tables(s, "Racing", parts, summary | {"machine": environment()})


def replayed(settings: SearchSettings, record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The prompts and mistakes of races along a finished whole search, with each test. `settings` are those of its race."""
    loaded, task = loaded_once(settings.run.model, settings.devices.dtype), task_of(settings.task)
    slots = slots_of(task, settings.objective.search_positions)
    examples = task.examples("search", settings.questions.limit, settings.run.seed)
    prompts = [task.prompt(example, *pair) for example in examples for pair in slots]
    staged = make_staged_scorer(settings, loaded.model, loaded.tokenizer, [task], [prompts])
    objective = Objective(settings.objective, tuple(position for _, position in slots), staged.answer_tokens)
    race, history = Race(staged, objective), record["history"]
    distinct, row = np.unique(np.array([line["factors"] for line in history], np.float32), axis=0, return_inverse=True)
    found = staged(distinct)
    probability = np.exp(found.log_likelihood.astype(np.float64) / staged.answer_tokens)
    by_question = probability.reshape(len(distinct), -1, len(slots)) @ np.array(objective.weights)
    row = row.ravel()
    values, likely = race.values(*found)[row], staged.by_unit(by_question)[row]
    least = staged.question_scale * objective.most_of_a_verdict
    saved_by_stage = {staged.bounds[stage]: staged.num_prompts - len(staged.prompts_of(stage)) for stage in range(1, 5)}
    ga, result = settings.ga, {}
    for name, test in {"paired": paired, "controlled": controlled}.items():
        saved, mistakes, rivals = 0, 0, list[int]()
        for generation in range(ga.generations + 1):
            ids = [line["id"] for line in history if line["generation"] == generation]
            new = [number for number in ids if not history[number]["cached"]]
            bar = Bar(values[rivals], ga.parents + ga.crossovers)
            controls = [values[rivals[-1]], values[rivals].mean(axis=0), likely[rivals].mean(axis=0)] if rivals else []
            scored = dropped_after(values[new], np.array(controls), bar, staged.bounds, test, least)
            saved += sum(saved_by_stage[int(units)] for units in scored)
            for reference in bar.references(values[new]):
                mistakes += int(((scored < staged.bounds[-1]) & (values[new].mean(axis=1) > reference.mean())).sum())
            rivals = next_parents(values.mean(axis=1), rivals, ids, ga.mutations if generation else len(ids), ga.parents)
        prompts_scored = record["factors"]["search"]["prompts_scored"]
        result[name] = {"prompts": float(prompts_scored - saved), "mistakes": mistakes}
    return result


def dropped_after(
    values: Float[np.ndarray, "P U"],
    controls: Float[np.ndarray, "C U"],
    bar: Bar,
    bounds: Sequence[int],
    test: Test,
    least: float,
) -> Int[np.ndarray, "P"]:
    """The number of units that a race scores of each individual."""
    running, scored = np.arange(len(values)), np.zeros(len(values), int)
    for _, end in itertools.pairwise(bounds):
        scored[running] = end
        if end < bounds[-1]:
            so_far = values[running, :end]
            dropped = [test(so_far, reference, bounds[-1], least, controls) for reference in bar.references(so_far)]
            running = running[~np.any(dropped, axis=0)] if dropped else running
    return scored


def paired(values: np.ndarray, reference: np.ndarray, units: int, least: float, controls: np.ndarray) -> np.ndarray:
    """The test of a race, without controls."""
    return hopeless(values, reference, units, least)


def controlled(
    values: Float[np.ndarray, "P n"],
    reference: Float[np.ndarray, "n"],
    units: int,
    least: float,
    controls: Float[np.ndarray, "C U"],
) -> Bool[np.ndarray, "P"]:
    """The same test with control variates, which are known on all units."""
    count = values.shape[1]
    if not controls.size:
        return hopeless(values, reference, units, least)
    centred = np.hstack([(controls - controls.mean(axis=1, keepdims=True))[:, :count], np.zeros((len(controls), 1))])
    design = np.vstack([np.ones(count + 1), centred]).T  # the last row is the difference in the individual's favour
    rank = int(np.linalg.matrix_rank(design))
    if rank == np.linalg.matrix_rank(centred) or rank > count - 1:  # the mean over all units is not determined
        return hopeless(values, reference, units, least)
    differences = values - reference
    strongest = np.maximum(np.abs(differences).max(axis=1, initial=0.0), least)
    differences = np.column_stack([differences, strongest])
    inverse = np.linalg.pinv(design.T @ design)
    fitted = differences @ design @ inverse  # [P, 1 + C]
    freedom = count + 1 - rank
    residuals = ((differences - fitted @ design.T) ** 2).sum(axis=1) / freedom
    error = np.sqrt(residuals * inverse[0, 0] * (1 - count / units))
    return fitted[:, 0] + stdtrit(freedom, CONFIDENCE) * error < 0


def next_parents(
    fitness: Float[np.ndarray, "P"], parents: list[int], new: Sequence[int], mutants: int, count: int
) -> list[int]:
    """The parents after a generation: of each pair of children by crossover, only the better one can become a parent."""
    pairs = zip(new[mutants::2], new[mutants + 1 :: 2], strict=True)
    kept = [*parents, *new[:mutants], *(max(pair, key=lambda number: fitness[number]) for pair in pairs)]
    return sorted(kept, key=lambda number: -fitness[number])[:count]


def compared(whole: dict[str, Any], race: dict[str, Any], parents: int) -> dict[str, Any]:
    """Results and costs of two searches of one seed, and where they diverge."""
    found: dict[str, Any] = {"baseline": {"held_out": 100 * figures(whole, "baseline")["acc,none"]}}
    for kind, record in (("whole", whole), ("race", race)):
        search = record["factors"]["search"]
        costs = {"prompts": search["prompts_scored"], "seconds": search["seconds"], "fitness": search["fitness_of_best"]}
        found[kind] = {"held_out": 100 * figures(record)["acc,none"], **costs}
    lines = list(zip(whole["history"], race["history"], strict=False))
    parts = next((ours["generation"] for theirs, ours in lines if ours["factors"] != theirs["factors"]), None)
    together = [pair for pair in lines if parts is None or pair[1]["generation"] < parts]
    found |= {
        "individuals": len(race["history"]),
        "dropped": {
            str(share): sum(individual.get("raced") == share for individual in race["history"]) for share in shares(race)
        },
        "same_best": whole["factors"]["factors"] == race["factors"]["factors"],
        "parts_at": parts,
    }
    if parents:
        found["mistakes"] = mistakes(together, parents)
    return found


def shares(race: dict[str, Any]) -> list[float]:
    """The shares of the questions after which individuals were dropped."""
    return sorted({individual["raced"] for individual in race["history"] if "raced" in individual})


def mistakes(lines: list[tuple[dict[str, Any], dict[str, Any]]], parents: int) -> int:
    """The number of dropped individuals whose fitness in the full search exceeds that of the worst of the next parents."""
    count = 0
    for theirs, ours in lines:
        if "raced" in ours:
            pool = sorted(
                (individual["fitness"] for individual, _ in lines if individual["generation"] <= ours["generation"]),
                reverse=True,
            )
            count += theirs["fitness"] > pool[parents - 1]
    return count


def told(record: dict[str, Any]) -> str:
    """The differences between two searches of one seed, in words."""
    dropped = ", ".join(f"{count} at {float(share):.0%}" for share, count in record["dropped"].items()) or "none"
    parts = "never part" if record["parts_at"] is None else f"part at generation {record['parts_at']}"
    wrong = f", {record['mistakes']} by mistake" if "mistakes" in record else ""
    same = "the same best" if record["same_best"] else "another best"
    return f"of {record['individuals']} individuals dropped {dropped}{wrong}; they {parts}, {same}"


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
