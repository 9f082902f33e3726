"""How many individuals the GA needs: populations of several sizes with the same number of evaluations.

    python experiments/population_size.py --num-pairs 5 --seeds 0 1 2

Parents, mutations and crossovers keep their proportions to the population (Table 12: 32, 12, 16, 4). All may have as many
individuals scored as the GA of --generations makes; smaller populations go on for more generations, at most twice as many as
that would need, as factors seen before cost nothing.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from grid import GridFlags, figures, header, markdown_table, row, run_grid, run_script, write_tables

from lpes_jax.search import SearchSettings


@dataclass(frozen=True, kw_only=True)
class Settings(GridFlags):
    """Which model, on what, which populations."""

    output_path: Path = Path("runs/population_size")
    sizes: tuple[int, ...] = (8, 16, 32, 64)
    """Individuals of generation 0."""


def main(s: Settings) -> None:
    """Run a search for each size and write the table."""
    cells = {f"{size}/seed{seed}": of_size(s, size, seed) for size in s.sizes for seed in s.seeds}
    records = run_grid(cells, s)
    by_size = {size: [records[f"{size}/seed{seed}"] for seed in s.seeds] for size in s.sizes}
    baseline = [figures(record, "baseline") for record in by_size[s.sizes[0]]]
    rows = [[*row("baseline", baseline), *["-"] * 3]]
    summary: dict[str, Any] = {"baseline": baseline}
    for size, of_seeds in by_size.items():
        cell = cells[f"{size}/seed{s.seeds[0]}"]
        name = f"{size} (parents {cell.ga.parents}, mutations {cell.ga.mutations}, crossovers {cell.ga.crossovers})"
        searches = [record["factors"]["search"] for record in of_seeds]
        sizes = {
            "generations": float(np.mean([record["history"][-1]["generation"] for record in of_seeds])),
            "evaluations": float(np.mean([search["evaluations_of_algorithm"] for search in searches])),
            "fitness": float(np.mean([search["fitness_of_best"] for search in searches])),
        }
        found = [figures(record) for record in of_seeds]
        shown = [f"{sizes['generations']:.0f}", f"{sizes['evaluations']:.0f}", f"{sizes['fitness']:.4f}"]
        rows.append([*row(name, found), *shown])
        summary[name] = {"figures": found, **sizes}
    columns = [*header("population", s.search().questions.positions), "generations", "evaluations", "fitness of best"]
    about = s.describe("The paper uses 32 (Table 12) and gives no figures for other sizes; its models are larger ones.")
    write_tables(s, "Population size", [about, markdown_table(columns, rows)], summary)


def of_size(s: Settings, size: int, seed: int) -> SearchSettings:
    """The search with a population of `size`, and the number of evaluations of the flags' own."""
    usual = s.search()
    budget = usual.ga.population_size + usual.ga.generations * (usual.ga.mutations + 2 * usual.ga.crossovers)
    mutations, crossovers = math.ceil(size / 2), round(size / 8)
    generations = 2 * math.ceil(max(budget - size, 0) / (mutations + 2 * crossovers))
    return s.search(
        seed=seed,
        population_size=size,
        parents=max(round(3 * size / 8), min(size, 2)),
        mutations=mutations,
        crossovers=crossovers,
        generations=generations,
        max_evaluations=budget,
    )


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
