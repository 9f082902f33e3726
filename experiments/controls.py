"""Are positions repaired? Other ways to give a model equally few new numbers, on the same examples, steps and rate.

    python experiments/controls.py --model smollm2-135m-instruct --num-pairs 5 10 20 --other-pairs 15 30 \\
        --other-key-lengths 8 --num-sentences 40 --data nq-open-oracle.jsonl.gz --text FILE --text-weight 3

    python experiments/controls.py --model smollm2-135m-instruct --mixture mixtures/smollm2.toml --counts 32 \\
        --text KNOWN.txt OTHER.txt --text-window 2048 8192 --text-weight 20 --oracle --data nq-open-oracle.jsonl.gz

Every control of `control_parameters.py` has n numbers per layer, n from `--counts`: 1 corresponds to factors per layer, 8 to
factors of eight frequency bands. The controls are rotary factors (our method), attention temperatures, half of both, gains of
the norm before attention, and the coefficients of a low-rank adapter of the query weights. All but the last start at 1 and have
the same bounds; the adapter's start at 0 and stay within --max-factor - 1 of it. All minimise -log p of the answers to
key-value questions, or to those of a `--mixture`, with the same Adam (`search.gradient.descend`) on the same minibatches. With
several `--learning-rates`, each control uses the one with the lowest loss on the held-back search questions. The control
without numbers is the forced opener against the plain prompt.

The result is measured on other questions: by position, at other lengths, with other keys, on other tasks, and on plain text
(the targets of `transfer.py`). The last tables judge how much of the gain is position repair: `reading` applies a fixed rule,
and rotary factors are compared with the best control that has equally many numbers.

Each control, count and seed writes one JSON file; existing ones are not run again, and `--part i/n` runs every n-th. A last
call without `--part` writes tables.md and summary.json. Controls in the RoPE table also leave factors.json files for
`transfer.py`.

Letters: N prompts, L layers, n numbers per layer, E embedding, D head dim, Q questions, S positions.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from control_parameters import CONTROLS, START, Applied, Control
from grid import GridFlags, end_part, in_part, markdown_table, run_script, show_p, write_tables
from jaxtyping import Array, Float
from transfer import TargetFlags, compare, is_text, load_cell, measure, settings_record, show, targets_of

from lpes_jax.errors import UserError
from lpes_jax.evaluation import BASELINE, PLAIN, Candidate, slots_of
from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama import Loaded, load
from lpes_jax.models.llama.model import Llama
from lpes_jax.rope import Granularity
from lpes_jax.search.algorithms import Gradient
from lpes_jax.search.checks import check_weights
from lpes_jax.search.gradient import Look, descend
from lpes_jax.search.minibatches import Data, pack
from lpes_jax.search.mixture import mixture_of
from lpes_jax.search.objective import mixture_tasks
from lpes_jax.search.plain_text import text_windows
from lpes_jax.search.scorers import search_prompts
from lpes_jax.search.settings import scaled_layers, search_space
from lpes_jax.settings.groups import TaskSettings
from lpes_jax.settings.search import GradientSettings, SearchSettings, TextSettings
from lpes_jax.statistics import paired_permutation_test
from lpes_jax.store.files import write_json
from lpes_jax.store.provenance import environment
from lpes_jax.tasks import make_task
from lpes_jax.tasks import prompts as task_prompts
from lpes_jax.tasks.prompts import Task

LEVEL = 0.05  # of `reading`, divided among the targets that were not searched on


@dataclass(frozen=True, kw_only=True)
class Settings(TargetFlags):
    """The model and controls, how they are trained, and on what they are measured."""

    output_path: Path = Path("runs/controls")
    """Folder of the cells, tables.md and summary.json."""
    model: str = "smollm2-135m-instruct"
    """A name in models/zoo, a folder in Hugging Face layout, a .gguf file, or a Hugging Face hub id."""
    controls: tuple[Control, ...] = ("rotary", "temperature", "norm_gain", "adapter")
    """The controls to run."""
    mixture: Path | None = None
    """A mixture of tasks to search on, in place of kv with --num-pairs (lpes_jax/search/mixture.py)."""
    data_folder: Path | None = None
    """Base folder of the paths in --mixture (default: the mixture's folder)."""
    counts: tuple[int, ...] = (1, 8)
    """Numbers per layer."""
    other_pairs: tuple[int, ...] = ()
    """kv: more targets, of lengths that are not searched on (--num-pairs are searched)."""
    limit: int = 100
    """Search examples of each length; each is used at every search position."""
    search_positions: tuple[int, ...] = (0, 50, 100)
    """Positions of the fact in them, in percent."""
    weights: tuple[float, ...] = (0.2, 0.3, 0.5)
    """Weights of these positions in the loss."""
    steps: int = 200
    """Steps of Adam."""
    learning_rates: tuple[float, ...] = (0.03,)
    """Initial rates; they decay along a cosine."""
    minibatch_size: int = 24
    """Prompts of each length per step."""
    validation_share: float = 0.25
    """Share of the search examples on which the best step is chosen."""
    look_every: int = 10
    """Steps between two validations on these."""
    min_factor: float = 0.5
    """Lowest factor, temperature and gain."""
    max_factor: float = 2.0
    """Highest."""
    text_weight: float = 0.0
    """Weight of the loss of plain text (the first --text, or text that the model writes), in nats per token."""
    text_objective: Literal["nll", "kl"] = "nll"
    """The loss of plain text, as --text-objective of `search`."""
    text_minibatch: int = 4
    """Windows of text per step."""
    search_text_window: tuple[int, ...] = ()
    """Tokens of a text window in the search, with --mixture (default: the first of --text-window)."""
    max_text_loss_rise: float | None = None
    """Maximum allowed rise of held-back text loss; with several --search-text-window, in every quarter."""
    seeds: tuple[int, ...] = (0,)
    """Each seed is a run of every control with its own search examples and minibatches."""
    plain_prompt: bool = True
    """Also measure the prompt without the answer's opener."""


def main(s: Settings) -> None:
    """Run missing cells and write the tables."""
    if s.data_folder is not None and s.mixture is None:
        raise UserError("--data-folder is the base folder of the paths in --mixture; remove it")
    check_weights(s.weights, s.search_positions)
    used = settings_record(s, "controls", "counts", "seeds", "plain_prompt")
    targets = targets_of(replace(s, num_pairs=(*s.num_pairs, *s.other_pairs)))
    learnt: dict[str, tuple[Control, int, int]] = {
        f"{control}_{count}_seed{seed}": (control, count, seed)
        for control in s.controls
        for count in s.counts
        for seed in s.seeds
    }
    without_numbers = [BASELINE, "plain_prompt"][: 1 + s.plain_prompt]
    names: list[str] = [*without_numbers, *learnt]
    loaded: Loaded | None = None
    for number, name in enumerate(names):
        path = s.output_path / f"{name}.json"
        if not in_part(number, s.part) or path.exists():
            continue
        print(f"== {name}", flush=True)
        loaded = loaded or load(s.model, s.dtype)
        s.output_path.mkdir(parents=True, exist_ok=True)
        record: dict[str, Any] = {"settings": used, "model": loaded.identity}
        if name not in learnt:
            record |= measure(s, targets, loaded, Candidate(name, plain=name != BASELINE))
        else:
            control, count, seed = learnt[name]
            values, record["training"] = train(s, loaded, control, count, seed)
            found = as_factors(control, values)
            if found is not None:
                origin = {
                    "model": loaded.identity,
                    "rope": loaded.model.config.rope.to_hf(),
                    "search": used | {"seed": seed},
                }
                found = replace(found, **origin)
                found.save(s.output_path / f"{name}.factors.json")
            model = loaded.model
            if found is None:
                model, _ = CONTROLS[control](model, model.config.rope_table(1), jnp.asarray(values, jnp.float32))
            factors = found
            record |= measure(s, targets, loaded, Candidate(name, factors), model)
        write_json(path, record | environment())
    end_part(s.part)
    records = {name: load_cell(s.output_path / f"{name}.json", used) for name in names}
    scores = {name: _mean_scores([records[name]]) for name in without_numbers} | {
        f"{control}, {count} a layer": _mean_scores([records[f"{control}_{count}_seed{seed}"] for seed in s.seeds])
        for control in s.controls
        for count in s.counts
    }
    layers = int(records[BASELINE]["model"]["num_layers"])
    seen = _searched(s, targets)
    parameters = {f"{control}, {count} a layer": layers * count for control in s.controls for count in s.counts}
    _report(s, scores, parameters, list(targets), seen, {name: records[name]["training"] for name in learnt})


def as_factors(control: Control, values: Float[np.ndarray, "L n"]) -> LayerFactors | None:
    """The values as factors and gains of the RoPE table; None for a control that changes the weights in another way.

    A single gain per layer also scales unrotated elements in `control_parameters.temperature`, but not here.
    """
    if control not in ("rotary", "temperature", "both"):
        return None

    def shaped(numbers: Float[np.ndarray, "L n"]) -> tuple[np.ndarray, Granularity]:
        return (numbers[:, 0], "layer") if numbers.shape[1] == 1 else (numbers, "layer_band")

    if control == "rotary":
        return LayerFactors(*shaped(values))
    rates, temperatures = np.split(values, 2, axis=1) if control == "both" else (np.ones((len(values), 1)), values)
    gains, granularity = shaped(temperatures)
    return LayerFactors(*shaped(rates), gains=gains, gains_granularity=granularity)


def train(
    s: Settings, loaded: Loaded, control: Control, count: int, seed: int
) -> tuple[Float[np.ndarray, "L n"], dict[str, Any]]:
    """Train a control. Returns its values and a record, for the learning rate with the lowest held-back loss."""
    started, start = time.time(), START[control]
    learnt_from, held_back, longest = _data(s, loaded, seed)
    config = loaded.model.config
    own = config.rope_table(longest)
    low, high = (s.min_factor, s.max_factor) if start else (1 - s.max_factor, s.max_factor - 1)

    def apply(model: Llama, values: Float[Array, "L n"]) -> Applied:
        return CONTROLS[control](model, own, values)

    project = partial(jnp.clip, min=low, max=high)
    text = TextSettings(
        text_weight=s.text_weight,
        text_objective=s.text_objective,
        text_minibatch=s.text_minibatch,
        max_text_loss_rise=s.max_text_loss_rise,
    )
    runs: dict[float, list[Look]] = {}
    best: dict[float, Look] = {}
    for rate in s.learning_rates:
        runs[rate] = seen = []
        settings = GradientSettings(
            steps=s.steps,
            learning_rate=rate,
            minibatch_size=s.minibatch_size,
            validation_share=s.validation_share,
            look_every=s.look_every,
        )
        best[rate] = descend(
            loaded.model,
            learnt_from,
            held_back,
            jnp.full((config.num_layers, count), start, jnp.float32),
            apply,
            settings,
            text,
            project=project,
            seed=seed,
            on_look=lambda reached, _, seen=seen: seen.append(reached),
        )
    chosen = min(best, key=lambda rate: best[rate].loss)
    values = np.asarray(best[chosen].parameters, np.float64)
    record = {
        "parameters": values.size,
        "learning_rate": chosen,
        "step": best[chosen].step,
        "first_loss": runs[chosen][0].loss,
        "best_loss": best[chosen].loss,
        "loss_by_learning_rate": {str(rate): measured.loss for rate, measured in best.items()},
        "looks": [
            {
                "step": measured.step,
                "task_losses": measured.task_losses,
                "text_loss": _finite(measured.text_loss),
                "text_divergence": measured.text_divergence,
            }
            for measured in runs[chosen]
        ],
        "moved": float(np.abs(values - start).mean()),
        "values": values.tolist(),
        "seconds": round(time.time() - started, 1),
    }
    print(f"   loss on held-back questions {record['first_loss']:.3f} -> {record['best_loss']:.3f}, {record['seconds']} s")
    return values, record


def reading(
    figures: Mapping[str, Mapping[str, Any]], gains: Mapping[str, float], searched: Sequence[str]
) -> tuple[str, list[str], list[str]]:
    """Judge a control by a rule that was fixed in advance; also returns the unsearched targets that gained, and that lost.

    "no gain": no significant gain on the searched targets. "task tuning": a gain, but not a larger one in the middle than at
    the ends. "position repair, of this task": a larger one in the middle. "position repair": in addition, an unsearched target
    gained and none lost. Unsearched targets are tested at 0.05 / their number.

    Args:
        figures: The comparison (`compare`) of each target.
        gains: Those of the searched targets together (`middle_against_ends`).
        searched: The titles of the searched targets.
    """
    unseen = [title for title in figures if title not in searched and not is_text(title)]
    sure = [title for title in unseen if figures[title]["p"] < LEVEL / len(unseen)]
    gained = [title for title in sure if figures[title]["difference"] > 0]
    lost = [title for title in sure if figures[title]["difference"] < 0]
    if gains["p_gain"] >= LEVEL or gains["gain"] <= 0:
        return "no gain", gained, lost
    if gains["p"] >= LEVEL or gains["middle"] <= gains["ends"]:
        return "task tuning", gained, lost
    return "position repair" if gained and not lost else "position repair, of this task", gained, lost


def middle_against_ends(
    ours: Float[np.ndarray, "Q S"], baseline: Float[np.ndarray, "Q S"], positions: Sequence[int]
) -> dict[str, float]:
    """The gain between 0 and 100 %, the gain at these two positions, p of their difference, and both as shares of the errors.

    If the baseline is almost always right, only a small gain is possible; the shares account for that.
    """
    ends = np.array([position in (0, 100) for position in positions])
    if ends.all() or not ends.any():
        raise UserError("--positions: give 0 or 100, and others between them")
    contrast = ((ours - baseline) @ np.where(ends, -1 / ends.sum(), 1 / (~ends).sum())).round(9)[:, None]  # exact zeros
    gains = {"middle": (ours - baseline)[:, ~ends], "ends": (ours - baseline)[:, ends]}
    errors = {"middle": 1 - baseline[:, ~ends].mean(), "ends": 1 - baseline[:, ends].mean()}
    shares = {f"{where}_share": float(gains[where].mean() / error) if error else 0.0 for where, error in errors.items()}
    return {
        "gain": float((ours - baseline).mean()),
        "p_gain": paired_permutation_test(ours, baseline),
        **{where: float(gain.mean()) for where, gain in gains.items()},
        "p": paired_permutation_test(contrast, np.zeros_like(contrast)),
        **shares,
    }


def _data(s: Settings, loaded: Loaded, seed: int) -> tuple[Data, Data, int]:
    """Search prompts of each length and text, the held-back part of both (the last ones), and the longest prompt's tokens."""
    if s.mixture is not None:
        return _data_of_mixture(s, loaded, seed)
    learnt_from, held_back, longest = [], [], 0
    for pairs in s.num_pairs:
        task = make_task("kv", num_pairs=pairs, key_length=s.key_length)
        slots = slots_of(task, s.search_positions)
        prompts = [task.prompt(example, *slot) for example in task.examples("search", s.limit, seed) for slot in slots]
        encoded = task_prompts.encode(prompts, loaded.tokenizer, loaded.model.config.max_position_embeddings)
        border = (s.limit - math.ceil(s.validation_share * s.limit)) * len(slots)
        if not 0 < border < len(encoded):
            raise UserError(f"--limit {s.limit} leaves no question to train on besides --validation-share; raise it")
        for part, data in ((encoded[:border], learnt_from), (encoded[border:], held_back)):
            data.append(pack(part, list(s.weights) * (len(part) // len(slots))))
        longest = max(longest, *(len(prompt.ids) + max(map(len, prompt.answers)) for prompt in encoded))
    if not s.text_weight:
        return Data(learnt_from), Data(held_back), longest
    windows = jnp.asarray(text_windows(next(iter(s.text), None), loaded.model, loaded.tokenizer, seed, s.text_window[0]))
    border = len(windows) - math.ceil(s.validation_share * len(windows))
    if not border:
        raise UserError("--text is too short to hold a part back; give a longer one")
    return Data(learnt_from, windows[:border]), Data(held_back, windows[border:]), max(longest, windows.shape[1])


def _searched(s: Settings, targets: Mapping[str, Task]) -> list[str]:
    """The titles of the targets whose kind of question was searched on (with other questions)."""
    if s.mixture is None:
        return list(targets)[: len(s.num_pairs)]
    mixture = mixture_of(TaskSettings(mixture=s.mixture, data_folder=s.data_folder), s.limit, s.test_limit)
    assert mixture is not None

    def kind(task: Any) -> Any:
        return {name: value.name if isinstance(value, Path) else value for name, value in vars(task).items()}

    kinds = [(task.name, kind(task)) for task in mixture.tasks]
    return [title for title, task in targets.items() if (task.name, kind(task)) in kinds]


def _data_of_mixture(s: Settings, loaded: Loaded, seed: int) -> tuple[Data, Data, int]:
    """The same for a mixture, as in `search --mixture --algorithm gradient`."""
    settings = SearchSettings.of(
        mixture=s.mixture,
        data_folder=s.data_folder,
        algorithm="gradient",
        curve="free",
        limit=s.limit,
        seed=seed,
        search_positions=s.search_positions,
        weights=s.weights,
        minibatch_size=s.minibatch_size,
        validation_share=s.validation_share,
        text=next(iter(s.text), None),
        text_weight=s.text_weight,
        text_window=s.search_text_window or s.text_window[:1],
        max_text_loss_rise=s.max_text_loss_rise,
    )
    mixture = mixture_of(settings.task, s.limit, s.test_limit)
    assert mixture is not None
    config, tokenizer, prompts = loaded.model.config, loaded.tokenizer, []
    slots = [slots_of(task, s.search_positions if task.num_items > 1 else (0,)) for task in mixture.tasks]
    for part, task_slots in zip(mixture.parts, slots, strict=True):
        examples = part.task.examples("search", part.limit, seed)
        prompts.append(search_prompts(settings, config, part.task, tokenizer, examples, task_slots, Counter()))
    tasks = mixture_tasks(mixture.titles, mixture.weights, slots, prompts, s.weights)
    descent = Gradient(settings, search_space(settings, config, scaled_layers(settings, config.num_layers)))
    return descent.data(loaded.model, tokenizer, prompts, tasks, s.weights)


def _report(
    s: Settings,
    scores: Mapping[str, Mapping[str, Float[np.ndarray, "Q S"]]],
    parameters: Mapping[str, int],
    targets: Sequence[str],
    seen: Sequence[str],
    training: Mapping[str, Any],
) -> None:
    searched, baseline = targets[: len(s.num_pairs)], scores[BASELINE]
    figures = {
        name: {title: compare(values, baseline[title]) for title, values in by_target.items()}
        for name, by_target in scores.items()
        if name != BASELINE
    }
    parts = [_about(s)]
    header = ["", "numbers", *(f"{position} %" for position in s.positions), "mean", "gain", "p"]
    for title in searched:
        rows = []
        for name, by_target in scores.items():
            accuracy = [f"{100 * value:.1f}" for value in by_target[title].mean(axis=0)]
            against = ["-", "-"] if name == BASELINE else show(figures[name][title], title)[2:]
            mean = f"{100 * by_target[title].mean():.1f}"
            rows.append([_label(name), str(parameters.get(name, 0)), *accuracy, mean, *against])
        parts.append(f"## {title}: accuracy by position\n\n{markdown_table(header, rows)}")

    shown = [title for title in baseline if title not in searched]
    rows = [[_label(BASELINE), *(_level(baseline[title], title) for title in shown)]]
    for name in figures:
        changes = [show(figures[name][title], title)[2:] if title in figures[name] else ["-"] for title in shown]
        rows.append([_label(name), *(", p ".join(change) for change in changes)])
    if shown:
        columns = [f"{title} (searched)" if title in seen else title for title in shown]
        parts.append(f"## Other targets: baseline, and gains\n\n{markdown_table(['', *columns], rows)}")

    rows, readings = [], {}
    for name in parameters:
        ours, base = (np.mean([values[title] for title in searched], axis=0) for values in (scores[name], baseline))
        gains = middle_against_ends(ours, base, s.positions)
        verdict, gained, lost = reading(figures[name], gains, seen)
        readings[name] = gains | {"reading": verdict, "gained": gained, "lost": lost}
        errors = [f"{100 * gains[where]:+.1f} ({100 * gains[f'{where}_share']:.0f} %)" for where in ("middle", "ends")]
        rows.append([name, *errors, show_p(gains["p"]), ", ".join(gained) or "-", ", ".join(lost) or "-", verdict])
    header = ["", "middle (of its errors)", "ends (of theirs)", "p", "unseen gained", "unseen lost", "reading"]
    parts.append(f"## Position repair or task tuning\n\n{_RULE}\n\n{markdown_table(header, rows)}")
    against = _against_controls(s, scores, list(baseline))
    if against:
        header = ["", *baseline]
        rows = [
            [name, *(", p ".join(show(compared[title], title)[2:]) for title in header[1:])]
            for name, compared in against.items()
        ]
        parts.append(f"## Rotary factors less the best control with as many numbers\n\n{markdown_table(header, rows)}")
    summary = {
        "figures": figures,
        "readings": readings,
        "rotary_against_best": against,
        "parameters": parameters,
        "training": training,
    }
    write_tables(GridFlags(output_path=s.output_path), "Controls: is it positions that are repaired?", parts, summary)


def _against_controls(
    s: Settings, scores: Mapping[str, Mapping[str, Float[np.ndarray, "Q S"]]], titles: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Rotary factors against the best control on the searched (held-out) questions; this choice favours the control."""
    searched, against = titles[: len(s.num_pairs)], {}
    for count in s.counts:
        controls = [f"{control}, {count} a layer" for control in s.controls if control != "rotary"]
        if controls and "rotary" in s.controls:
            best = max(controls, key=lambda name: np.mean([scores[name][title].mean() for title in searched]))
            ours = scores[f"rotary, {count} a layer"]
            against[f"rotary - {best}"] = {title: compare(ours[title], scores[best][title]) for title in titles}
    return against


def _about(s: Settings) -> str:
    searched = f"kv with {' '.join(map(str, s.num_pairs))} pairs" if s.mixture is None else f"the mixture {s.mixture.name}"
    return (
        f"{Path(s.model).name}, searched on {searched}, {s.limit} examples of each, "
        f"{s.steps} steps of {s.minibatch_size} prompts, learning rates {' '.join(map(str, s.learning_rates))}, text weight "
        f"{s.text_weight:g}, seeds {' '.join(map(str, s.seeds))} (scores are means over them); {s.test_limit} held-out "
        "questions per target. Accuracy in percent, gains in points over the baseline, text in nats per token (less is "
        "better). p: paired permutation over questions.\n"
    )


_RULE = (
    "On the searched lengths together: gain in the middle and at 0 and 100 %, with its share of the baseline's errors there, "
    "and p of the difference of the two gains. No gain: no significant gain on the searched lengths. Task tuning: the middle "
    "gains no more than the ends. Position repair of this task: the middle gains more. Position repair: in addition, an "
    f"unsearched target gains and none loses, at {LEVEL} / their number."
)


def _label(name: str) -> str:
    return {BASELINE: "baseline (forced opener)", "plain_prompt": f"{PLAIN} (no opener)"}.get(name, name)


def _level(values: Float[np.ndarray, "Q S"], title: str) -> str:
    return f"{values.mean():.4f}" if is_text(title) else f"{100 * values.mean():.1f}"


def _mean_scores(records: Sequence[Mapping[str, Any]]) -> dict[str, Float[np.ndarray, "Q S"]]:
    """The scores of each target, averaged over seeds, which share the questions."""
    titles = records[0]["targets"]
    return {title: np.mean([record["targets"][title]["scores"] for record in records], axis=0) for title in titles}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    run_script(Settings, main, __doc__)
