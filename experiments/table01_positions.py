"""Every method by the position of the fact (Table 1), on key-value retrieval and multi-document questions.

    python experiments/table01_positions.py --tasks kv --num-pairs 5 --factors RUN/factors.json
    python experiments/table01_positions.py --tasks kv mdqa --num-pairs 5 --mdqa-data nq-open-oracle.jsonl.gz \\
        --factors KV_RUN/factors.json --mdqa-factors MDQA_RUN/factors.json

Each task is a `python -m lpes_jax.compare` (which documents how settings are tuned and costs measured) at the paper's
positions, in its own folder. A folder with results is not run again, an interrupted run resumes, and `--part i/n` runs every
n-th. A last call without `--part` writes tables.md and summary.json.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grid import GridFlags, check_same, end_part, header, in_part, markdown_table, other_model, row, run_script, write_tables

from lpes_jax.compare import CompareSettings, run_comparison
from lpes_jax.errors import UserError
from lpes_jax.json_files import read_json
from lpes_jax.tasks.flags import name_of

POSITIONS = {"kv": (0, 20, 40, 60, 80, 100), "mdqa": (0, 25, 50, 75, 100)}
PAPER = {
    "mdqa": {
        "Vicuna-7B-v1.5": {
            "baseline": "70.4 58.0 55.4 55.4 60.4 59.9",
            "PI": "71.2 59.6 58.8 56.4 56.2 60.4",
            "Attention Buckets": "72.6 61.4 60.6 60.8 59.6 63.0",
            "Ms-PoE": "72.6 61.4 61.8 62.0 59.0 63.5",
            "MoICE": "71.6 61.2 60.6 60.8 62.4 63.3",
            "LPES": "71.4 62.2 62.0 61.0 61.6 63.6",
        },
        "StableBeluga-7B": {
            "baseline": "67.8 59.2 59.6 59.4 68.2 62.8",
            "PI": "69.6 58.6 58.2 60.0 65.4 62.4",
            "Attention Buckets": "69.2 59.0 59.8 59.2 67.4 63.0",
            "Ms-PoE": "68.4 57.0 60.2 61.0 68.4 63.0",
            "MoICE": "67.4 60.0 60.2 60.0 68.6 63.2",
            "LPES": "68.8 60.0 60.8 61.0 68.2 64.5",
        },
        "Qwen2.5-7B": {
            "baseline": "69.4 61.0 62.6 58.6 63.6 63.0",
            "PI": "68.6 62.0 62.2 58.4 64.0 63.0",
            "Attention Buckets": "69.6 62.2 63.0 60.2 62.0 63.4",
            "MoICE": "68.4 61.2 63.0 61.0 63.8 63.5",
            "LPES": "69.6 64.8 69.2 63.0 65.4 66.4",
        },
    },
    "kv": {
        "Vicuna-7B-v1.5": {
            "baseline": "95.2 71.6 81.0 79.0 77.4 73.4 80.9",
            "PI": "98.6 92.8 83.8 90.0 85.8 83.0 89.0",
            "Attention Buckets": "100 94.6 88.6 91.6 87.6 65.8 88.0",
            "Ms-PoE": "95.2 63.2 84.8 91.6 87.4 77.8 83.3",
            "MoICE": "100 93.2 90.2 87.4 89.4 70.0 88.4",
            "LPES": "99.4 92.8 87.8 93.6 90.4 88.8 92.1",
        },
        "StableBeluga-7B": {
            "baseline": "90.2 34.2 44.0 16.6 59.8 79.4 54.0",
            "PI": "95.2 53.6 31.8 28.6 61.6 83.6 59.1",
            "Attention Buckets": "100 79.8 54.4 58.2 68.4 89.2 75.6",
            "Ms-PoE": "90.2 27.2 27.6 59.4 70.4 89.0 60.6",
            "MoICE": "99.8 71.2 52.2 54.8 74.4 91.4 74.0",
            "LPES": "99.2 82.4 57.2 56.2 70.4 89.6 75.8",
        },
        "Qwen2.5-7B": {
            "baseline": "99.8 88.6 92.6 90.6 99.0 99.2 95.0",
            "PI": "100 93.2 91.2 88.6 98.6 99.0 95.1",
            "Attention Buckets": "100 89.2 91.4 91.6 98.2 99.2 94.9",
            "MoICE": "99.8 88.0 92.6 91.6 99.0 99.4 95.1",
            "LPES": "99.8 97.4 93.2 94.0 99.2 99.2 97.1",
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The model, the methods and the tasks; flags that are not given keep compare's defaults."""

    output_path: Path = Path("runs/table01")
    """Folder of the comparisons, tables.md and summary.json."""
    tasks: tuple[Literal["kv", "mdqa"], ...] = ("kv",)
    """kv: generated key-value pairs; mdqa: with --mdqa-data, other questions' documents as distractors."""
    model: str = "smollm2-135m-instruct"
    """A name in models/zoo, a folder in Hugging Face layout, a .gguf file, or a Hugging Face hub id."""
    methods: tuple[str, ...] = ("all",)
    """As in compare."""
    factors: Path | None = None
    """factors.json of a search: LPES, and PI as their mean."""
    mdqa_factors: Path | None = None
    """mdqa: other factors (default: the same)."""
    num_pairs: tuple[int, ...] = (50,)
    """kv: pairs in a prompt; each number is a comparison."""
    key_length: int | None = None
    """kv: hexadecimal characters of keys and values (default: UUIDs)."""
    mdqa_data: Path | None = None
    """mdqa: nq-open-oracle.jsonl.gz."""
    num_documents: int = 10
    """mdqa: documents in a prompt."""
    mdqa_metrics: tuple[str, ...] = ()
    """mdqa: metrics of the held-out figures (default: best_subspan_em, which needs generation; prefix does not)."""
    max_new_tokens: int | None = None
    """mdqa: tokens to generate (default: the task's, 100)."""
    limit: int | None = None
    """Search questions that settings are tuned on."""
    test_limit: int = 500
    """Other questions, on which the methods are measured."""
    budget: int | None = None
    """Settings to try per method."""
    repeats: int | None = None
    """Rounds of the timing."""
    router: Path | None = None
    """moice: a router that is already trained."""
    text: Path | None = None
    """moice: text to train the router on."""
    seed: int = 0
    """Seed of the examples."""
    overlength: Literal["error", "skip"] = "skip"
    """What to do with questions too long for the model's window."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    batch_size: int | None = None
    """Prompts per forward pass (default: chosen from the memory)."""
    part: str = "0/1"
    """i/n: run only the comparisons i, i + n, ... (from 0), and write no tables."""


def comparisons(s: Settings) -> dict[str, CompareSettings]:
    """Each comparison by the name of its folder."""
    shared = {name: getattr(s, name) for name in ("model", "methods", "test_limit", "seed", "overlength", "dtype")}
    for name in ("limit", "budget", "repeats", "router", "text", "batch_size"):
        if getattr(s, name) is not None:
            shared[name] = getattr(s, name)
    found = {}
    for task in dict.fromkeys(s.tasks):
        settings = shared | {"task": task, "positions": POSITIONS[task]}
        if task == "kv":
            settings |= {"factors": s.factors, "key_length": s.key_length}
            cells = {f"kv_{n}_pairs": settings | {"num_pairs": n} for n in dict.fromkeys(s.num_pairs)}
        else:
            if s.mdqa_data is None:
                raise UserError("--tasks mdqa needs --mdqa-data, the file nq-open-oracle.jsonl.gz")
            settings |= {"factors": s.mdqa_factors or s.factors, "data": s.mdqa_data, "distractors": "random"}
            settings |= {"num_documents": s.num_documents, "max_new_tokens": s.max_new_tokens, "metrics": s.mdqa_metrics}
            cells = {f"mdqa_{s.num_documents}_documents": settings}
        found |= {name: CompareSettings.of(**flags, output_path=s.output_path / name) for name, flags in cells.items()}
    return found


def results_of(settings: CompareSettings) -> dict[str, Any]:
    """The results of a finished comparison. Raises UserError if its settings differ."""
    results = read_json(settings.run.output_path / "results.json")
    wanted = json.loads(json.dumps(settings.flat(), default=str))
    names = wanted.keys() - {"output_path", "batch_size", "resume", "overwrite"}
    ran = results["config"]
    check_same(settings.run.output_path, {name: ran.get(name) for name in names}, {name: wanted[name] for name in names})
    return results


def table(task: str, methods: Mapping[str, Mapping[str, Any]]) -> str:
    """Accuracy by position, costs, and the paper's rows."""
    rows = []
    for name, record in methods.items():
        holm = {"p_against_baseline,none": record["against_baseline"]["p_holm"]} if "against_baseline" in record else {}
        costs = [f"{record['passes_per_token']:g}", f"{record['seconds_against_baseline']:.2f}", record["setting"] or "-"]
        rows.append([*row(name, [{**record, **holm}]), *costs])
    for model, printed in PAPER[task].items():
        rows += [[f"paper: {model}, {name}", *values.split(), "-", "-", "-", "-"] for name, values in printed.items()]
    return markdown_table([*header("method", POSITIONS[task]), "passes a token", "time", "setting"], rows)


