"""Every algorithm that `--algorithm` knows, from the same start and with the same number of individuals scored.

    python experiments/strategies.py --model smollm2-135m-instruct --num-pairs 5 --limit 50 --output-path runs/strategies

All maximise the answers' log-likelihood. The GA moves the x of the control points as well, the others their y alone. `gradient`
stands beside them at about equal prompts: a step counts as four forward passes of its minibatch. Table 11 takes the two of the
paper apart; this is the wide view.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from grid import GridFlags, collect, figures, header, in_part, markdown_table, row, run_cells, run_script, write_tables

from lpes_jax.errors import UserError
from lpes_jax.search import SearchSettings
from lpes_jax.search.strategies import NAMES

PASSES_PER_STEP = 4  # forward passes that a forward and a backward pass with rematerialised layers cost


@dataclass(frozen=True, kw_only=True)
class Settings(GridFlags):
    """Which model, on what, which algorithms."""

    output_path: Path = Path("runs/strategies")
    preset: Literal["paper", "default", "quick"] = "default"
    algorithms: tuple[str, ...] = ("ga", "gradient", *NAMES)
    """Which of them."""
    budget: int = 200
    """Individuals that each may have scored by the model."""


def main(s: Settings) -> None:
    """Run a search for each algorithm and write the table; one that refuses the sizes is listed with its reason."""
    cells, refused = {}, {}
    for number, name in enumerate(s.algorithms):
        of_seeds = {f"{name}/seed{seed}": of_algorithm(s, name, seed) for seed in s.seeds}
        try:
            if in_part(number, s.part):
                run_cells(of_seeds, s)
            cells |= of_seeds
        except UserError as error:
            refused[name] = str(error)
    records = collect(cells, s)
    rows, summary = [], {}
    for name in s.algorithms:
        if name in refused:
            continue
        of_seeds = [records[f"{name}/seed{seed}"] for seed in s.seeds]
        if not rows:
            summary["baseline"] = [figures(record, "baseline") for record in of_seeds]
            rows.append([*row("baseline", summary["baseline"]), *["-"] * 3])
        searches: list[dict[str, Any]] = [record["factors"]["search"] for record in of_seeds]
        cost = {
            "fitness": float(np.mean([search["fitness_of_best"] for search in searches])),
            "evaluations": float(np.mean([search["evaluations_of_algorithm"] for search in searches])),
            "seconds": float(np.mean([search["seconds"] for search in searches])),
        }
        found = [figures(record) for record in of_seeds]
        scored = "-" if name == "gradient" else f"{cost['evaluations']:.0f}"
        rows.append([*row(name, found), f"{cost['fitness']:.4f}", scored, f"{cost['seconds']:.0f}"])
        summary[name] = {"figures": found, **cost}
    columns = [*header("algorithm", s.search().questions.positions), "fitness of best", "individuals scored", "seconds"]
    about = s.describe(
        f"Each may have {s.budget} individuals scored. The fitness of `gradient` is on the search questions that it held back, "
        "and so is no match for the others'. The paper compares its GA with gradient descent alone (Table 11)."
    )
    not_run = [f"Not run: {name} ({reason}).\n" for name, reason in refused.items()]
    write_tables(
        s, "Algorithms at equal budgets", [about, markdown_table(columns, rows), *not_run], summary | {"refused": refused}
    )


def of_algorithm(s: Settings, name: str, seed: int) -> SearchSettings:
    """The search by one algorithm, with the budget as individuals or as steps."""
    usual = s.search(fitness="log_likelihood", seed=seed, algorithm=name)
    if name == "gradient":
        prompts = s.budget * usual.questions.limit * len(usual.objective.search_positions)
        steps = max(1, round(prompts / (PASSES_PER_STEP * usual.gradient.minibatch_size)))
        return s.search(fitness="log_likelihood", seed=seed, algorithm=name, **({} if s.steps else {"steps": steps}))
    generations = s.budget  # never the limit
    return s.search(fitness="log_likelihood", seed=seed, algorithm=name, max_evaluations=s.budget, generations=generations)


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
