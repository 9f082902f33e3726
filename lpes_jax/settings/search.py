"""The flags of `search`, and the presets that set many of them at once.

    settings = preset("quick", num_pairs=4)      # SearchSettings() is the preset `default`

Each group is passed to its consumer: `settings.ga` to the genetic algorithm, `settings.gradient` and `settings.text` to the
descent, `settings.space` to the search space.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lpes_jax.choices import EVOSAX, INDIVIDUALS, RANDOM, Curve, FitnessName, Granularity, Learn, Parameter, ScoreDtype
from lpes_jax.errors import UserError
from lpes_jax.settings.groups import (
    HeldOutQuestionSettings,
    MeshSettings,
    OtherModelSettings,
    PromptSettings,
    ResumableRunSettings,
    TaskSettings,
    TextFileSettings,
)
from lpes_jax.settings.tree import Settings, rare, shown, when

DEFAULT_WINDOW = 512  # of --text-window; a model with a shorter window uses its own length
PRESETS: dict[str, dict[str, Any]] = {
    # The paper's algorithm, adapted to small models: it starts from 1, allows factors below 1, and breaks ties by likelihood.
    "default": {},
    # Tables 9 and 12 exactly: fitness is accuracy, and of equal individuals the one found first is kept.
    "paper": {"min_factor": 1.0, "initial_factor": 1.5, "y_step": 0.1, "tie_break": False, "uniform_candidates": 11},
    # Takes minutes on two cores with the bundled model: few questions, few generations. The first two layers are not scaled, as
    # in the authors' code. The others have a wider box than in the paper and start in its middle, as in the paper.
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
    # The best settings we measured: a factor and a gain for each frequency of each layer, by gradient, on all positions
    # equally, while the distribution on plain text stays near the model's own. Use several tasks and lengths (--mixture).
    "best": {
        "algorithm": "gradient",
        "curve": "free",
        "granularity": "layer_band",
        "bands": 0,
        "learn": "both",
        "min_factor": 0.2,
        "max_factor": 4.0,
        "search_positions": (0, 25, 50, 75, 100),
        "weights": (0.2, 0.2, 0.2, 0.2, 0.2),
        "limit": 100,
        "steps": 125,
        "look_every": 25,
        "minibatch_size": 16,
        "uniform_candidates": 8,  # with 16 the control took longer than the search
        "text_weight": 20.0,
        "text_objective": "kl",
        "max_text_loss_rise": 0.1,
    },
}
# `--preset paper --algorithm gradient`: three sets of 2,000 prompts drawn by weight, batches of 32, learning rate 1e-5, 30
# epochs of 2,000 draws. The paper does not specify the rest; ours: Adam, a constant rate, -log p of the answer, the
# y of the Bézier points, and the start (1.5, as in the GA).
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
# What a preset sets besides, with --algorithm gradient.
WITH_GRADIENT: dict[str, dict[str, Any]] = {
    "paper": APPENDIX_C,
    "quick": {"steps": 20, "minibatch_size": 6, "look_every": 5},
}


@dataclass(frozen=True)
class ObjectiveSettings(Settings):
    """The fitness of factors."""

    fitness: FitnessName = when("accuracy", algorithm=INDIVIDUALS)
    """accuracy, log_likelihood or metric.
    accuracy: the greedy output begins with the gold answer (or the likeliest option is right), weighted by position;
    log_likelihood: of the gold answer; metric: the task's own, of generated text."""
    tie_break: bool = rare(True)
    """Break ties of accuracy by the answers' likelihood."""
    search_positions: tuple[int, ...] = (0, 50, 100)
    """Positions of the fact in the search, in percent.
    Each search question is asked at all of them."""
    weights: tuple[float, ...] = (0.2, 0.3, 0.5)
    """Weights of these positions; they sum to 1.
    In the fitness or the loss."""
    uniform_candidates: int = rare(16)
    """Values tried for one uniform factor, which LPES has to beat.
    The control: within the bounds, and within 0.5 to 2."""