def main(s: Settings) -> None:
    """Run missing comparisons and write the tables."""
    cells = comparisons(s)
    for number, (name, settings) in enumerate(cells.items()):
        if in_part(number, s.part) and not (settings.run.output_path / "results.json").exists():
            print(f"== {name}", flush=True)
            run_comparison(settings.replace(resume=(settings.run.output_path / "unfinished").exists()))
    end_part(s.part)
    results = {name: results_of(settings) for name, settings in cells.items()}
    about = (
        f"Ours: {Path(s.model).name}, {s.test_limit} held-out questions, accuracy in percent. ± is the standard error over "
        "questions; p: paired permutation over questions against the baseline, by Holm's correction for all methods of a "
        "table; time: of a prompt, against the baseline.\n\n"
        + other_model("Table 1, 7B models, 500 questions: mdqa 10 documents (Qwen: 20), kv 50 pairs (Qwen: 150)")
        + "\n"
    )
    parts = [about]
    for name, record in results.items():
        parts += [f"## {name}\n", table(name_of(cells[name].task), record["methods"])]
        parts += [f"{method}: left out. {reason}\n" for method, reason in record["refused"].items()]
    write_tables(
        GridFlags(output_path=s.output_path), "Methods by position (Table 1)", parts, {"ours": results, "paper": PAPER}
    )


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
