"""Tables of the README and of docs/ from the records in experiments/results; `page_figures.py` puts them into the pages.

Accuracy in %, ± its standard error over questions; with several seeds, each question counts with its mean, except where a
table says "over seeds". Figures of the paper are those that the records have beside ours.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import memory_table
import numpy as np
from grid import markdown_table, show_p

from lpes_jax.statistics import standard_error

RESULTS = Path(__file__).with_name("results")
METHODS = {
    "baseline": "baseline",
    "uniform": "one uniform factor, tuned",
    "pi": "PI, mean of LPES's factors",
    "dynamic_ntk": "dynamic NTK",
    "ntk_by_base": "NTK by base",
    "yarn": "YaRN",
    "attention_buckets": "Attention Buckets",
    "ms_poe": "Ms-PoE",
    "moice": "MoICE",
    "self_extend": "Self-Extend",
    "hidden_channel": "one positional hidden channel",
    "lpes": "LPES",
}
METHODS_OF_TRANSFER = {
    **{"factors": "factors", "gains": "gains", "both": "both"},
    **{"norm_gain": "norm gains", "adapter": "adapter"},
}
# Averages as printed in the paper's Tables 2 and 3, which the records do not have.
PRINTED = {
    "table02_zero_scrolls/smollm2": {"Vicuna-7B-v1.5, baseline": 16.91, "Qwen2.5-7B, LPES": 25.51},
    "table03_l_eval/smollm2": {"LLaMA-2-7B-chat, MoICE": 50.72, "LLaMA-2-7B-chat, LPES": 51.52},
}
IN_PAPER = {"pi": "PI", "attention_buckets": "Attention Buckets", "ms_poe": "Ms-PoE", "moice": "MoICE", "lpes": "LPES"}


def record(path: str) -> Any:
    """The JSON file at a path below experiments/results."""
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


def summary(folder: str) -> Any:
    """A folder's summary.json."""
    return record(f"{folder}/summary.json")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table without the last line end."""
    return markdown_table(head, list(rows)).rstrip("\n")


def percent(figures: dict[str, Any]) -> str:
    """An accuracy with its standard error."""
    return f"{100 * figures['acc,none']:.1f} ± {100 * figures['acc_stderr,none']:.1f}"


def over_seeds(seeds: Sequence[dict[str, Any]]) -> str:
    """The mean accuracy of several seeds, ± the sample standard deviation over them."""
    means = 100 * np.array([seed["acc,none"] for seed in seeds])
    return f"{means.mean():.1f} ± {means.std(ddof=1):.1f}"


def last(row: str) -> str:
    """The average at the end of a row of the paper."""
    return row.split()[-1]


def points(figures: dict[str, Any], scale: float = 100) -> str:
    """A difference with its standard error and p."""
    return f"{scale * figures['difference']:+.1f} ± {scale * figures['standard_error']:.1f} ({show_p(figures['p'])})"


def results() -> str:
    """SmolLM2 on a mixture: factors, gains and both."""
    folder, seeds = "gains/smollm2_kl", range(3)
    columns = {"as it is": ["baseline"]} | {
        method: [f"{method}_seed{seed}" for seed in seeds] for method in ("factors", "gains", "both")
    }
    targets = {
        "10 key-value pairs": ("kv, 10 pairs", True),
        "30 key-value pairs": ("kv, 30 pairs", False),
        "needle in 160 sentences": ("needle, 160 sentences", False),
        "10 documents, gold answer in the output": ("mdqa, 10 documents", True),
        "only the gold document": ("mdqa, gold document alone", False),
        "fiction, windows of 8,192, nats per token": ("plain text, fiction, windows of 8192", False),
    }
    records = {name: record(f"{folder}/{name}.json")["targets"] for names in columns.values() for name in names}
    rows = []
    for title, (target, searched) in targets.items():
        row = [title, "yes" if searched else "no"]
        for names in columns.values():
            scores = np.mean([np.array(records[name][target]["scores"], float) for name in names], axis=0)
            error = standard_error(scores)
            is_text = target.startswith("plain text")
            row.append(f"{scores.mean():.3f} ± {error:.3f}" if is_text else f"{100 * scores.mean():.1f} ± {100 * error:.1f}")
        rows.append(row)
    return table(["", "searched", *columns], rows)


def _changes(folder: str, methods: dict[str, str], titles: dict[str, str]) -> str:
    """Accuracy as it is, and each method's change with its 95 % interval, by target."""
    found, rows = summary(folder), []
    for target, title in titles.items():
        figures = {method: found[method][target] for method in methods}
        rows.append([title, f"{100 * next(iter(figures.values()))['baseline']:.1f}", *map(_change, figures.values())])
    return table(["", "as it is", *methods.values()], rows)


