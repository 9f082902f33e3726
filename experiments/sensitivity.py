"""The sharpness of an optimum: each control point of found factors 0.3 up and down, and the change of fitness.

    python experiments/sensitivity.py --factors RUN/factors.json --num-pairs 5

Fitness is the search's: weighted accuracy (the greedy text begins with the gold answer) at beginning, middle and end. The flags
describe the search's examples; give those of the search, or other ones. Factors without control points are moved per layer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from grid import GridFlags, markdown_table, run_script, write_tables
from jaxtyping import Float

from lpes_jax.errors import UserError
from lpes_jax.evaluation import slots_of
from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama import load
from lpes_jax.scoring import Scorer
from lpes_jax.search.space import Space
from lpes_jax.statistics import standard_error
from lpes_jax.tasks.flags import task_of
from lpes_jax.tasks.prompts import encode


@dataclass(frozen=True, kw_only=True)
class Settings(GridFlags):
    """The factors and the questions."""

    factors: Path
    """factors.json of a search, with one factor per layer."""
    change: float = 0.3
    """Added to and subtracted from a control point's factor."""
    output_path: Path = Path("runs/sensitivity")


def main(s: Settings) -> None:
    """Score the factors and their neighbours, and write the table."""
    settings = s.search(seed=s.seeds[0])
    loaded = load(s.model, settings.devices.dtype)
    config = loaded.model.config
    found = LayerFactors.load(s.factors)
    points, individuals = neighbours(found.for_model(config.num_layers, config.num_kv_heads, config.rotary_dim), s)
    task = task_of(settings.task)
    examples = task.examples("search", settings.questions.limit, settings.run.seed)
    slots = slots_of(task, settings.objective.search_positions)
    prompts = [task.prompt(example, *slot) for example in examples for slot in slots]
    scorer = Scorer(
        loaded.model, encode(prompts, loaded.tokenizer, config.max_position_embeddings), batch_size=settings.devices.batch_size
    )
    correct, log_likelihood = scorer(individuals)
    weights = np.array(settings.objective.weights)
    shape = len(individuals), len(examples), len(slots)
    fitness, likelihood = (values.reshape(shape).astype(np.float64) @ weights for values in (correct, log_likelihood))
    rows: list[list[str]] = []
    summary: dict[str, Any] = {"fitness": float(fitness[0].mean()), "log_likelihood": float(likelihood[0].mean()), "points": []}
    for point, (layer, factor) in enumerate(points):
        entry: dict[str, Any] = {"layer": layer, "factor": factor}
        for sign, number in (("-", 1 + 2 * point), ("+", 2 + 2 * point)):
            difference = fitness[number] - fitness[0]
            entry[sign] = {
                "change": float(difference.mean()),
                "stderr": standard_error(difference),
                "log_likelihood": float((likelihood[number] - likelihood[0]).mean()),
            }
        shown = [
            f"{change['change']:+.3f} ± {change['stderr']:.3f} ({change['log_likelihood']:+.2f})"
            for change in (entry["-"], entry["+"])
        ]
        rows.append([str(point), f"{layer:g}", f"{factor:.2f}", *shown])
        summary["points"].append(entry)
    about = s.describe("The paper gives no such figures; its models are larger ones.") + (
        f"\nFitness of {s.factors}: {summary['fitness']:.3f} (log-likelihood {summary['log_likelihood']:.2f}), on search "
        "examples. Changes: of fitness ± standard error over questions, in brackets of the weighted log-likelihood in nats.\n"
    )
    columns = ["control point", "layer", "factor", f"-{s.change:g}", f"+{s.change:g}"]
    write_tables(s, "Sensitivity of the control points", [about, markdown_table(columns, rows)], summary)


def neighbours(found: LayerFactors, s: Settings) -> tuple[list[tuple[float, float]], Float[np.ndarray, "P L"]]:
    """The control points (layer, factor), and factors: as found, then with each point lowered and raised in turn."""
    if found.granularity != "layer":
        raise UserError(f"{s.factors}: factors of granularity {found.granularity}; give some with one factor per layer")
    curve = found.curve or {}
    points = np.array(curve.get("control_points") or np.stack([np.arange(found.num_layers), found.factors], axis=1))
    first, last = curve.get("layers", [0, found.num_layers - 1])
    x, y, kind = points[:, 0], points[:, 1], curve.get("type", "free")
    if y.min() <= s.change:
        raise UserError(f"--change {s.change}: a control point is {y.min():g} and must stay above 0; lower --change")
    space = Space(found.num_layers, range(first, last + 1), kind, "layer", x, y, 0.0, np.inf)
    moved = [y] + [y + sign * s.change * (np.arange(len(y)) == index) for index in range(len(y)) for sign in (-1, 1)]
    individuals = np.stack([np.asarray(space.factors(x.astype(np.float32), values.astype(np.float32))) for values in moved])
    return [(float(first + index), float(factor)) for index, factor in points], individuals


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
