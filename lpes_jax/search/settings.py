"""What a search is asked to do: the flags of `python -m lpes_jax.search`, and the presets that set many of them at once.

settings = preset("quick", num_pairs=4)      # SearchSettings() is the preset `default`
"""

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lpes_jax.errors import UserError
from lpes_jax.factors import LEAST, MOST, LayerFactors
from lpes_jax.limits import check_bounds, check_individuals
from lpes_jax.models.llama.chat import PromptForm, check_chat
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.rope import Granularity
from lpes_jax.search.genetic_settings import GeneticSettings
from lpes_jax.search.gradient import GradientSettings
from lpes_jax.search.mixture import is_mixture
from lpes_jax.search.plain_text import DEFAULT_WINDOW
from lpes_jax.search.space import Learn, Parameter, Space
from lpes_jax.tasks.flags import SETTINGS as TASK_SETTINGS
from lpes_jax.tasks.flags import TaskFlags
from lpes_jax.tasks.prompts import Overlength, check_once, check_positions

Curve = Literal["bezier", "linear", "step", "free", "authors", "shared"]
Fitness = Literal["accuracy", "log_likelihood", "metric"]

PRESETS: dict[str, dict[str, Any]] = {
    # The same algorithm where small models see something: from the model as it is, below 1 too, ties broken by likelihood.
    "default": {},
    # Tables 9 and 12 to the letter: fitness is accuracy alone, and among equals the one found first stays.
    "paper": {"min_factor": 1.0, "initial_factor": 1.5, "y_step": 0.1, "tie_break": False, "uniform_candidates": 11},
    # Minutes on two cores with the bundled model: few questions, few generations. The first two layers are left as they are, as
    # in the authors' code, and the others may go further than the paper lets them, from the middle of the box as in the paper.
    "quick": {
        "num_pairs": 36,
        "key_length": 8,
        "layers": "2:",
        "min_factor": 1.0,
        "max_factor": 4.0,
        "initial_factor": 2.5,
        "max_change_y": 1.5,
        "limit": 8,
        "test_limit": 10,
        "population_size": 12,
        "parents": 4,
        "mutations": 6,
        "crossovers": 1,
        "generations": 3,
        "uniform_candidates": 4,
    },
    # Our best: a factor for each frequency of each layer, by gradient, on all positions alike, while plain text must stay as
    # likely as it was. Give it prompts of several lengths (--num-pairs 50 100): what is found on one holds on that one.
    "best": {
        "algorithm": "gradient",
        "curve": "free",
        "granularity": "layer_band",
        "bands": 0,
        "min_factor": 0.2,
        "max_factor": 4.0,
        "search_positions": (0, 25, 50, 75, 100),
        "weights": (0.2, 0.2, 0.2, 0.2, 0.2),
        "limit": 100,
        "steps": 300,
        "minibatch_size": 16,
        "text_weight": 20.0,
        "max_text_loss_rise": 0.03,
    },
}
# `--preset paper --algorithm gradient`: three sets of 2,000 prompts drawn by weight, batches of 32, learning rate 1e-5, 30
# epochs of 2,000 draws. Ours, as the paper does not say: Adam, a constant rate, -log p of the answer, the y of the Bézier
# points, and the start (1.5, as the GA has it).
APPENDIX_C: dict[str, Any] = {
    "limit": 2000,
    "steps": 1875,
    "minibatch_size": 32,
    "learning_rate": 1e-5,
    "schedule": "constant",
    "weights_in": "sampling",
    "look_every": 75,
    "validation_share": 0.05,
}


