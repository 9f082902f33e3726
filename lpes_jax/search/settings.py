"""What a search is asked to do: the flags of `python -m lpes_jax.search`, and the presets that set many of them at once.

settings = preset("quick", num_pairs=4)      # SearchSettings() is the preset `default`
"""

import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from lpes_jax.errors import UserError
from lpes_jax.models.llama.chat import PromptForm, check_chat
from lpes_jax.search.genetic import GeneticSettings
from lpes_jax.search.gradient import GradientSettings
from lpes_jax.tasks.flags import TaskFlags
from lpes_jax.tasks.prompts import Overlength

Algorithm = Literal["ga", "gradient"]
Curve = Literal["bezier", "linear", "step", "free", "authors"]
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
}


@dataclass(frozen=True)
class SearchSettings(TaskFlags):
    """What to search, on what, and how."""

    model: str = "tiny-retriever"
    """A name in models/zoo, a folder in Hugging Face layout, a .gguf file, or a Hugging Face hub id."""
    output_path: Path = Path("runs/search")
    """Folder of the run: history.jsonl, factors.json, results.json, pictures."""

    apply_chat_template: bool = False
    """Ask in a chat, by the tokenizer's own chat template; the opener stands behind it."""
    prompt_form: PromptForm | None = None
    """Ask in a chat, by a form that the model was trained with and its files lack."""
    system_prompt: str | None = None
    """The chat's system prompt, instead of the template's or form's own."""
    limit: int = 200
    """Search examples; each is scored at begin, middle and end."""
    test_limit: int = 500
    """Held-out examples that the search reports on at its end."""
    positions: tuple[int, ...] = (0, 25, 50, 75, 100)
    """Positions of that report, in percent of the prompt."""
    metrics: tuple[str, ...] = ()
    """Metrics of that report (default: prefix for kv, else the task's own)."""
    max_new_tokens: int | None = None
    """Tokens to generate where something is (default: the task's)."""
    overlength: Overlength = "error"
    """What becomes of questions too long for the model's window: skip leaves them out at every position, and counts them."""
    seed: int = 0
    """One seed for examples and for the search."""

    algorithm: Algorithm = "ga"
    """ga: the paper's genetic algorithm; gradient: Adam on the log-likelihood of the answers."""
    curve: Curve = "bezier"
    """How control points give the layers' factors; authors: the map of the paper's released code."""
    control_points: int | None = None
    """Control points of the curve (default 4; free: one a layer)."""
    layers: str = ":"
    """Layers that the curve scales, as a slice: `2:` leaves the first two as they are, as the authors' released code does."""
    min_factor: float = 0.5
    """Lowest factor."""
    max_factor: float = 2.0
    """Highest factor."""
    initial_factor: float = 1.0
    """Factor of every control point of the first individual (Eq. 8)."""
    x_step: float = 1.0
    """Lattice of the control points' x, in layers; 0: continuous."""
    y_step: float = 0.05
    """Lattice of the control points' y; 0: continuous."""
    fitness: Fitness = "accuracy"
    """accuracy: the greedy output begins with the gold answer (or the likeliest option is right), weighted by position;
    log_likelihood: of the gold answer; metric: the task's own, of generated text."""
    tie_break: bool = True
    """Break ties of accuracy by the answers' likelihood."""
    weights: tuple[float, float, float] = (0.2, 0.3, 0.5)
    """Weights of begin, middle and end in the fitness; they sum to 1."""
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
    """Largest change of y in a mutation (M_y)."""
    mutation_rate: float = 1.0
    """Probability that a mutation moves a control point."""
    generations: int = 20
    """Generations after the first (T)."""
    uniform_candidates: int = 16
    """Values tried for one uniform factor, the control that LPES has to beat."""

    steps: int = 200
    """gradient: steps of Adam."""
    learning_rate: float = 0.03
    """gradient: at the start; it falls to 0 along a cosine."""
    minibatch_size: int = 24
    """gradient: prompts a step."""
    validation_share: float = 0.25
    """gradient: share of the search examples that the best step is chosen on."""
    look_every: int = 10
    """gradient: steps between two looks at these."""
    patience: int = 0
    """gradient: end after so many looks without a new best; 0: never."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    batch_size: int | None = None
    """Prompts a forward pass (default: chosen from the memory)."""
    population_chunk: int | None = None
    """Individuals a forward pass and device (default: chosen from the memory)."""
    resume: bool = False
    """Go on with the run in --output-path."""


def preset(name: str, **changes: Any) -> SearchSettings:
    """The settings of a preset (`paper`, `default`, `quick`), with changes. Raises UserError for a name that is none."""
    if name not in PRESETS:
        raise UserError(f"--preset {name!r} is not known; the presets are: {', '.join(PRESETS)}")
    return SearchSettings(**PRESETS[name] | changes)


def check(settings: SearchSettings) -> None:
    """Raise UserError for what cannot be, as far as that is known without the model."""
    for name, least in (("limit", 1), ("test_limit", 1), ("generations", 0), ("uniform_candidates", 1)):
        if getattr(settings, name) < least:
            raise UserError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(settings, name)}")
    for name in ("batch_size", "population_chunk"):
        if (value := getattr(settings, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if not settings.positions:
        raise UserError("--positions: give at least one position, in percent")
    check_chat(
        apply_chat_template=settings.apply_chat_template,
        prompt_form=settings.prompt_form,
        system_prompt=settings.system_prompt,
    )
    if min(settings.weights) < 0 or abs(sum(settings.weights) - 1) > 1e-6:
        raise UserError(f"--weights must be three numbers from 0 that sum to 1, got {' '.join(map(str, settings.weights))}")


def scaled_layers(settings: SearchSettings, num_layers: int) -> range:
    """The layers of a model of `num_layers` that the curve scales. Raises UserError where `--layers` names none or others."""
    match = re.fullmatch(r"(\d*):(\d*)", settings.layers.strip())
    if match is None:
        raise UserError(f"--layers {settings.layers!r} is no slice; give FIRST:END, say 2: for all but the first two")
    first, end = int(match[1] or 0), int(match[2] or num_layers)
    if not 0 <= first < end <= num_layers:
        raise UserError(f"--layers {settings.layers!r}: the model has layers 0 to {num_layers - 1}, END is not included")
    return range(first, end)


def genetic_settings(settings: SearchSettings, num_layers: int) -> GeneticSettings:
    """The GA's part, for `num_layers` scaled layers. A free curve is one control point a layer whose x never moves."""
    free = settings.curve == "free"
    if free and settings.control_points not in (None, num_layers):
        raise UserError(f"--curve free has one control point a layer, {num_layers}; leave --control-points out")
    values: dict[str, Any] = {field.name: getattr(settings, field.name, None) for field in fields(GeneticSettings)}
    values["num_layers"] = num_layers
    values["control_points"] = num_layers if free else 4 if settings.control_points is None else settings.control_points
    if free:
        values["max_change_x"] = 0.0
    return GeneticSettings(**values)