def _change(figures: dict[str, Any]) -> str:
    """A change in points with its 95 % interval."""
    return "{:+.1f}<br>({:.1f} to {:.1f})".format(*(100 * value for value in (figures["difference"], *figures["interval"])))


def changes_smollm2() -> str:
    """SmolLM2's changes on targets that no search saw, with the controls."""
    titles = {
        "kv, 30 pairs": "30 key-value pairs",
        "needle, 160 sentences": "needle in 160 sentences",
        "mdqa, mdqa10_rows_2155_2454": "10 retrieved documents",
        "mdqa, gold document alone": "only the gold document",
    }
    return _changes("gains/smollm2_kl", METHODS_OF_TRANSFER, titles)


def changes_qwen() -> str:
    """Qwen2.5-Coder-0.5B's changes."""
    titles = {
        "kv, 50 pairs": "50 key-value pairs (searched)",
        "kv, 100 pairs": "100 key-value pairs (searched)",
        "kv, 150 pairs": "150 key-value pairs",
        "needle, 160 sentences": "needle in 160 sentences",
        "mdqa, mdqa10_rows_2155_2454": "10 retrieved documents",
        "mdqa, gold document alone": "only the gold document",
    }
    return _changes("gains/qwen05_kl", METHODS_OF_TRANSFER, titles)


def changes_qwen_15() -> str:
    """Changes of Qwen2.5-Coder-1.5B, one seed."""
    titles = {
        "kv, 100 pairs": "100 key-value pairs (searched)",
        "kv, 200 pairs": "200 key-value pairs",
        "needle, 160 sentences": "needle in 160 sentences",
        "mdqa, mdqa10_rows_2155_2454": "10 retrieved documents",
        "mdqa, gold document alone": "only the gold document",
    }
    return _changes("gains/qwen15_kl", METHODS_OF_TRANSFER, titles)


def against_gains() -> str:
    """Methods against gains, question by question."""
    titles = {
        "smollm2_kl": ("SmolLM2", {"kv, 20 pairs": "20 pairs (searched)", "kv, 30 pairs": "30 pairs"}),
        "qwen05_kl": ("0.5B", {"kv, 100 pairs": "100 pairs (searched)", "kv, 150 pairs": "150 pairs"}),
        "qwen15_kl": ("1.5B", {"kv, 100 pairs": "100 pairs (searched)", "kv, 200 pairs": "200 pairs"}),
    }
    documents = {"mdqa, mdqa10_rows_2155_2454": "10 retrieved documents", "mdqa, gold document alone": "only the gold document"}
    methods, rows = {name: title for name, title in METHODS_OF_TRANSFER.items() if name != "gains"}, []
    for folder, (model, pairs) in titles.items():
        found = summary(f"gains/{folder}")
        for target, title in (pairs | documents).items():
            figures = (found[method][target]["against_gains"] for method in methods)
            cells = (f"{100 * one['difference']:+.1f} ({show_p(one['p_holm'])})" for one in figures)
            rows.append([f"{model}: {title}", *cells])
    return table(["", *methods.values()], rows)


def own_answers() -> str:
    """Gains that were taught gold answers, and gains that were taught the model's own: substring and F1 of documents."""
    folders = {"SmolLM2": "smollm2_kl", "Qwen 0.5B": "qwen05_kl", "Qwen 1.5B": "qwen15_kl"}
    titles = {"mdqa, gold document alone": "only the gold document", "mdqa, mdqa10_rows_2155_2454": "10 retrieved documents"}
    rows = []
    for model, folder in folders.items():
        found = summary(f"gains/{folder}")
        for target, title in titles.items():
            row = [f"{model}: {title}"]
            for score in ("", ", F1"):
                figures = {method: found[method][target + score] for method in ("gains", "own_gains")}
                row += [f"{100 * figures['gains']['baseline']:.1f}", *(_change(one) for one in figures.values())]
            rows.append(row)
    taught = ("gold answers", "own answers")
    return table(["", "substring, as it is", *taught, "F1, as it is", *taught], rows)