@dataclass(frozen=True)
class SearchSettings(TaskFlags):
    """What to search, on what, and how."""

    model: str = "tiny-retriever"
    """A name in models/zoo, a folder in Hugging Face layout, a .gguf file, or a Hugging Face hub id."""
    output_path: Path = Path("runs/search")
    """Folder of the run: history.jsonl, factors.json, results.json, pictures (where it is not given and taken:
    runs/search-2, ...)."""
    overwrite: bool = False
    """Drop the search in --output-path and begin anew."""

    apply_chat_template: bool = False
    """Ask in a chat, by the tokenizer's own chat template; the opener stands behind it."""
    prompt_form: PromptForm | None = None
    """Ask in a chat, by a form that the model was trained with and its files lack."""
    system_prompt: str | None = None
    """The chat's system prompt, instead of the template's or form's own."""
    limit: int = 200
    """Search examples (of each task and length); each is scored at every search position."""
    test_limit: int = 500
    """Held-out examples (of each task and length) that the search reports on at its end."""
    positions: tuple[int, ...] = (0, 25, 50, 75, 100)
    """Positions of that report, in percent of the prompt."""
    metrics: tuple[str, ...] = ()
    """Metrics of that report (default: prefix for kv, else the task's own; in a mixture each task takes those that it has)."""
    max_new_tokens: int | None = None
    """Tokens to generate where something is (default: the task's)."""
    overlength: Overlength = "error"
    """What becomes of questions too long for the model's window: skip leaves them out at every position, and counts them."""
    drop_leaky: bool = False
    """Leave out questions whose gold answer is empty to the metric, or stands in what is beside the fact; they are counted."""
    seed: int = 0
    """One seed for examples and for the search."""

    algorithm: str = "ga"
    """ga: the paper's genetic algorithm; gradient: Adam on the log-likelihood of the answers; random, or one of evosax's:
    cma_es, differential_evolution, pso, open_es, ..."""
    curve: Curve = "bezier"
    """How control points give the layers' factors; free: one point a layer; shared: one a dimension of a head, for all layers
    (LongRoPE); authors: the map of the paper's released code."""
    granularity: Granularity = "layer"
    """What has factors of its own: a layer, or in each layer its frequency bands, its KV groups, or the bands of its groups."""
    bands: int = 8
    """Bands of equal width that a head's frequencies are divided into, with layer_band and layer_group_band; 0: one for each
    frequency."""
    control_points: int | None = None
    """Control points of the curve (default 4; free: one a layer)."""
    learn: Learn = "factors"
    """What is found: factors of the frequencies, gains (what each frequency's part of q . k is multiplied by, of the same curve
    and granularity), or both."""
    parameter: Parameter = "factor"
    """What the numbers of frequencies are: factor; multiplier, which is 1 / factor, so that --min-factor, --max-factor and
    --initial-factor are of multipliers, and 0 lets a frequency stand still; log: factors and gains whose logarithms Adam
    moves (--algorithm gradient)."""
    layers: str = ":"
    """Layers that the curve scales, as a slice: `2:` leaves the first two as they are, as the authors' released code does."""
    min_factor: float = 0.5
    """Lowest factor."""
    max_factor: float = 2.0
    """Highest factor."""
    initial_factor: float = 1.0
    """Factor of every control point of the first individual (Eq. 8)."""
    min_gain: float = 0.2
    """Lowest gain."""
    max_gain: float = 4.0
    """Highest gain."""
    initial_gain: float = 1.0
    """Gain of every control point of the first individual."""
    initial_factors: Path | None = None
    """factors.json of another search to start from, in place of --initial-factor."""
    other_model: bool = False
    """Take factors that were found for another model (other sizes, RoPE or tokenizer), as far as their shape fits."""
    x_step: float = 1.0
    """Lattice of the control points' x, in layers; 0: continuous."""
    y_step: float = 0.05
    """Lattice of the control points' y (and gains); 0: continuous."""
    fitness: Fitness = "accuracy"
    """accuracy: the greedy output begins with the gold answer (or the likeliest option is right), weighted by position;
    log_likelihood: of the gold answer; metric: the task's own, of generated text."""
    tie_break: bool = True
    """Break ties of accuracy by the answers' likelihood."""
    search_positions: tuple[int, ...] = (0, 50, 100)
    """Positions at which each search example is scored, in percent: begin, middle, end."""
    weights: tuple[float, ...] = (0.2, 0.3, 0.5)
    """Weights of these positions in the fitness; they sum to 1."""
    population_size: int = 32
    """Individuals of generation 0 (N_ps)."""
    parents: int = 12
    """Individuals that breed (N_pa)."""
    mutations: int = 16
    """Mutants a generation (N_mu)."""
    crossovers: int = 4
    """Offspring a generation by crossover (N_cr); both children of each pair are scored."""
    crossover_tries: int = 4
    """Tries for two valid children (N_ct)."""
    max_change_x: float = 2.0
    """Largest change of x in a mutation, in layers (M_x)."""
    max_change_y: float = 0.2
    """Largest change of y (and of a gain) in a mutation (M_y)."""
    mutation_rate: float = 1.0
    """Probability that a mutation moves a control point."""
    generations: int = 20
    """Generations after the first (T)."""
    max_evaluations: int | None = None
    """End when so many individuals were scored by the model, whatever --generations says (default of all but ga: what the GA
    with these settings makes)."""
    race: bool = False
    """Drop individuals that cannot catch up on a part of the search questions (racing.py); each counts as one evaluation."""
    uniform_candidates: int = 16
    """Values tried for one uniform factor within the bounds (and within 0.5 to 2), the control that LPES has to beat."""

    steps: int = 200
    """gradient: steps of Adam."""
    learning_rate: float = 0.03
    """gradient: at the start."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """gradient: the learning rate falls to 0 along a cosine, or stays."""
    weights_in: Literal["loss", "sampling"] = "loss"
    """gradient: --weights weigh the positions' losses, or are how often prompts of a position are drawn."""
    minibatch_size: int = 24
    """gradient: prompts a step (of each task and length)."""
    validation_share: float = 0.25
    """gradient: share of the search examples that the best step is chosen on."""
    look_every: int = 10
    """gradient: steps between two looks at these."""
    patience: int = 0
    """gradient: end after so many looks without a new best; 0: never."""
    move_x: bool = False
    """gradient: move the control points' x as well."""
    box: Literal["clip", "sigmoid"] = "clip"
    """gradient: how factors stay within the bounds: put back after each step, or as a sigmoid of what Adam moves."""
    stay_close: float = 0.0
    """gradient: weight of the mean squared distance of the factors, and of the gains, from 1."""
    prune: float = 0.0
    """gradient: how many of the numbers differ from 1 (--curve free or shared). In the first half of the steps each is drawn to
    1 by this share of --learning-rate a step; what is within one such rate of 1 then stays 1, and the rest is fitted on."""
    text: Path | None = None
    """gradient: plain text that must not become less likely (where it is wanted and not given: text that the model writes)."""
    text_weight: float = 0.0
    """gradient: weight of the plain text's loss in nats a token, beside the answers' in nats an answer."""
    text_minibatch: int = 4
    """gradient: windows of text a step."""
    text_window: int | tuple[int, ...] = DEFAULT_WINDOW
    """gradient: tokens of a window of text, up to the model's window; several (512 2048 8192): windows of all these lengths,
    whose losses count alike, and which share the tokens that --text-minibatch windows of the longest have."""
    max_text_loss_rise: float | None = None
    """gradient: refuse steps whose loss on held-back plain text lies further above the start's; with several --text-window,
    in any quarter of the longest."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    batch_size: int | None = None
    """Prompts a forward pass and device (default: chosen from the memory)."""
    population_chunk: int | None = None
    """Individuals a forward pass and device (default: chosen from the memory)."""
    model_axis: int = 1
    """Devices that share one copy of the model (for models larger than a device); the others have copies of their own."""
    deterministic: bool = False
    """On a GPU: only kernels that give the same bits in every run, some of which are slower."""
    resume: bool = False
    """Go on with the run in --output-path; all other flags as they were."""


def preset(name: str, **changes: Any) -> SearchSettings:
    """The settings of a preset (`paper`, `default`, `quick`), with changes. Raises UserError for a name that is none."""
    mixture = changes.get("mixture") is not None
    return SearchSettings(**preset_values(name, changes.get("algorithm", "ga"), mixture=mixture) | changes)


def preset_values(name: str, algorithm: str, *, mixture: bool = False) -> dict[str, Any]:
    """What a preset sets, with an algorithm, and beside a `--mixture` nothing of tasks.

    Raises UserError for a name that is none.
    """
    if name not in PRESETS:
        raise UserError(f"--preset {name!r} is not known; the presets are: {', '.join(PRESETS)}")
    values = PRESETS[name] | (APPENDIX_C if (name, algorithm) == ("paper", "gradient") else {})
    return {key: value for key, value in values.items() if not (mixture and key in TASK_SETTINGS)}


def check(settings: SearchSettings) -> None:
    """Raise UserError for what cannot be, as far as that is known without the model."""
    check_bounds(settings)
    if settings.algorithm != "gradient" and settings.max_evaluations is None:
        of_generation = settings.mutations + 2 * settings.crossovers
        check_individuals(settings.population_size + settings.generations * of_generation)
    check_positions(settings.positions)
    check_once(settings.metrics, "--metrics")
    check_chat(
        apply_chat_template=settings.apply_chat_template,
        prompt_form=settings.prompt_form,
        system_prompt=settings.system_prompt,
    )
    check_weights(settings.weights, settings.search_positions)
    for name, value in vars(settings).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"--{name.replace('_', '-')} must be a finite number, got {value}")
    if settings.stay_close < 0:
        raise UserError(f"--stay-close must be at least 0, got {settings.stay_close}")
    from lpes_jax.search.strategies import NAMES  # evosax wants devices at once: not before several processes have met

    if settings.algorithm not in ("ga", "gradient", *NAMES):
        close = difflib.get_close_matches(settings.algorithm, ("ga", "gradient", *NAMES)) or ["ga", "gradient", "cma_es"]
        raise UserError(f"--algorithm {settings.algorithm!r} is not known; did you mean {', '.join(close)}?")
    if settings.race and settings.algorithm == "gradient":
        raise UserError("--race drops individuals, which --algorithm gradient has none of; leave it out")
    if is_mixture(settings):
        several = "--mixture" if settings.mixture is not None else f"--task {' '.join(settings.task)}"
        if settings.race:
            raise UserError(f"{several}: --race compares questions of one task; leave it out")
        if settings.fitness == "metric":
            raise UserError(f"{several}: --fitness metric is of one task; use accuracy or log_likelihood")
    if settings.race and settings.fitness == "metric":
        raise UserError("--race: --fitness metric has individuals one by one generate text on all questions; leave --race out")
    if settings.parameter != "multiplier" and settings.min_factor == 0:
        raise UserError("--min-factor must be above 0, got 0.0; --parameter multiplier takes 0")
    if settings.parameter == "log" and settings.algorithm != "gradient":
        raise UserError(f"--parameter log is how Adam moves; --algorithm {settings.algorithm} takes factor or multiplier")
    if settings.parameter == "log" and settings.box == "sigmoid":
        raise UserError("--parameter log and --box sigmoid are two scales of one number; give one of them")
    if settings.prune:
        if not 0 < settings.prune <= 1:
            raise UserError(f"--prune {settings.prune} must be from 0 (off) to 1: it is a share of --learning-rate")
        if settings.algorithm != "gradient" or settings.box == "sigmoid" or settings.curve not in ("free", "shared"):
            raise UserError("--prune goes with --algorithm gradient, --box clip and --curve free or shared")
        if settings.steps < 2:
            raise UserError(f"--prune needs --steps of 2 or more, half of which fit what is left; got {settings.steps}")
    if settings.max_evaluations is not None and settings.algorithm == "gradient":
        raise UserError("--max-evaluations counts individuals, which --algorithm gradient has none of; give --steps")


def check_weights(weights: Sequence[float], positions: Sequence[int]) -> None:
    """Raise UserError unless each of `--search-positions` has a weight, and the weights are shares of 1."""
    check_positions(positions, "--search-positions")
    shown = " ".join(map(str, weights))
    if len(weights) != len(positions):
        places = " ".join(map(str, positions))
        raise UserError(f"--weights {shown}: give one number for each of --search-positions {places}")
    if not (all(weight >= 0 for weight in weights) and abs(sum(weights) - 1) <= 1e-6):  # false for NaN, too
        raise UserError(f"--weights must be numbers from 0 that sum to 1, got {shown}")


def scaled_layers(settings: SearchSettings, num_layers: int) -> range:
    """The layers of a model of `num_layers` that the curve scales. Raises UserError where `--layers` names none or others."""
    match = re.fullmatch(r"(\d*):(\d*)", settings.layers.strip())
    if match is None:
        raise UserError(f"--layers {settings.layers!r} is no slice; give FIRST:END, say 2: for all but the first two")
    first, end = int(match[1] or 0), int(match[2]) if match[2] else num_layers
    if not 0 <= first < end <= num_layers:
        raise UserError(f"--layers {settings.layers!r}: the model has layers 0 to {num_layers - 1}, END is not included")
    return range(first, end)


def search_space(settings: SearchSettings, config: LlamaConfig, layers: range) -> Space:
    """The space that the settings ask for; `layers` of the model are scaled. Raises UserError where there is none."""
    s = settings
    standing = s.parameter == "multiplier"
    least = 0.0 if standing else np.nextafter(0.0, 1.0)
    if not least <= s.min_factor <= s.initial_factor <= s.max_factor:
        above = "0 or more" if standing else "above 0"
        raise UserError(
            f"--initial-factor {s.initial_factor} must lie from --min-factor {s.min_factor} ({above}) to "
            f"--max-factor {s.max_factor}"
        )
    least = np.nextafter(0.0, 1.0) if s.parameter == "log" else 0.0
    if s.learn != "factors" and not least <= s.min_gain <= s.initial_gain <= s.max_gain:
        above = "above 0" if s.parameter == "log" else "0 or more"
        raise UserError(
            f"--initial-gain {s.initial_gain} must lie from --min-gain {s.min_gain} ({above}) to --max-gain {s.max_gain}"
        )
    for name in ("min_factor", "max_factor"):
        if not LEAST <= (value := getattr(s, name)) <= MOST and not (standing and value == 0):
            raise UserError(
                f"--{name.replace('_', '-')} must be from {LEAST:g} to {MOST:g}, which float32 can divide by; got {value}"
            )
    half, granularity, units = config.rotary_dim // 2, s.granularity, ()
    bands = half if s.bands == 0 else s.bands  # 0 means one for each frequency
    if "band" in granularity and (bands < 1 or half % bands):
        raise UserError(f"--bands {s.bands} must divide the {half} frequencies of a head")
    if "group" in granularity:
        units += (config.num_kv_heads,)
    if "band" in granularity:
        units += (bands,)
    count = {"free": len(layers), "shared": half}.get(s.curve, 4 if s.control_points is None else s.control_points)
    if s.curve in ("free", "shared"):
        what = f"a layer, {count}" if s.curve == "free" else f"a dimension, {count}"
        if s.control_points not in (None, count):
            raise UserError(f"--curve {s.curve} has one control point {what}; leave --control-points out")
    elif len(layers) < 2:
        raise UserError(f"--curve {s.curve} runs over the scaled layers, and there is only one; use --curve free")
    elif not 2 <= count <= len(layers):
        raise UserError(f"--control-points must be from 2 to the number of scaled layers, {len(layers)}, got {count}")
    if s.curve == "shared":
        if units:
            raise UserError("--curve shared has one factor a dimension for all layers; leave --granularity out")
        granularity = "layer_band"
    space = Space(
        config.num_layers,
        layers,
        s.curve,
        granularity,
        np.linspace(0, len(layers) - 1, count),
        np.full((count, *units), float(s.initial_factor)),
        s.min_factor,
        s.max_factor,
        s.learn,
        s.parameter,
        np.full((count, *units), float(s.initial_gain)),
        s.min_gain,
        s.max_gain,
    )
    if s.initial_factors is None:
        return space
    return space.starting_from(LayerFactors.load(Path(s.initial_factors)), f"--initial-factors {s.initial_factors}")


def genetic_settings(settings: SearchSettings, space: Space) -> GeneticSettings:
    """The GA's part. A free or shared curve is one control point a layer or dimension, whose x never moves."""
    if space.y.ndim > 1:
        what = "gain" if space.learn == "gains" else "factor"
        raise UserError(
            f"--algorithm ga moves one {what} a layer, not --granularity {space.granularity}; "
            "use --algorithm gradient or one of evosax's (cma_es, ...)"
        )
    pinned = settings.curve in ("free", "shared")
    values: dict[str, Any] = {field.name: getattr(settings, field.name, None) for field in fields(GeneticSettings)}
    values["num_layers"] = len(space.x) if pinned else len(space.layers)
    values["control_points"] = len(space.x)
    if pinned:
        values["max_change_x"] = 0.0
    if settings.initial_factors is not None:
        points = space.points(space.start)
        assert points is not None  # one curve
        values["initial_points"] = tuple(map(tuple, points.tolist()))
    genetic = GeneticSettings(**values)
    x = genetic.initial_genes[:, 0]
    if settings.initial_factors is not None and not pinned and len(space.layers) > 1 and (np.diff(x) <= 0).any():
        at = int(np.argmax(np.diff(x) <= 0))
        raise UserError(
            f"--initial-factors {settings.initial_factors}: the x {space.x[at]:g} and {space.x[at + 1]:g} are one place on the "
            f"lattice of --x-step {settings.x_step:g}; give --x-step 0 (continuous)"
        )
    return genetic


def gradient_settings(settings: SearchSettings) -> GradientSettings:
    """The gradient's part. Raises UserError for what it cannot do."""
    if settings.fitness == "metric":
        raise UserError("--fitness metric has no gradient; --algorithm gradient takes the answers' log-likelihood")
    return GradientSettings(**{field.name: getattr(settings, field.name) for field in fields(GradientSettings)})


def as_record(settings: SearchSettings) -> dict[str, Any]:
    """The settings as JSON, but for those that say where and how to run and cannot change a result."""
    record = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()}
    return {
        name: value
        for name, value in record.items()
        if name not in ("output_path", "overwrite", "resume", "batch_size", "population_chunk", "model_axis")
    }
