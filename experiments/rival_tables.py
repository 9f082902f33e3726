"""The tables of the page on rivals, from the records of `compare` in experiments/results/compare.

`page_figures.py` puts them into the page.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from page_tables import METHODS, table

RESULTS = Path(__file__).with_name("results") / "compare"
MODELS = {"SmolLM2-135M": "smollm2", "Qwen2.5-Coder-0.5B": "qwen2.5_coder_0.5b"}
TITLES = METHODS | {
    "zero_tuning": "ZeroTuning",
    "seal": "SEAL",
    "learnt_factors": "factors, learnt here",
    "learnt_gains": "gains, learnt here",
    "learnt_both": "factors and gains, learnt here",
}
MIXTURE = {"lpes": "factors and gains of the mixture"}
LEVEL = 0.05


def rivals_smollm2() -> str:
    """Accuracy of every method on what it was tuned on, and on other tasks."""
    return _accuracies("smollm2")


def rivals_qwen() -> str:
    """The same on Qwen2.5-Coder-0.5B."""
    return _accuracies("qwen2.5_coder_0.5b")


def rivals_learnt_smollm2() -> str:
    """LPES and SEAL learnt from the same questions, and the zoo's factors and gains of a mixture."""
    return _accuracies("smollm2_learnt", MIXTURE)


def rivals_learnt_qwen() -> str:
    """The same on Qwen2.5-Coder-0.5B."""
    return _accuracies("qwen2.5_coder_0.5b_learnt", MIXTURE)


def rivals_costs() -> str:
    """Time of a prompt and memory beside the model as it is, and the setting that compare chose."""
    found = [_record(folder)["methods"] for folder in MODELS.values()]
    rows = []
    for method in found[0]:
        own = [methods[method] for methods in found]
        ratios = (f"{figures['seconds_against_baseline']:.2f}" for figures in own)
        memory = (f"{figures['program_memory_bytes'] / 2**20:,.0f}" for figures in own)
        rows.append([TITLES[method], f"{own[0]['passes_per_token']:g}, {own[1]['passes_per_token']:g}", *ratios, *memory])
    times, memories = ([f"{model}: {what}" for model in MODELS] for what in ("time", "MiB"))
    return table(["", "passes per token", *times, *memories], rows)


def _accuracies(folder: str, names: dict[str, str] | None = None) -> str:
    record, titles = _record(folder), TITLES | (names or {})
    columns = {f"{record['tuned_task']} (tuned)": record["methods"]} | {
        _short(task["title"]): task["methods"] for task in record["other_tasks"]
    }
    rows = [[titles[method], *(_cell(methods[method]) for methods in columns.values())] for method in record["methods"]]
    return table(["", *columns], rows)


def _cell(figures: dict[str, Any]) -> str:
    """Accuracy ± its standard error, with a star where it differs from the baseline."""
    against = figures.get("against_baseline")
    star = "*" if against and against["p_holm"] < LEVEL else ""
    return f"{100 * figures['acc,none']:.1f} ± {100 * figures['acc_stderr,none']:.1f}{star}"


def _short(title: str) -> str:
    """A task's title without what the page says of it."""
    title = title.replace(" of nq-open-oracle, distractors random", "").replace(", placing together", "")
    return re.sub(r"num lines (\d+)", r"\1 lines", title)


def _record(folder: str) -> dict[str, Any]:
    return json.loads((RESULTS / folder / "results.json").read_text(encoding="utf-8"))


FUNCTIONS = (rivals_smollm2, rivals_qwen, rivals_learnt_smollm2, rivals_learnt_qwen, rivals_costs)
TABLES: dict[str, Callable[[], str]] = {function.__name__: function for function in FUNCTIONS}