def pruned() -> str:
    """Gains of which most were drawn to 1: how many are left, and the accuracy on both tasks."""
    found = summary("prune/smollm2")
    titles = {"kv": "10 key-value pairs", "niah": "multikey_2, 40 lines"}
    rows = []
    for task, entries in found["accuracy"].items():
        for entry in entries:
            count, accuracy = np.mean(entry["counts"]), np.mean(entry["accuracy"])
            p = "-" if entry["p"] is None else show_p(entry["p"])
            rows.append([titles[task], f"{entry['strength']:g}", f"{count:.0f}", f"{100 * accuracy:.1f}", p])
    return table(["", "--prune", "gains that differ from 1", "accuracy, %", "p"], rows)


def overlaps() -> str:
    """Overlap of the gains that are left, between seeds and between tasks."""
    names = {"seeds, key-value pairs": "seeds, pairs", "seeds, niah multikey_2": "seeds, needles"}
    rows = [
        [f"{entry['strength']:g}", names.get(entry["between"], "tasks"), f"{entry['overlap']:.2f}", f"{entry['by_chance']:.2f}"]
        for entry in summary("prune/smollm2")["overlaps"]
    ]
    return table(["--prune", "between", "overlap", "by chance"], rows)


def mmlu_qwen_15() -> str:
    """MMLU on Qwen2.5-Coder-1.5B."""
    rows = []
    for title, name in {"factors": "mmlu_factors", "gains": "mmlu_gains", "both": "mmlu"}.items():
        methods = record(f"gains/qwen15_kl/{name}.json")["methods"]
        against = methods["factors"]["against_baseline"]
        low, high = against["interval"]
        change = f"{100 * against['difference']:+.1f}<br>({100 * low:+.1f} to {100 * high:+.1f})"
        questions = record(f"gains/qwen15_kl/{name}.json")["n-samples"]["mmlu"]["effective"]
        rows.append([title, str(questions), f"{100 * methods['baseline']['acc,none']:.1f}", change])
    return table(["", "questions", "as it is", "change"], rows)


def text_smollm2() -> str:
    """The change of plain text's loss, in nats per token."""
    found, methods = summary("gains/smollm2_kl"), ("factors", "gains", "both")
    targets = [target for target in found["gains"] if target.startswith("plain text")]
    rows = [
        [
            target.removeprefix("plain text, "),
            f"{found['gains'][target]['baseline']:.3f}",
            *(
                f"{found[method][target]['difference']:+.3f} ± {found[method][target]['standard_error']:.3f}"
                for method in methods
            ),
        ]
        for target in targets
    ]
    return table(["text", "as it is", *methods], rows)


def controls() -> str:
    """As many temperatures or norm gains as factors, learnt alike."""
    figures = summary("controls/smollm2_five_positions_three_seeds")["figures"]
    titles = {
        "kv, 10 pairs": "10 key-value pairs (searched)",
        "kv, 30 pairs": "30 key-value pairs",
        "kv, 5 pairs, keys of 8": "5 pairs, keys of 8 characters",
        "needle, 40 sentences": "needle in 40 sentences",
        "mdqa, 5 documents": "5 documents",
    }
    names = {"rotary, 32 a layer": "factors", "temperature, 32 a layer": "temperatures", "norm_gain, 32 a layer": "norm gains"}
    rows = [
        [
            title,
            f"{100 * figures['rotary, 32 a layer'][target]['baseline']:.1f}",
            *(points(figures[name][target]) for name in names),
        ]
        for target, title in titles.items()
    ]
    return table(["", "as it is", *names.values()], rows)


def transfer() -> str:
    """SmolLM2's factors of key-value prompts, and another model's, on other tasks."""
    pairs = summary("transfer")["pairs"]
    names = {"mixed": "its own, by frequency", "layer": "its own, by layer", "qwen_layer": "Qwen's, by layer"}
    found = {(pair["factors"], pair["target"]): pair for pair in pairs if pair["model"].startswith("smollm2")}
    targets = list(dict.fromkeys(target for name, target in found if name == "mixed" and target != "plain text"))
    rows = [
        [target, f"{100 * found['mixed', target]['baseline']:.1f}", *(points(found[name, target]) for name in names)]
        for target in targets
    ]
    text = [f"{found[name, 'plain text']['difference']:+.3f}" for name in names]
    rows.append(["plain text, nats per token", f"{found['mixed', 'plain text']['baseline']:.3f}", *text])
    return table(["", "as it is", *names.values()], rows)


