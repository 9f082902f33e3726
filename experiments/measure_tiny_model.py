"""Accuracy by position of a small Llama from `train_tiny_model.py`, on key-value questions of the split `search`.

    python experiments/measure_tiny_model.py --output runs/tiny        # what the training ends with

Writes evaluation.json into the folder: accuracy for several prompt lengths, a sweep of one uniform factor for all layers, and
factors with one step (1 up to a layer, another number after it), of which the best are kept.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from grid import run_script

from lpes_jax.models.llama import load
from lpes_jax.scoring import Scorer
from lpes_jax.tasks import prompts as task_prompts
from lpes_jax.tasks.key_value import KeyValue

POSITIONS = (0, 25, 50, 75, 100)


@dataclass(frozen=True)
class Measurement:
    """The folder to measure, and the questions."""

    output: Path
    """Folder of the model and its records."""
    key_length: int = 8
    """Hexadecimal characters of a key and of a value."""
    test_pairs: int = 36
    """Pairs in the prompts of the sweep, of the probe, and of the accuracy checks during training."""
    eval_pairs: tuple[int, ...] = (8, 16, 24, 32, 36, 40)
    """Pairs in the prompts of the table by length."""
    eval_examples: int = 500
    """Examples of this table and of the sweep, each at the five positions."""
    eval_seed: int = 4321
    sweep: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)
    """Uniform factors at `test_pairs`."""
    probe: tuple[float, ...] = (0.75, 1.25, 1.5, 2.0, 3.0)
    """Factors after the step of the one-step profiles at `test_pairs`."""
    probe_examples: int = 100
    """Examples of these profiles; 0: none."""


def measure(settings: Measurement) -> dict[str, Any]:
    """Accuracy of the saved model in percent, at each of `POSITIONS`."""
    s = settings
    loaded = load(str(s.output))
    layers = loaded.model.config.num_layers

    def accuracies(pairs: int, count: int, factors: np.ndarray) -> np.ndarray:
        """Accuracy of each row of `factors` at each position."""
        task = KeyValue(pairs, key_length=s.key_length)
        examples = task.examples("search", count, s.eval_seed)
        prompts = [task.prompt(e, task_prompts.slot(p, pairs), p) for e in examples for p in POSITIONS]
        encoded = task_prompts.encode(prompts, loaded.tokenizer, loaded.model.config.max_position_embeddings)
        correct = Scorer(loaded.model, encoded)(factors).correct
        return 100 * correct.reshape(len(factors), count, len(POSITIONS)).mean(axis=1)

    def show(title: str, values: np.ndarray) -> dict[str, Any]:
        by_position = dict(zip(map(str, POSITIONS), values.round(2).tolist(), strict=True))
        print(f"{title:>24}  " + "  ".join(f"{value:5.1f}" for value in values) + f"  mean {values.mean():5.1f}", flush=True)
        return {"accuracy_by_position": by_position, "mean": round(float(values.mean()), 2)}

    print(f"\naccuracy in percent at positions {POSITIONS}, {s.eval_examples} examples, dtype {loaded.identity['dtype']}")
    result: dict[str, Any] = {
        "split": "search",
        "seed": s.eval_seed,
        "examples": s.eval_examples,
        "key_length": s.key_length,
        "model": loaded.identity | {"name": s.output.name},
    }
    ones = np.ones((1, layers))
    result["by_pairs"] = {n: show(f"{n} pairs", accuracies(n, s.eval_examples, ones)[0]) for n in s.eval_pairs}
    if s.sweep:
        print(f"\none uniform factor, {s.test_pairs} pairs")
        swept = accuracies(s.test_pairs, s.eval_examples, np.array(s.sweep)[:, None] * ones)
        result["uniform"] = {factor: show(f"x {factor}", values) for factor, values in zip(s.sweep, swept, strict=True)}
    if s.probe and s.probe_examples:
        profiles = [(kept, factor) for factor in s.probe for kept in range(layers)]
        factors = np.array([np.where(np.arange(layers) < kept, 1.0, factor) for kept, factor in profiles])
        probed = accuracies(s.test_pairs, s.probe_examples, np.concatenate([ones, factors]))
        print(
            f"\n1 in the first layers, another factor after them, {s.test_pairs} pairs, {s.probe_examples} examples: the best"
        )
        show("as it is", probed[0])
        best = np.argsort(-probed[1:].mean(axis=1), kind="stable")
        result["step"] = [
            {"kept_layers": profiles[i][0], "factor": profiles[i][1]}
            | show(f"{profiles[i][0]} kept, then x {profiles[i][1]}", probed[1 + i])
            for i in best[:12].tolist()
        ]
    return result


def main(settings: Measurement) -> None:
    """Measure and write evaluation.json."""
    (settings.output / "evaluation.json").write_text(json.dumps(measure(settings), indent=1) + "\n")


if __name__ == "__main__":
    run_script(Measurement, main, __doc__)
