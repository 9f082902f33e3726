"""Rates, gains and both, and controls with as many numbers: the table of a folder of cells, by target.

    python experiments/gains_tables.py experiments/results/gains/smollm2_kl

A cell has the measurements by `transfer.py` or `controls.py` of one search: `METHOD_seedN.json`, and `baseline.json` for the
unchanged model. Writes tables.md and summary.json there. With several seeds, each question counts with its mean. p is from a
paired permutation test over questions, with Holm's correction over the targets of a column; intervals are 95 % intervals of the
paired difference. Each method is also compared with gains, in the same way.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from grid import markdown_table, show_p
from jaxtyping import Float
from transfer import is_text

from lpes_jax.statistics import holm, paired_permutation_test, standard_error
from lpes_jax.store.files import write_json, write_text

NAMES = {
    **{"factors": "factors", "gains": "gains", "both": "both", "norm_gain": "norm gains", "adapter": "adapter"},
    "own_gains": "gains, own answers",
}
NOT_SEARCHED = (
    *("30 pairs", "150 pairs", "200 pairs", "50 pairs, keys", "100 pairs, keys"),
    *("160 sentences", "alone", "rows_", "fiction"),
)
ABOUT = Path("about.md")


def main(folder: Path) -> None:
    """Write tables.md and summary.json of a folder of cells."""
    baseline = json.loads((folder / "baseline.json").read_text())["targets"]
    cells: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for path in sorted(folder.glob("*_seed*.json")):
        method, _, seed = path.stem.rpartition("_seed")
        cells[method][int(seed)] = json.loads(path.read_text())
    methods = [method for method in NAMES if method in cells]
    summary: dict[str, dict[str, Any]] = {}
    for method in methods:
        figures = {target: compared(target, cells[method], baseline[target]["scores"]) for target in baseline}
        for corrected, row in zip(holm([row["p"] for row in figures.values()]), figures.values(), strict=True):
            row["p_holm"] = corrected
        if method != "gains" and "gains" in cells:
            against = {
                target: paired(mean_scores(target, cells[method]), mean_scores(target, cells["gains"]))
                for target in figures
                if not is_text(target)
            }
            for corrected, target in zip(holm([one["p"] for one in against.values()]), against, strict=True):
                figures[target]["against_gains"] = against[target] | {"p_holm": corrected}
        summary[method] = figures
    header = ["target", "searched", "as it is", *(f"{NAMES[method]} ({len(cells[method])})" for method in methods)]
    accuracy, text = [], []
    for target in baseline:
        scores = np.array(baseline[target]["scores"], float)
        searched = "no" if any(part in target for part in NOT_SEARCHED) else "yes"
        if is_text(target):
            changes = ("<br>".join(f"{value:+.3f}" for value in summary[m][target]["by_position"]) for m in methods)
            text.append([target.removeprefix("plain text, "), searched, f"{scores.mean():.3f}", *changes])
        else:
            found = (f"{100 * summary[m][target]['found']:.1f} ({show_p(summary[m][target]['p_holm'])})" for m in methods)
            accuracy.append([target, searched, f"{100 * scores.mean():.1f}", *found])
    seeds = [
        [target, *(" / ".join(f"{100 * value:.1f}" for value in summary[m][target]["by_seed"]) for m in methods)]
        for target in baseline
        if not is_text(target)
    ]
    intervals = [
        [target, *("{:+.1f} to {:+.1f}".format(*(100 * bound for bound in summary[m][target]["interval"])) for m in methods)]
        for target in baseline
        if not is_text(target) and any(part in target for part in NOT_SEARCHED)
    ]
    others = [method for method in methods if "against_gains" in next(iter(summary[method].values()))]
    against_gains = [
        [target, *(show_difference(summary[method][target]["against_gains"]) for method in others)]
        for target in baseline
        if not is_text(target)
    ]
    about_p, about_text = "In brackets p, and in the header the seeds.", "Less is better."
    parts = [
        (folder / ABOUT).read_text(encoding="utf-8").strip(),
        f"## Accuracy in percent (F1 times 100)\n\n{about_p}\n\n{markdown_table(header, accuracy)}",
        f"## Plain text, nats a token: change in each quarter of the window\n\n{about_text}\n\n{markdown_table(header, text)}",
        "## Not searched: 95 % interval of the change, in points\n\n"
        + markdown_table(["target", *(NAMES[method] for method in methods)], intervals),
        "## Against gains: difference in points\n\n"
        "In brackets p, over questions, not over searches. Above 0: better than gains.\n\n"
        + markdown_table(["target", *(NAMES[method] for method in others)], against_gains),
        f"## By seed\n\n{markdown_table(['target', *(NAMES[method] for method in methods)], seeds)}",
    ]
    write_json(folder / "summary.json", summary)
    write_text(folder / "tables.md", "\n\n".join(parts) + "\n")


def mean_scores(target: str, seeds: dict[int, dict[str, Any]]) -> Float[np.ndarray, "Q S"]:
    """The scores of each question of a target and position, as means over seeds."""
    return np.mean([np.array(seeds[seed]["targets"][target]["scores"], float) for seed in sorted(seeds)], axis=0)


def paired(ours: Float[np.ndarray, "Q S"], others: Float[np.ndarray, "Q S"]) -> dict[str, float]:
    """The mean of ours - others over the same questions, and its p."""
    return {"difference": float((ours - others).mean()), "p": paired_permutation_test(ours, others)}


def show_difference(figures: dict[str, float]) -> str:
    """A difference in points, with the corrected p."""
    return f"{100 * figures['difference']:+.1f} ({show_p(figures['p_holm'])})"


def compared(target: str, seeds: dict[int, dict[str, Any]], scores: list[list[float]]) -> dict[str, Any]:
    """A method's seeds against the model as it is, on one target."""
    own = np.array(scores, float)
    scores_by_seed: Float[np.ndarray, "N Q S"] = np.array(
        [seeds[seed]["targets"][target]["scores"] for seed in sorted(seeds)], float
    )
    difference = scores_by_seed.mean(axis=0) - own
    error = standard_error(difference)
    return {
        "baseline": float(own.mean()),
        "found": float(scores_by_seed.mean()),
        "difference": float(difference.mean()),
        "standard_error": error,
        "interval": [float(difference.mean()) - 1.96 * error, float(difference.mean()) + 1.96 * error],
        "p": paired_permutation_test(scores_by_seed.mean(axis=0), own),
        "by_position": difference.mean(axis=0).tolist(),
        "by_seed": scores_by_seed.mean(axis=(1, 2)).tolist(),
    }


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "baseline.json").exists():
        print("error: give one folder with baseline.json and METHOD_seedN.json", file=sys.stderr)
        sys.exit(2)
    main(Path(sys.argv[1]))