def table01() -> str:
    """Every method on two models and two tasks."""
    sets = {
        "SmolLM2, 10 pairs": ("table01_positions/smollm2_kv", "kv_10_pairs"),
        "SmolLM2, 5 documents": ("table01_positions/smollm2_mdqa", "mdqa_5_documents"),
        "Qwen, 50 pairs": ("table01_positions/qwen_kv", "kv_50_pairs"),
        "Qwen, 10 documents": ("table01_positions/qwen_mdqa", "mdqa_10_documents"),
    }
    found = {title: summary(folder)["ours"][name]["methods"] for title, (folder, name) in sets.items()}
    paper = summary("table01_positions/smollm2_kv")["paper"]
    rows = []
    for method, title in METHODS.items():
        printed = [paper[task]["Vicuna-7B-v1.5"].get(IN_PAPER.get(method, method)) for task in ("kv", "mdqa")]
        rows.append(
            [title, *(percent(methods[method]) for methods in found.values()), *(last(row) if row else "" for row in printed)]
        )
    return table(["mean ± s.e.", *sets, "paper, pairs", "paper, documents"], rows)


def table01_by_position() -> str:
    """The baseline and LPES by position."""
    rows = []
    for model, folder in {"SmolLM2, 10 pairs": "smollm2_kv", "Qwen, 50 pairs": "qwen_kv"}.items():
        ours = summary(f"table01_positions/{folder}")["ours"]
        methods = ours["kv_10_pairs" if folder == "smollm2_kv" else "kv_50_pairs"]["methods"]
        for method in ("baseline", "lpes"):
            values = methods[method]["acc_by_position"]
            rows.append([f"{model}: {METHODS[method]}", *(f"{100 * value:.1f}" for value in values.values())])
    paper = summary("table01_positions/smollm2_kv")["paper"]["kv"]["Vicuna-7B-v1.5"]
    rows += [[f"paper, Vicuna, 50 pairs: {name}", *paper[name].split()[:-1]] for name in ("baseline", "LPES")]
    return table(["", *(f"{position} %" for position in (0, 20, 40, 60, 80, 100))], rows)


def _suite(folder: str, titles: dict[str, str]) -> str:
    """Another benchmark with factors found elsewhere: what was measured, and the paper's change where it has one."""
    found = summary(folder)
    vicuna = [row for row in found["paper"] if "LPES" in row][0].rpartition(",")[0]
    rows = []
    for column in found["ran"]:
        ours = found["ours"]
        printed = [found["paper"][f"{vicuna}, {name}"].get(column) for name in ("baseline", "LPES")]
        change = "" if None in printed else f"{printed[1] - printed[0]:+.2f}"
        row = [titles.get(column, column), *(f"{ours[name][column]:.1f}" for name in ("baseline", "pi", "lpes"))]
        rows.append([*row, points(found["against_baseline"]["lpes"][column], 1), change])
    return table(["", "baseline", "PI", "LPES", "change ± s.e. (p)", f"paper, {vicuna}: change"], rows)


def table02() -> str:
    return _suite("table02_zero_scrolls/smollm2", {"gov_report": "GovReport", "qmsum": "QMSum", "book_sum_sort": "BookSumSort"})


def table03() -> str:
    return _suite("table03_l_eval/smollm2", {"coursera": "Coursera", "quality": "QuALITY"})


def table04() -> str:
    titles = {"mmlu": "MMLU, four subjects", "nq_closed_book": "NQ, closed book", "nq_oracle": "NQ, gold document"}
    return _suite("table04_general/smollm2", titles)


def table17() -> str:
    return _suite("table17_long/smollm2", {"coursera": "Coursera", "quality": "QuALITY"})


