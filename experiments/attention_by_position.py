"""The attention of each layer by position, against the scaling factor, and its entropy beside the found factor (Figure 5).

    python experiments/attention_by_position.py --data qmsum/ALL_val.jsonl --scales 1 1.2 1.5 2 --factors RUN/factors.json

A prompt of QMSum (or of another summary or question task of ZeroSCROLLS) is instruction, context and query. The attention of
the last --queries tokens, from which the answer starts, is divided among the part before the context, its three thirds in
tokens, and the part after it: the mean over queries, heads and prompts, per layer. Entropy is that of the same weights, in
nats. The model runs unchanged; only the weights of these few queries are computed in addition, one layer at a time.

Each scale writes one JSON file; existing ones are not measured again. Then attention_by_position.{png,svg}, tables.md and
summary.json are written.

Letters: L layers, B prompts, N queries, T tokens, H heads, K key-value heads, D head dim, R regions.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks import spread
from grid import GridFlags, markdown_table, run_script, write_tables
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from transfer import load_cell

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama import Llama, Loaded, load
from lpes_jax.models.llama.attention import causal_attention
from lpes_jax.models.llama.model import LayerContext, layer_rows, rotated, run_layers
from lpes_jax.report.plots import BASELINE, FOUND, OTHERS, plain, save
from lpes_jax.rope import RopeTable
from lpes_jax.scoring import round_up
from lpes_jax.store.files import write_json
from lpes_jax.store.provenance import environment
from lpes_jax.tasks import make_task
from lpes_jax.tasks.data import content_id
from lpes_jax.tasks.prompts import Prompt, fit

REGIONS = ("before", "first third", "middle third", "last third", "behind")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The model, the prompts and the scales."""

    data: Path
    """QMSum's ALL_val.jsonl or a validation file of ZeroSCROLLS."""
    subset: str = "qmsum"
    """The subset of ZeroSCROLLS."""
    output_path: Path = Path("runs/attention_by_position")
    """Folder of the cells, the plot and the tables."""
    model: str = "smollm2-135m-instruct"
    """A name in models/zoo, a folder in Hugging Face layout, a .gguf file, or a Hugging Face hub id."""
    scales: tuple[float, ...] = (1.0, 1.2, 1.5, 2.0)
    """Uniform factors; 1 is the plain model, and is always measured."""
    factors: Path | None = None
    """factors.json of a search, measured too."""
    limit: int = 20
    """Prompts, evenly spaced over the file."""
    queries: int = 16
    """N: last tokens of a prompt whose attention is read."""
    max_prompt_tokens: int = 3584
    """Longer prompts lose the end of their context."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    batch_size: int = 4
    """Prompts per forward pass."""


def attention_mass(
    q: Float[Array, "B T H D"], k: Float[Array, "B T K D"], lengths: Int[Array, "B"], edges: Int[Array, "B R1"], queries: int
) -> tuple[Float[Array, "B R"], Float[Array, "B"]]:
    """Attention of the last `queries` queries of each prompt, rotated as k is: its mass from each edge up to the next (there
    are R + 1), and its entropy in nats; means over queries and heads."""
    batch, length, heads, head_dim = q.shape
    positions = lengths[:, None] - queries + jnp.arange(queries)
    last = jnp.take_along_axis(q, positions[:, :, None, None], axis=1).reshape(batch, queries, k.shape[2], -1, head_dim)
    logits = jnp.einsum("bnkgd,btkd->bnkgt", last.astype(jnp.float32), k.astype(jnp.float32), precision="highest")
    keys = jnp.arange(length)
    logits = jnp.where((keys <= positions[:, :, None])[:, :, None, None], logits * head_dim**-0.5, -jnp.inf)
    weights = jax.nn.softmax(logits, axis=-1)
    inside = (keys >= edges[:, :-1, None]) & (keys < edges[:, 1:, None])  # [B, R, T]
    mass = jnp.einsum("bnkgt,brt->br", weights, inside.astype(jnp.float32), precision="highest") / (queries * heads)
    entropy = -jax.scipy.special.xlogy(weights, weights).sum(axis=-1)
    return mass, entropy.mean(axis=(1, 2, 3))


@partial(jax.jit, static_argnames="queries")
def attention_of(
    model: Llama, tokens: Int[Array, "B T"], lengths: Int[Array, "B"], edges: Int[Array, "B R1"], table: RopeTable, queries: int
) -> tuple[Float[Array, "L B R"], Float[Array, "L B"]]:
    """`attention_mass` of every layer. Raises UserError for a model with sliding windows in use."""
    config, positions = model.config, jnp.arange(tokens.shape[1])
    if (config.windows(tokens.shape[1]) < tokens.shape[1]).any():
        raise UserError(
            f"layers of this model see only the last {config.sliding_window} tokens; lower --max-prompt-tokens to that"
        )

    def attend(q: Array, k: Array, v: Array, context: LayerContext) -> tuple[Array, Any]:
        q, k = rotated(q, k, context.row, positions)
        return causal_attention(q, k, v), attention_mass(q, k, lengths, edges, queries)

    return run_layers(model, model.embed[...][tokens], layer_rows(config, table), attend, keep=lambda x, kept: kept)[1]


def edges_of(prompt: Prompt, whole: Prompt, starts: Sequence[int]) -> list[int]:
    """Token indices at which the regions begin, and the end. `starts`: the characters at which tokens begin; `whole`: the
    prompt before it was cut to fit."""
    assert whole.cut is not None
    behind = len(whole.text) - whole.cut.end + (len(whole.cut.separator) if prompt.was_cut else 0)
    begin, end = np.searchsorted(starts, [whole.cut.start, len(prompt.text) - behind]).tolist()
    return [0, *(begin + (end - begin) * third // 3 for third in range(4)), len(starts)]


def measure(s: Settings, loaded: Loaded, factors: LayerFactors) -> dict[str, Any]:
    """The mass of each region and the entropy, per layer."""
    config, tokenizer = loaded.model.config, loaded.tokenizer
    task = make_task("zero_scrolls", data=s.data, subset=s.subset, max_prompt_tokens=s.max_prompt_tokens)
    whole = [task.prompt(example, 0) for example in spread(task.examples("all", None, 0), s.limit)]
    window = config.max_position_embeddings
    prompts = fit(whole, tokenizer, window, max_prompt_tokens=s.max_prompt_tokens).prompts
    encoded = [tokenizer(prompt.text, return_offsets_mapping=True) for prompt in prompts]
    edges = [
        edges_of(prompt, uncut, [start for start, _ in ids["offset_mapping"]])
        for prompt, uncut, ids in zip(prompts, whole, encoded, strict=True)
    ]
    lengths = [len(ids["input_ids"]) for ids in encoded]
    if min(lengths) < s.queries:
        raise UserError(f"--queries {s.queries}: a prompt has only {min(lengths)} tokens")
    tokens = np.zeros((len(prompts), round_up(max(lengths))), np.int32)
    for row, ids in zip(tokens, encoded, strict=True):
        row[: len(ids["input_ids"])] = ids["input_ids"]
    table = config.rope_table(tokens.shape[1], factors)
    mass, entropy = np.zeros((config.num_layers, len(REGIONS))), np.zeros(config.num_layers)
    for start in range(0, len(prompts), s.batch_size):
        rows = [min(start + n, len(prompts) - 1) for n in range(s.batch_size)]  # the last batch repeats: one compilation
        count = min(s.batch_size, len(prompts) - start)
        given = (jnp.asarray(np.array(values)[rows], jnp.int32) for values in (tokens, lengths, edges))
        batch_mass, batch_entropy = attention_of(loaded.model, *given, table, s.queries)
        mass += np.asarray(batch_mass, np.float64)[:, :count].sum(axis=1)
        entropy += np.asarray(batch_entropy, np.float64)[:, :count].sum(axis=1)
    middle = (mass / len(prompts)).T
    return {
        "prompts": len(prompts),
        "prompt_tokens": float(np.mean(lengths)),
        "mass": dict(zip(REGIONS, middle.tolist(), strict=True)),
        "entropy": (entropy / len(prompts)).tolist(),
    }


def main(s: Settings) -> None:
    """Measure missing scales, write the tables and draw the plot."""
    for name in ("limit", "queries", "batch_size"):
        if getattr(s, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(s, name)}")
    found = None if s.factors is None else LayerFactors.load(s.factors)
    loaded: Loaded | None = None
    left_out = {"output_path", "scales", "factors", "batch_size"}
    shared = {name: value for name, value in asdict(s).items() if name not in left_out}
    records: dict[str, dict[str, Any]] = {}
    names: list[str] = ["1", *(f"{scale:g}" for scale in s.scales), *(["found"] if found else [])]
    for name in dict.fromkeys(names):
        path = s.output_path / f"scale_{name}.json"
        own = content_id(*found.content) if found and name == "found" else None
        used = json.loads(json.dumps(shared | {"scale": name, "factors": own}, default=str))
        if not path.exists():
            print(f"== scale {name}", flush=True)
            loaded = load(s.model, s.dtype) if loaded is None else loaded
            config = loaded.model.config
            if found and name == "found":
                factors = found.for_model(config.num_layers, config.num_kv_heads, config.rotary_dim, str(s.factors))
            else:
                factors = LayerFactors.uniform(float(name), config.num_layers)
            record = {"settings": used, "model": loaded.identity, **environment(), **measure(s, loaded, factors)}
            s.output_path.mkdir(parents=True, exist_ok=True)
            write_json(path, record)
        records[name] = load_cell(path, used)
    rows = []
    for name, record in records.items():
        means = {region: float(np.mean(values)) for region, values in record["mass"].items()}
        context = sum(means[region] for region in REGIONS[1:4])
        cells = [f"{100 * means[region]:.2f}" for region in REGIONS]
        rows.append([name, *cells, f"{100 * means['middle third'] / context:.1f}", f"{np.mean(record['entropy']):.3f}"])
    plain = records["1"]
    title = f"{Path(s.model).name}, {plain['prompts']} prompts of {s.subset}, {plain['prompt_tokens']:.0f} tokens"
    about = (
        f"{title}: attention of the last {s.queries} tokens in percent, mean over layers, heads and prompts. The paper's "
        "Figure 5 has no figures; it says that attention to the middle rises with the scale.\n"
    )
    header = ["scale", *REGIONS, "middle third of the context's", "entropy (nats)"]
    parts = [about, markdown_table(header, rows)]
    middle = {name: record["mass"]["middle third"] for name, record in records.items()}
    layers = [
        [str(layer), *(f"{100 * values[layer]:.2f}" for values in middle.values())] for layer in range(len(plain["entropy"]))
    ]
    parts += ["Middle third by layer, in percent:\n", markdown_table(["layer", *middle], layers)]
    summary: dict[str, Any] = {"settings": shared | {"data": str(s.data)}, "scales": records}
    by_layer = None
    if found is not None:
        by_layer = found.factors.reshape(found.num_layers, -1).mean(axis=1)
        correlation: Any = spearmanr(plain["entropy"], by_layer)  # nan where all factors are the same
        rho, p = float(correlation.statistic), float(correlation.pvalue)
        summary["found"] = {"factor_by_layer": by_layer.tolist(), "rank_correlation_with_entropy": rho, "p": p}
        parts.append(
            f"Rank correlation of a layer's entropy, as the model is, and its found factor (mean of its bands or groups): "
            f"{rho:+.2f}, p {p:.3f}, over {len(by_layer)} layers.\n"
        )
    _draw(s.output_path / "attention_by_position", middle, plain["entropy"], by_layer, title)
    write_tables(GridFlags(output_path=s.output_path), "Attention by position (Figure 5)", parts, summary)


def _draw(
    stem: Path,
    middle: Mapping[str, Sequence[float]],
    entropy: Sequence[float],
    factors: Float[np.ndarray, "L"] | None,
    title: str,
) -> None:
    figure = Figure(figsize=(11, 4.2), dpi=200, layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = iter((*OTHERS, *OTHERS))
    for name, values in middle.items():
        colour = BASELINE if name == "1" else FOUND if name == "found" else next(colours)
        left.plot(100 * np.array(values), color=colour, marker="o", markersize=3.5, label=f"s = {name}")
    left.set(xlabel="layer", ylabel="attention to the middle third (%)")
    left.legend(frameon=False)
    right.plot(entropy, color=BASELINE, marker="o", markersize=3.5)
    right.set(xlabel="layer", ylabel="entropy as the model is (nats, grey)")
    for axes in (left, right):
        plain(axes)
    if factors is not None:
        other = right.twinx()
        other.plot(factors, color=FOUND, marker="s", markersize=3.5)
        other.set_ylabel("found factor (blue)")
        other.spines[["top"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=10)
    save(figure, stem)


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