@dataclass(frozen=True)
class SpaceSettings(Settings):
    """The search space."""

    curve: Curve = "bezier"
    """bezier, linear, step, free, shared or authors.
    How control points give the layers' factors. free: one point per layer; shared: one per dimension of a head, for all layers
    (LongRoPE); authors: the map of the paper's released code."""
    granularity: Granularity = "layer"
    """layer, layer_band, layer_group or layer_group_band.
    What has a factor of its own: a layer, or in each layer its frequency bands, its KV groups, or the bands of its groups."""
    bands: int = when(8, granularity=("layer_band", "layer_group_band"))
    """Bands of frequencies with a factor each; 0: every frequency.
    Of equal width, with layer_band and layer_group_band."""
    control_points: int | None = when(None, curve=("bezier", "linear", "step", "authors"))
    """Control points of the curve (default 4; free: one per layer)."""
    learn: Learn = "factors"
    """factors (of frequencies), gains, or both.
    Gains multiply each frequency's part of q . k, with the same curve and granularity."""
    parameter: Parameter = rare("factor")
    """What the numbers of frequencies are: factor, multiplier or log.
    multiplier is 1 / factor, so that --min-factor, --max-factor and --initial-factor are multipliers, and 0 stops a frequency;
    log: factors and gains whose logarithms Adam moves (--algorithm gradient)."""
    layers: str = rare(":")
    """Layers that are scaled, as a slice; 2: skips the first two.
    The authors' released code does not scale the first two."""
    min_factor: float = shown(0.5, learn=("factors", "both"))
    """Lowest factor."""
    max_factor: float = shown(2.0, learn=("factors", "both"))
    """Highest factor."""
    initial_factor: float = rare(1.0)
    """Factor of the first individual's control points (Eq. 8)."""
    min_gain: float = when(0.2, learn=("gains", "both"))
    """Lowest gain."""
    max_gain: float = when(4.0, learn=("gains", "both"))
    """Highest gain."""
    initial_gain: float = when(1.0, learn=("gains", "both"))
    """Gain of the first individual's control points."""
    x_step: float = rare(1.0)
    """Lattice of the control points' x, in layers; 0: continuous."""
    y_step: float = rare(0.05)
    """Lattice of the control points' y (and gains); 0: continuous."""


@dataclass(frozen=True)
class StartSettings(OtherModelSettings):
    """The start, if it is the result of another search."""

    initial_factors: Path | None = rare(None)
    """factors.json of another search to start from.
    In place of --initial-factor."""


@dataclass(frozen=True)
class GeneticSettings(Settings):
    """The algorithm and its budget.

    The genetic algorithm (Table 12), and the sizes of every algorithm that has individuals.
    """

    population_size: int = 32
    """Individuals of generation 0 (N_ps)."""
    parents: int = shown(12, algorithm="ga")
    """Individuals that breed (N_pa)."""
    mutations: int = shown(16, algorithm="ga")
    """Mutants per generation (N_mu)."""
    crossovers: int = shown(4, algorithm="ga")
    """Offspring per generation by crossover (N_cr).
    Both children of each pair are scored."""
    crossover_tries: int = rare(4)
    """Tries for two valid children (N_ct)."""
    max_change_x: float = rare(2.0)
    """Largest change of x in a mutation, in layers (M_x)."""
    max_change_y: float = rare(0.2)
    """Largest change of y (and of a gain) in a mutation (M_y)."""
    mutation_rate: float = rare(1.0)
    """Probability that a mutation moves a control point."""
    generations: int = shown(20, algorithm="ga")
    """Generations after the first (T)."""
    max_evaluations: int | None = shown(None, algorithm=(RANDOM, *EVOSAX))
    """End after this many individuals were scored by the model.
    Regardless of --generations. Default for all but ga: as many as the GA with these settings makes."""
    race: bool = rare(False)
    """Deprecated: drop hopeless individuals after a part of the questions.
    It saves prompts, but saved no time where that was measured. See racing.py. Each individual counts as one evaluation."""


@dataclass(frozen=True)
class GradientSettings(Settings):
    """The algorithm, gradient descent.

    `--learning-rate` is in units of the parameters: Adam's steps are about as large.
    """

    steps: int = 200
    """Steps of Adam."""
    learning_rate: float = 0.03
    """Learning rate at the start, in units of the parameters."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """cosine (the learning rate falls to 0) or constant."""
    weights_in: Literal["loss", "sampling"] = rare("loss")
    """loss or sampling: how --weights are applied.
    They multiply the positions' losses, or set how often prompts of a position are drawn."""
    minibatch_size: int = 24
    """Prompts per step.
    Per task and length; about this many if prompts share a prefix."""
    validation_share: float = 0.25
    """Held-back share of the search questions, which chooses the step.
    No step learns from it."""
    look_every: int = 10
    """Steps between two measurements on the held-back questions."""
    patience: int = 0
    """End after this many measurements without a new best; 0: never."""
    move_x: bool = rare(False)
    """Move the control points' x as well."""
    box: Literal["clip", "sigmoid"] = rare("clip")
    """How factors stay within the bounds: clip or sigmoid.
    clip: after each step; sigmoid: of the parameters that Adam updates."""
    stay_close: float = rare(0.0)
    """Weight of the mean squared distance of factors and gains from 1."""
    prune: float = rare(0.0)
    """Share of --learning-rate that draws numbers to 1 in each step.
    Limits how many differ from 1 (--curve free or shared). In the first half of the steps each is drawn to 1 by this share per
    step. Numbers then within one learning rate of 1 stay 1; the others are trained further."""