def table05() -> str:
    """Time of a prompt and of generation, as multiples of the baseline's."""
    found = summary("table05_latency/llama_2_7b")
    ours, paper = found["ours"]["2048"], found["paper"]
    rows = []
    for method, title in METHODS.items():
        printed = f"{paper[method] / paper['baseline']:.2f}" if method in paper else ""
        seconds = (f"{ours[part][method]['against_baseline']:.2f}" for part in ("prompt", "generation"))
        rows.append(
            [title, f"{ours['passes'][method]:g}", f"{1000 * ours['prompt'][method]['seconds']:.0f}", *seconds, printed]
        )
    return table(["", "passes per token", "prompt, ms", "prompt, ratio", "with 32 new tokens, ratio", "paper, ratio"], rows)


def _variants(folder: str, names: dict[str, str] | None = None) -> str:
    """The variants of a table of searches: means over seeds, beside the paper's average."""
    found = summary(folder)
    rows = []
    for title, entry in found["ours"].items():
        seeds: list[dict[str, Any]] = entry["figures"] if "figures" in entry else entry
        printed = found["paper"].get((names or {}).get(title, title))
        rows.append([title.replace("<", "").replace(">", ""), over_seeds(seeds), last(printed) if printed else ""])
    return table(["", "ours, ± over seeds", "paper"], rows)


def table06() -> str:
    return _variants("table06_curve_types/tiny_retriever")


def table06_smollm2() -> str:
    return _variants("table06_curve_types/smollm2_kv")


def table15() -> str:
    return _variants("table15_weights/tiny_retriever", {"<0.333, 0.333, 0.334>": "<0.333, 0.333, 0.333>"})


def table16() -> str:
    return _variants("table16_deeper/tiny_retriever")


def table07() -> str:
    """Control points: mean, spread over positions, generations until the best."""
    found, rows = summary("table07_control_points/tiny_retriever"), []
    for title, ours in found["ours"].items():
        until = f"{ours['generations_until_best']:.1f}" if "generations_until_best" in ours else ""
        rows.append(
            [
                title,
                f"{ours['mean']:.1f} ({ours['std']:.2f})",
                until,
                *(cell.replace("± ", "").replace("-", "") for cell in found["paper"][title]),
            ]
        )
    return table(
        [
            "control points",
            "mean (std over positions)",
            "generations until the best",
            "paper: mean (std)",
            "paper: generations",
        ],
        rows,
    )


def table08() -> str:
    """Five search sets and one set of held-out questions."""
    found = summary("table08_search_sets/tiny_retriever")
    means = [100 * ours["acc,none"] for name, ours in found["ours"].items() if name != "baseline"]
    baseline = percent(found["ours"]["baseline"])
    ours = [
        "ours",
        baseline,
        f"{min(means):.1f} to {max(means):.1f}",
        f"{found['mean']:.2f}",
        f"{found['sample variance']:.3f}",
    ]
    printed = sorted(float(last(row)) for name, row in found["paper"].items() if name.startswith("LPES"))
    paper = [
        "paper",
        last(found["paper"]["baseline"]),
        f"{printed[0]} to {printed[-1]}",
        f"{found['paper']['mean']}",
        f"{found['paper']['sample variance']}",
    ]
    return table(["", "baseline", "five sets", "mean", "sample variance"], [ours, paper])


def table10() -> str:
    """A generation of the paper's search."""
    plain, shared = (record(f"bench_search/paper_generation_{name}.json") for name in ("h200_with_triton", "shared_h200"))
    paper = plain["paper"]
    rows = [
        [name, f"{1000 * plain['operations'][name]:.2f} ms", f"{paper[name]} s"]
        for name in ("factors from curves", "mutation", "crossover")
    ]
    rows.append(
        [
            "the whole command, GPU-seconds",
            f"{plain['gpu_seconds']:.0f}",
            f"{paper['inference'] * paper['gpus']:,.0f} (inference)",
        ]
    )
    fp8 = record("bench_search/paper_generation_fp8_h200.json")
    rows.append(["the same with `--score-dtype fp8`", f"{fp8['gpu_seconds']:.0f}", ""])
    rows.append(["the same in bfloat16, five questions per set of documents", f"{shared['gpu_seconds']:.0f}", ""])
    return table(["", "ours, one H200", "paper, 4 H100"], rows)


