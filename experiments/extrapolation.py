"""Perplexity by position beyond the window: position interpolation and dynamic NTK, uniform and per layer.

    python experiments/extrapolation.py --factors RUN/factors.json --data-folder DATA --stretch 2 4 --limit 8

Texts are the documents of ZeroSCROLLS, L-Eval and QMSum files below --data-folder, joined in the file's order, and plain .txt
files. They are cut into windows of --stretch times the model's own. On the same windows, the script measures

    baseline          the plain model
    PI                all positions divided by the stretch
    PI, mean          the same, and divided by the mean of the found factors
    LPES, PI          the same as PI, and divided by the found factor of each layer (bands and groups as found)
    dynamic           dynamic NTK, a larger base beyond the window, with --dynamic-factor
    dynamic, mean     the same, with positions divided by the mean of the found factors
    LPES, dynamic     the same as dynamic, with positions divided by the found factor of each layer

Each layer-specific row has a uniform row with the same mean. Their difference, in nats per token beyond the window, is the
effect of per-layer factors. Each text and stretch write one JSON file; existing ones are not measured again, and `--part i/n`
measures every n-th. A last call without `--part` writes tables.md, summary.json and a plot of each.

Letters: W windows, S bins of positions, T tokens.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import table02_zero_scrolls
import table03_l_eval
from grid import GridFlags, end_part, in_part, markdown_table, run_script, show_p, write_tables
from jaxtyping import Float
from matplotlib.figure import Figure
from transfer import compare, load_cell

from lpes_jax.errors import UserError
from lpes_jax.evaluate.perplexity import text_nlls
from lpes_jax.evaluation import BASELINE, Candidate, environment
from lpes_jax.factors import LayerFactors
from lpes_jax.methods.tables import dynamic_ntk, lpes, position_interpolation
from lpes_jax.models.llama import Loaded, load
from lpes_jax.report.plots import BASELINE as GREY
from lpes_jax.report.plots import FOUND, OTHERS, plain, save
from lpes_jax.store.files import write_json
from lpes_jax.tasks import make_task
from lpes_jax.tasks.data import content_id
from lpes_jax.tasks.perplexity import Window, slide
from lpes_jax.tasks.prompts import token_ids
from lpes_jax.text_files import read_text

PAIRS = (("LPES, PI", "PI, mean"), ("LPES, PI", "PI"), ("LPES, dynamic", "dynamic, mean"), ("LPES, dynamic", "dynamic"))
NO_TEXT = ("book_sum_sort",)  # summaries in a random order


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The model, the factors, the texts, and how far."""

    factors: Path
    """factors.json of a search inside the window."""
    data_folder: Path
    """Folder of files with documents, at any depth."""
    output_path: Path = Path("runs/extrapolation")
    """Folder of the cells, tables.md, summary.json and the plots."""
    model: str = "smollm2-135m-instruct"
    """A name in models/zoo, a folder in Hugging Face layout, a .gguf file, or a Hugging Face hub id."""
    stretch: tuple[int, ...] = (2,)
    """Lengths of windows, in multiples of the model's own."""
    dynamic_factor: float = 2.0
    """The factor of dynamic NTK."""
    limit: int = 8
    """Windows of each text, evenly spaced."""
    bins_inside: int = 4
    """Bins of positions in the model's own window; bins beyond it have the same width."""
    texts: tuple[str, ...] = ()
    """Texts to measure, by the names in the table (default: all)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    batch_size: int = 1
    """Windows per forward pass."""
    part: str = "0/1"
    """i/n: measure only the cells i, i + n, ... (from 0), and write no tables."""


def texts_of(folder: Path) -> dict[str, str]:
    """The texts below a folder by name: each benchmark's documents, once each, and .txt files."""
    found = {}
    for benchmark in (*table02_zero_scrolls.COLUMNS, *table03_l_eval.COLUMNS):
        data = benchmark.find(folder)
        if data is not None and benchmark.name not in NO_TEXT:
            examples = make_task(benchmark.task, data=data, **benchmark.settings).examples("all", None, 0)
            name = f"{benchmark.task} {benchmark.name}"
            found[name] = "\n\n".join(dict.fromkeys(example.document for example in examples))
    for path in sorted(folder.rglob("*.txt")):
        found[path.stem] = read_text(path)
    return found