@dataclass(frozen=True)
class TextSettings(TextFileSettings):
    """Plain text that gradient descent must not make less likely."""

    text_weight: float = 0.0
    """Weight of the text's loss beside the answers'.
    Text in nats per token, answers in nats per answer."""
    text_objective: Literal["nll", "kl"] = "nll"
    """The text's loss: nll, or kl: divergence from the unchanged model.
    nll: -log p of its tokens; kl: the KL divergence."""
    text_minibatch: int = rare(4)
    """Windows of text per step."""
    text_window: int | tuple[int, ...] = DEFAULT_WINDOW
    """Tokens of a window of text; or several lengths.
    Up to the model's window. With several (512 2048 8192) the losses of all lengths have equal weights, and a step has as many
    tokens as --text-minibatch windows of the longest."""
    max_text_loss_rise: float | None = None
    """Maximum rise of held-back text loss above the start's.
    In nats per token; with several --text-window, in any quarter of the longest."""


@dataclass(frozen=True)
class SearchDeviceSettings(MeshSettings):
    """Devices and memory."""

    score_dtype: ScoreDtype | None = when(None, algorithm=INDIVIDUALS)
    """fp8 or int8: score individuals with 8-bit products (default: --dtype).
    Weights (in addition to those of --dtype) and activations of the layers are rounded to 8 bits; attention, norms and logits
    stay in --dtype, as do all held-out figures. fp8: NVIDIA GPUs from Ada or Hopper on; int8: any device."""
    population_chunk: int | None = rare(None)
    """Individuals per forward pass and device (default: by memory)."""


@dataclass(frozen=True)
class SearchRunSettings(ResumableRunSettings):
    """The model, the preset, the folder of the run, and the seed."""

    preset: Literal["paper", "default", "quick", "best"] = "default"
    """default, paper, quick or best: values of flags not given.
    paper: the paper's settings to the letter (with --algorithm gradient those of Appendix C); default: the same GA with what
    works better; quick: minutes on two cores; best: by gradient, a factor and a gain for each frequency."""


@dataclass(frozen=True)
class SearchSettings(Settings):
    """What to search, on what, and how."""

    task: TaskSettings = TaskSettings()
    algorithm: str = "ga"
    """ga (genetic), gradient, random, or evosax's: cma_es, pso, ...
    ga: the paper's genetic algorithm; gradient: Adam on the log-likelihood of the answers; random: points that are uniform in
    the box; evosax's: cma_es, differential_evolution, pso, open_es, ..."""
    ga: GeneticSettings = when(GeneticSettings(), algorithm=INDIVIDUALS)
    gradient: GradientSettings = when(GradientSettings(), algorithm="gradient")
    text: TextSettings = when(TextSettings(), algorithm="gradient")
    questions: HeldOutQuestionSettings = HeldOutQuestionSettings(limit=200)
    objective: ObjectiveSettings = ObjectiveSettings()
    space: SpaceSettings = SpaceSettings()
    start: StartSettings = StartSettings()
    prompt: PromptSettings = PromptSettings()
    run: SearchRunSettings = SearchRunSettings(output_path=Path("runs/search"))
    devices: SearchDeviceSettings = SearchDeviceSettings()

    @classmethod
    def of(cls, **flags: Any) -> "SearchSettings":
        """The values of `preset` (without one: of `default`) with other values of some flags.

        Raises TypeError for an unknown flag, and UserError for an unknown preset.
        """
        mixture = flags.get("mixture") is not None
        given = preset_values(flags.get("preset", "default"), flags.get("algorithm", "ga"), mixture=mixture)
        return cls().replace(**given | flags)

    def defaults_with(self, given: Any) -> "SearchSettings":
        """These defaults with the values of the preset of `given`, for its algorithm, and none of tasks with its mixture."""
        return self.replace(**preset_values(given.run.preset, given.algorithm, mixture=given.task.mixture is not None))

    def chosen(self) -> dict[str, Any]:
        """A mixture replaces all other flags of tasks."""
        return self.flat() | ({} if self.task.mixture is None else {"task": ()})


def preset(name: str, **changes: Any) -> SearchSettings:
    """The settings of a preset (`paper`, `default`, `quick`, `best`), with changes. Raises UserError for an unknown name."""
    return SearchSettings.of(**{"preset": name} | changes)


def preset_values(name: str, algorithm: str, *, mixture: bool = False) -> dict[str, Any]:
    """The flags that a preset sets, for an algorithm; with a `--mixture` none of the task's.

    Raises UserError for a name that is not known.
    """
    if name not in PRESETS:
        raise UserError(f"--preset {name!r} is not known; the presets are: {', '.join(PRESETS)}")
    values = PRESETS[name] | (WITH_GRADIENT.get(name, {}) if algorithm == "gradient" else {})
    task_flags = TaskSettings().flat()
    return {key: value for key, value in values.items() if not (mixture and key in task_flags)}


def as_record(settings: SearchSettings) -> dict[str, Any]:
    """The flags as JSON, except those that say where and how to run and cannot change a result."""
    left_out = ("output_path", "overwrite", "resume", "preset", "batch_size", "population_chunk", "model_axis")
    flags = {name: value for name, value in settings.flat().items() if name not in left_out}
    return {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