def table11() -> str:
    """GA and gradient at equal prompts."""
    folders = {"SmolLM2, pairs": "smollm2_kv", "Qwen, pairs": "qwen_kv", "Qwen, documents": "qwen_mdqa"}
    found = {title: summary(f"table11_gradient_vs_ga/{name}")["grid"] for title, name in folders.items()}
    rows = [["baseline", *(over_seeds(grid["controls"]["baseline"]) for grid in found.values())]]
    for title in found["Qwen, pairs"]:
        if title.endswith(("GA, accuracy", "GA, log-likelihood", "the GA's prompts")):
            rows.append([title, *(over_seeds(grid[title]["figures"]) for grid in found.values())])
    return table(["", *folders], rows)


def table11_gains() -> str:
    """The same with curves of gains, and by position."""
    grid = summary("table11_gradient_vs_ga/smollm2_gains")["grid"]
    found = {"baseline": grid["controls"]["baseline"]}
    for title, entry in grid.items():
        if title.endswith(("GA, accuracy", "GA, log-likelihood", "the GA's prompts")):
            box, _, optimiser = title.removeprefix("bezier, ").partition(": ")
            kind = next((kind for kind in ("gains", "both") if box.startswith(kind)), "factors")
            found[f"{kind}: {optimiser}"] = entry["figures"]
    rows = []
    for title, seeds in found.items():
        by_position = [100 * np.mean([seed["acc_by_position"][position] for seed in seeds]) for position in ("0", "50", "100")]
        better = sum(seed["acc,none"] > own["acc,none"] for seed, own in zip(seeds, found["baseline"], strict=True))
        rows.append([title, over_seeds(seeds), *(f"{value:.1f}" for value in by_position)])
        rows[-1].append("" if title == "baseline" else f"{better} of {len(seeds)}")
    return table(["", "mean ± over seeds", "0 %", "50 %", "100 %", "seeds above the baseline"], rows)


def table11_appendix() -> str:
    """The paper's gradient baseline."""
    rows = []
    for found in summary("table11_gradient_vs_ga/appendix_c_smollm2")["appendix"].values():
        figures = found["figures"]
        accuracies = (f"{100 * figures[name]['acc,none']:.1f}" for name in ("baseline", "start", "end"))
        moved = max(abs(value) for value in found["moved"])
        rows.append([f"{found['start']:g}", *accuracies, f"{moved:.3f}", "{:.1f}, {:.1f}".format(*found["loss"])])
    return table(
        ["first factor", "as it is", "at the start", "at the end", "largest move of a factor", "loss, first and last"], rows
    )


def figure05() -> str:
    """Attention to the middle third by factor, mean over layers."""
    found = summary("attention_by_position/smollm2")["scales"]
    rows = []
    for scale, entry in found.items():
        mass = {part: 100 * float(np.mean(values)) for part, values in entry["mass"].items()}
        rows.append([scale, *(f"{value:.1f}" for value in mass.values())])
    return table(["factor", *next(iter(found.values()))["mass"]], rows)


def slips() -> str:
    """Rows of the paper whose printed average is not the mean of the row, by more than a rounding error."""
    rows = []
    for task, models in summary("table01_positions/smollm2_kv")["paper"].items():
        title = {"mdqa": "documents", "kv": "pairs"}[task]
        for model, methods in models.items():
            for method, printed in methods.items():
                *values, average = map(float, printed.split())
                rows.append(["1", f"{model}, {title}, {method}", average, float(np.mean(values)), 0.05])
    for folder, averages in PRINTED.items():
        for name, average in averages.items():
            values = list(summary(folder)["paper"][name].values())
            rows.append([folder[6:7], name, average, float(np.mean(values)), 0.005])
    for name, printed in summary("table15_weights/tiny_retriever")["paper"].items():
        *values, average = map(float, printed.split())
        rows.append(["15", name.strip("<>"), average, float(np.mean(values)), 0.05])
    wrong = [
        [number, name, f"{average:g}", f"{mean:.2f}"]
        for number, name, average, mean, rounding in rows
        if abs(average - mean) > rounding + 1e-6
    ]
    return table(["table", "row", "printed", "mean of the row"], wrong)


def uniform_sweep() -> str:
    """One uniform factor on the bundled model."""
    ours = summary("uniform_sweep/tiny_retriever")["ours"]
    names = ["baseline", "0.8", "0.9", "1", "1.1", "1.2", "1.5", "2"]
    return table(["factor", "mean ± s.e."], [[name, percent(ours[name])] for name in names])