def gradient_settings(settings: SearchSettings) -> GradientSettings:
    """The gradient's part. Raises UserError for what it cannot do."""
    if settings.resume:
        raise UserError("--resume: --algorithm gradient starts anew; give another --output-path")
    if settings.fitness == "metric":
        raise UserError("--fitness metric has no gradient; --algorithm gradient takes the answers' log-likelihood")
    return GradientSettings(**{field.name: getattr(settings, field.name) for field in fields(GradientSettings)})


def start_points(settings: SearchSettings, num_layers: int) -> Float[np.ndarray, "C 2"]:
    """Control points evenly spread over `num_layers` scaled layers, all at `--initial-factor` (one a layer for `free`)."""
    count = num_layers if settings.curve == "free" else settings.control_points or 4
    if not settings.min_factor <= settings.initial_factor <= settings.max_factor or settings.min_factor <= 0:
        raise UserError(
            f"--initial-factor {settings.initial_factor} must lie from --min-factor {settings.min_factor} (above 0) to "
            f"--max-factor {settings.max_factor}"
        )
    if not 2 <= count <= max(num_layers, 2):
        raise UserError(f"--control-points must be from 2 to the number of scaled layers, {num_layers}, got {count}")
    return np.stack([np.linspace(0, num_layers - 1, count), np.full(count, settings.initial_factor)], axis=1)


def as_record(settings: SearchSettings) -> dict[str, Any]:
    """The settings as JSON, but for those that say where and how to run and cannot change a result."""
    record = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()}
    return {
        name: value for name, value in record.items() if name not in ("output_path", "resume", "batch_size", "population_chunk")
    }
