"""Racing: the same searches with and without `--race`, on several seeds: results and costs.

    python experiments/bench_racing.py --model tiny-retriever --num-pairs 8 --limit 48 --test-limit 40 --seeds 0 1 2
    python experiments/bench_racing.py --model LLAMA-2-7B --preset paper --limit 200 --test-limit 500 --algorithms ga cma_es

The two searches of a seed have the same questions and random numbers. Those of the genetic algorithm are identical, individual
for individual, until a race drops one by mistake. `parts at` is the first generation with a different individual. `mistakes`
counts the individuals dropped before it that would have become parents, by their fitness in the other search. p is the paired
permutation test over the held-out questions of all seeds, between the race's result and the other search's.

Seconds are those of the search, including uniform factors but not the held-out report. They include compilation; a second run
into another folder does not.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from grid import GridFlags, figures, markdown_table, run_grid, run_script, scores, show_p, write_tables

from lpes_jax.statistics import paired_permutation_test
from lpes_jax.store.provenance import environment


@dataclass(frozen=True, kw_only=True)
class Settings(GridFlags):
    """The model, the questions and the algorithms."""

    output_path: Path = Path("runs/bench_racing")
    preset: Literal["paper", "default", "quick"] = "quick"
    algorithms: tuple[str, ...] = ("ga",)
    """The algorithms."""
    fitness: Literal["accuracy", "log_likelihood"] = "accuracy"


def main(s: Settings) -> None:
    """Run the pairs of searches and write the table."""
    cells = {
        f"{name}/{'race' if race else 'whole'}/seed{seed}": s.search(algorithm=name, race=race, seed=seed)
        for name in s.algorithms
        for seed in s.seeds
        for race in (False, True)
    }
    records, summary, rows = run_grid(cells, s), {}, []
    for name in s.algorithms:
        whole, race = ([records[f"{name}/{kind}/seed{seed}"] for seed in s.seeds] for kind in ("whole", "race"))
        theirs, ours = (np.concatenate([scores(record) for record in searches]) for searches in (whole, race))
        p = paired_permutation_test(ours, theirs)
        seeds = [
            compared(*pair, parents=s.search().ga.parents if name == "ga" else 0) for pair in zip(whole, race, strict=True)
        ]
        summary[name] = {"p": p, "seeds": seeds}
        for kind in ("baseline", "whole", "race"):
            mean = {key: float(np.mean([searches[kind][key] for searches in seeds])) for key in seeds[0][kind]}
            summary[name][kind] = mean
            cost = [f"{mean['prompts']:.0f}", f"{mean['seconds']:.0f}"] if kind != "baseline" else ["-", "-"]
            fitness = f"{mean['fitness']:.4f}" if kind != "baseline" else "-"
            rows.append([f"{name}, {kind}", f"{mean['held_out']:.2f}", show_p(p) if kind == "race" else "-", fitness, *cost])
        saved = 1 - summary[name]["race"]["prompts"] / summary[name]["whole"]["prompts"]
        by_seed = "; ".join(f"seed {seed}: {told(searches)}" for seed, searches in zip(s.seeds, seeds, strict=True))
        summary[name]["prompts_saved"] = saved
        summary[name]["told"] = f"{name}: {saved:.1%} of the prompts saved. {by_seed}.\n"
    columns = ["search", "held-out accuracy", "p against whole", "fitness of best", "prompts scored", "seconds"]
    about = s.describe("Figures are means over seeds.")
    parts = [about, markdown_table(columns, rows), *(record["told"] for record in summary.values())]
    write_tables(s, "Racing", parts, summary | {"machine": environment()})


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