def bundled() -> str:
    """The bundled model on seeds that no choice has seen."""
    found = record("tiny_retriever/quick_seeds.json")["results"]
    rows = []
    for name, entry in found.items():
        values = entry if name == "baseline" else entry["acc"]
        p = "-" if name == "baseline" else show_p(entry["p"])
        title = "as it is" if name == "baseline" else f"found factors, seed {name}"
        rows.append([title, *(f"{100 * value:.1f}" for value in values), f"{100 * np.mean(values):.1f}", p])
    return table(["", *(f"{position} %" for position in (0, 25, 50, 75, 100)), "mean", "p"], rows)


def presets() -> str:
    """The presets on SmolLM2, 5 pairs."""
    runs = {
        "paper": "smollm2_search/paper",
        "default": "smollm2_search/default",
        "best of 0.1.0 (factors alone)": "best/smollm2_mixed_text",
    }
    rows = []
    for name, folder in runs.items():
        methods = record(f"{folder}/results.json")["methods"]
        methods = methods.get("5 key-value pairs", methods)
        rows.append(
            [name, percent(methods["baseline"]), percent(methods["lpes"]), show_p(methods["lpes"]["p_against_baseline,none"])]
        )
    return table(["preset", "as it is", "found factors", "p"], rows)


def demo() -> str:
    """Of what `make demo` prints: accuracy by position on held-out questions."""
    found = path_record("two_cores")["figures"].get("demo", {})
    rows = []
    for method in ("baseline", "uniform", "lpes"):
        if method in found:
            by_position = (f"{100 * value:.0f}" for value in found[method]["acc_by_position"].values())
            rows.append([method, *by_position, percent(found[method])])
    return table(["", *(f"{position} %" for position in (0, 25, 50, 75, 100)), "mean"], rows)


def sizes() -> str:
    """Time, and the memory of the largest process, of the README's commands, by model."""
    path, others = (path_record(name) for name in ("two_cores", "more_models"))
    commands = ("make demo", "doctor", "profile", "search", "evaluate", "export")
    runs = [taken for run in path["runs"] for taken in run]
    ours = {name: [taken for taken in runs if re.search(rf"(^|lpes_jax\.){name}( |$)", taken["command"])] for name in commands}
    rows = [["135M, two CPU cores, these commands", *(_took(ours[name]) for name in commands)]]
    for title, found in others["models"].items():
        rows.append([f"{title}, two busy CPU cores", *(_took([found[name]] if name in found else []) for name in commands)])
    looks = [
        record(f"gains/smollm2_kl/{kind}_seed{seed}.json")["search"]["looks"][-1]["seconds"]
        for kind in ("gains", "both")
        for seed in range(3)
    ]
    whole = {run["model"]: run for run in record("speed/best_h200.json")["runs"] if run["uniform_candidates"] == 8}
    titles = ("135M, up to 20 pairs", "0.5B, up to 100 pairs (5 questions per haystack)")
    for title, run in zip(titles, whole.values(), strict=True):
        rows.append([f"{title}: `best` on an H200", "-", "-", "-", f"{run['command_seconds']} s", "-", "-"])
    rows.append(["135M, the searches of the table above", "-", "-", "-", f"{min(looks):.0f} to {max(looks):.0f} s", "-", "-"])
    generation = f"{record('bench_search/paper_generation_fp8_h200.json')['gpu_seconds']:.0f} s"
    rows.append(["7B, an H200, one generation of the paper's search, fp8", "-", "-", "-", generation, "-", "-"])
    return table(*measured(["", *commands], rows))