def windows_of(text: str, tokenizer: Any, length: int, limit: int) -> list[Window]:
    """`limit` windows (or all) of `length` tokens, evenly spaced, each after the tokenizer's BOS, if any."""
    [ids] = token_ids(tokenizer, [text])
    bos = getattr(tokenizer, "bos_token_id", None)
    begin = [bos] if bos is not None and ids[:1] == [bos] else []
    everything = slide(ids[len(begin) :], length, length, begin)
    count = min(limit, len(everything))
    return [everything[index * len(everything) // count] for index in range(count)]


def candidates_of(found: LayerFactors, stretch: int, dynamic_factor: float) -> list[Candidate]:
    """The rows of the table."""
    mean = LayerFactors.uniform(found.mean, found.num_layers)
    return [
        Candidate(BASELINE),
        Candidate("PI", method=position_interpolation(float(stretch))),
        Candidate("PI, mean", method=lpes(mean, "linear", float(stretch))),
        Candidate("LPES, PI", method=lpes(found, "linear", float(stretch))),
        Candidate("dynamic", method=dynamic_ntk(dynamic_factor)),
        Candidate("dynamic, mean", method=lpes(mean, "dynamic", dynamic_factor)),
        Candidate("LPES, dynamic", method=lpes(found, "dynamic", dynamic_factor)),
    ]


def binned(windows: Sequence[Window], nlls: Sequence[Float[np.ndarray, "T"]], width: int) -> Float[np.ndarray, "W S"]:
    """Nats per token in each bin of `width` positions of each window."""
    starts = range(0, len(windows[0].ids), width)
    return np.array(
        [
            [float(nll[max(start, window.scored) : start + width].mean()) for start in starts]
            for window, nll in zip(windows, nlls, strict=True)
        ]
    )


def measure(s: Settings, loaded: Loaded, text: str, found: LayerFactors, stretch: int) -> dict[str, Any]:
    """Every candidate's nats per token by window and bin; none if the text has no window of this length."""
    window = loaded.model.config.max_position_embeddings
    windows, width, nats = windows_of(text, loaded.tokenizer, stretch * window, s.limit), window // s.bins_inside, {}
    for candidate in candidates_of(found, stretch, s.dynamic_factor) if windows else []:
        begun = time.time()
        nats[candidate.name] = binned(windows, text_nlls(loaded.model, windows, candidate, s.batch_size), width).tolist()
        print(f"   {candidate.name}: {time.time() - begun:.1f} s", flush=True)
    return {"window": window, "width": width, "windows": len(windows), "nats": nats}


def main(s: Settings) -> None:
    """Measure missing cells, write the tables and draw the plots."""
    if s.limit < 1 or s.bins_inside < 1 or not s.stretch or min(s.stretch) < 2:
        raise UserError("--limit and --bins-inside must be at least 1, --stretch 2 or more")
    if not s.data_folder.is_dir():
        raise UserError(f"--data-folder {s.data_folder}: no such folder")
    texts = texts_of(s.data_folder)
    unknown = [name for name in s.texts if name not in texts]
    if unknown or not texts:
        raise UserError(f"--texts {' '.join(unknown)}: the texts below {s.data_folder} are {', '.join(texts) or 'none'}")
    found = LayerFactors.load(s.factors)
    cells = {
        (name, stretch): s.output_path / f"{name.replace(' ', '_')}_{stretch}x.json"
        for name in s.texts or texts
        for stretch in dict.fromkeys(s.stretch)
    }
    loaded: Loaded | None = None
    left_out = {"output_path", "data_folder", "texts", "stretch", "part", "batch_size", "factors"}
    shared = {name: value for name, value in asdict(s).items() if name not in left_out}
    shared["factors"] = content_id(*found.content)
    records = {}
    for number, ((name, stretch), path) in enumerate(cells.items()):
        used = shared | {"stretch": stretch, "text": content_id(texts[name])}
        if in_part(number, s.part) and not path.exists():
            print(f"== {name}, {stretch} windows", flush=True)
            if loaded is None:
                loaded = load(s.model, s.dtype)
                config = loaded.model.config
                found.for_model(config.num_layers, config.num_kv_heads, config.rotary_dim, str(s.factors))
            record = {"settings": used, "model": loaded.identity, **environment()}
            record |= measure(s, loaded, texts[name], found, stretch)
            s.output_path.mkdir(parents=True, exist_ok=True)
            write_json(path, record)
        if path.exists():
            records[name, stretch] = load_cell(path, used)
    end_part(s.part)
    about = (
        f"{Path(s.model).name}, perplexity by position (columns: first position of a bin). Layers - uniform: nats a token "
        "beyond the window, less is better, ± over windows; p: paired permutation over windows. Dynamic NTK has factor "
        f"{s.dynamic_factor:g}.\n"
    )
    parts, summary, short = [about], [], []
    for (name, stretch), record in records.items():
        if not record["windows"]:
            short.append(f"{name} ({stretch}x)")
            continue
        nats = {method: np.array(values, float) for method, values in record["nats"].items()}
        pairs = {
            f"{ours} - {uniform}": compare(nats[ours][:, s.bins_inside :], nats[uniform][:, s.bins_inside :])
            for ours, uniform in PAIRS
        }
        title = f"{name}: {record['windows']} windows of {stretch} x {record['window']} tokens"
        parts += [f"## {title}\n", *tables(nats, record["width"], s.bins_inside, pairs)]
        _draw(s.output_path / f"{name.replace(' ', '_')}_{stretch}x", nats, record["width"], record["window"], title)
        summary.append({"text": name, "stretch": stretch, "windows": record["windows"], "pairs": pairs})
    parts.append(f"Without a window of that length: {', '.join(short) or 'none'}.\n")
    write_tables(GridFlags(output_path=s.output_path), "Beyond the window", parts, {"settings": shared, "ours": summary})


def tables(
    nats: Mapping[str, Float[np.ndarray, "W S"]], width: int, inside: int, pairs: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Perplexity by bin, inside and beyond the window, and the effect of per-layer factors."""
    rows = []
    for method, values in nats.items():
        within, beyond = values[:, :inside].mean(), values[:, inside:].mean()
        rows.append([method, *(f"{np.exp(value):.2f}" for value in [*values.mean(axis=0), within, beyond])])
    starts = [str(width * index) for index in range(next(iter(nats.values())).shape[1])]
    differences = [
        [
            pair,
            f"{difference['difference']:+.4f}"
            + ("" if difference["standard_error"] is None else f" ± {difference['standard_error']:.4f}"),
            show_p(difference["p"]),
        ]
        for pair, difference in pairs.items()
    ]
    header = ["perplexity", *starts, "inside", "beyond"]
    return [markdown_table(header, rows), markdown_table(["layers - uniform", "nats a token", "p"], differences)]


def _draw(stem: Path, nats: Mapping[str, Float[np.ndarray, "W S"]], width: int, window: int, title: str) -> None:
    figure = Figure(figsize=(8.4, 4.4), dpi=200, layout="constrained")
    axes = figure.add_subplot()
    colours = {"baseline": GREY, "PI": OTHERS[0], "dynamic": OTHERS[1]}
    for method, values in nats.items():
        kind = next(kind for kind in ("baseline", "dynamic", "PI") if kind in method)
        style = "-" if "LPES" in method else "--" if "mean" in method else ":" if kind != "baseline" else "-"
        colour = FOUND if method == "LPES, PI" else colours[kind]
        positions = width * (np.arange(values.shape[1]) + 0.5)
        axes.plot(positions, np.exp(values.mean(axis=0)), style, color=colour, marker="o", markersize=4, label=method)
    axes.axvline(window, color="black", linewidth=1)
    axes.set(xlabel="position (tokens); the line is the window", ylabel="perplexity", yscale="log")
    axes.set_title(title, loc="left", fontweight="bold", fontsize=9)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
    plain(axes)
    save(figure, stem)


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