def measured(head: Sequence[str], rows: Iterable[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """A table's head and rows without the rows and columns that have only "-" beside their titles."""
    rows = [row for row in rows if any(cell != "-" for cell in row[1:])]
    kept = [index for index in range(len(head)) if index == 0 or any(row[index] != "-" for row in rows)]
    return [head[index] for index in kept], [[row[index] for index in kept] for row in rows]


def path_record(name: str) -> dict[str, Any]:
    """What `readme_path.py` measured; nothing if it has not run."""
    path = f"readme_path/{name}.json"
    return record(path) if (RESULTS / path).exists() else {"runs": [], "models": {}, "figures": {}}


def _took(taken: list[dict[str, Any]]) -> str:
    """The seconds of each run, and the largest process's memory."""
    if not taken:
        return "-"
    seconds = " / ".join(f"{one['seconds']:.0f}" for one in taken)
    return f"{seconds} s, {max(one['largest_process_gigabytes'] for one in taken):.1f} GB"


def scaling() -> str:
    """Prompts per second on 1, 2 and 4 devices."""
    found = record("bench_scaling/qwen_h200x4.json")["scaling"]
    one = found[0]["prompts_a_second"]
    rows = [
        [f"{e['devices']}", f"{e['prompts_a_second']:.0f}", f"{e['prompts_a_second'] / one:.2f}", str(e["verdicts_changed"])]
        for e in found
    ]
    return table(["H200s", "prompts/s", "ratio", "changed verdicts"], rows)


def shared_prefixes() -> str:
    """Prompts per second with and without shared prefixes."""
    rows = []
    names = {
        "50 pairs, Qwen2.5-Coder-0.5B": "qwen",
        "50 pairs, SmolLM2-135M": "smollm2",
        "`multikey_2`, Qwen2.5-Coder-0.5B": "qwen_multikey_2",
        "`multikey_2`, SmolLM2-135M": "smollm2_multikey_2",
    }
    for title, name in names.items():
        found = record(f"bench_prefixes/{name}_h200.json")
        rates = [found[part]["prompts_per_second"] for part in ("plain", "shared")]
        saved = f"{100 * found['shared']['tokens_saved']:.1f} %"
        rows.append(
            [title, f"{found['tokens_a_prompt']:,.0f}", *(f"{rate:,.0f}" for rate in rates), f"{found['ratio']:.1f}", saved]
        )
    return table(["one H200", "tokens per prompt", "prompts/s, not shared", "prompts/s, shared", "ratio", "tokens saved"], rows)


def memory_plan() -> str:
    """What fits which card, by the planner."""
    return memory_table.table(memory_table.MemoryTableFlags())


def memory_measured() -> str:
    """Steps of a 7B shape within a part of a card's memory."""
    names = {"bf16": "16 bits", "q8": "as in a Q8_0 file", "q4": "as in a Q4_K file"}
    rows = []
    for each in record("bench_packed/llama_2_7b_h200.json")["cells"]:
        step = {"genetic": "search (GA)", "gradient": "best (gradient)"}[each["step"]]
        rows.append(
            [
                f"{each['gib']:.0f} GiB",
                names[each["form"]],
                step,
                f"{each['prompts']}",
                f"{each['seconds']:.2f}",
                f"{1000 * each['seconds_per_prompt']:.0f}",
                f"{each['peak_gib']:.1f}",
                f"{each['planned_gib']:.1f}",
            ]
        )
    head = ["limit", "matrices", "step", "prompts", "s per step", "ms per prompt", "peak, GiB", "planned, GiB"]
    return table(head, rows)


def eight_bits() -> str:
    """8-bit products against 16-bit ones: speed and agreement."""
    shape = record("bench_8bit/h200/shape.json")["dtypes"]
    fitness = record("bench_8bit/h200/correlation_20_pairs.json")["fitness"]
    rows = []
    for name in ("bfloat16", "fp8", "int8"):
        speed, again = shape[name], "bfloat16, again" if name == "bfloat16" else name
        accuracy, likelihood = (fitness[kind][again] for kind in ("accuracy", "log_likelihood"))
        rows.append(
            [
                name,
                f"{speed['milliseconds']:.0f}",
                f"{speed['against_bfloat16']:.2f}",
                f"{accuracy['spearman_all']:.3f}",
                f"{likelihood['spearman_all']:.3f}",
                f"{100 * accuracy['difference']:+.1f} ± {100 * accuracy['standard_error_of_difference']:.1f}",
            ]
        )
    head = ["products", "7B, ms", "x bfloat16", "Spearman, accuracy", "Spearman, log-likelihood", "its choice, points"]
    return table(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        *(results, changes_smollm2, changes_qwen, changes_qwen_15, mmlu_qwen_15, against_gains, own_answers),
        *(pruned, overlaps, text_smollm2, controls, transfer),
        *(table01, table01_by_position, table02, table03, table04, table05, table06, table06_smollm2, table07, table08),
        *(table10, table11, table11_gains, table11_appendix, table15, table16, table17, figure05, slips, uniform_sweep),
        *(bundled, presets, demo, sizes, scaling, shared_prefixes, memory_plan, memory_measured, eight_bits),
    )
}
