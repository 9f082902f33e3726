"""The algorithms of `--algorithm` at work: the paper's GA, any of evosax's, and gradient descent.

Each has `individuals` (the most that it makes, for the progress), `max_evaluations` (the most that the model scores; None: no
limit), `search_space` and `sizes` (of the space and of a step, for the record), and `run`, which adds a line to the history for
everything that it scores.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lpes_jax.errors import UserError
from lpes_jax.factors import array_of
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.model import Llama
from lpes_jax.prefixes import families
from lpes_jax.rope import RopeTable
from lpes_jax.search.evaluator import Evaluator
from lpes_jax.search.genetic import CROSSOVER, FAILED_CROSSOVER, INITIAL, MUTATION, Lineage, PaperGA
from lpes_jax.search.gradient import Apply, Look, LossNotFinite, Parameters, State, descend, initial_state
from lpes_jax.search.history import History
from lpes_jax.search.individuals import Individuals
from lpes_jax.search.minibatches import Data, Examples, Share, by_length, pack, prompts_per_group, shared_groups, sizes
from lpes_jax.search.objective import MixtureTask
from lpes_jax.search.plain_text import split_windows
from lpes_jax.search.settings import check_gradient, lattice_of
from lpes_jax.search.space import LEAST_GAP, Numbers, Space
from lpes_jax.search.strategies import RANDOM, run_strategy, strategy
from lpes_jax.settings.search import GradientSettings, SearchSettings
from lpes_jax.tasks import prompts as task_prompts
from lpes_jax.tasks.prompts import EncodedPrompt, Prompt, Tokenizer
from lpes_jax.text_nll import check_text

OPERATORS = {INITIAL: "initial", MUTATION: "mutation", CROSSOVER: "crossover", FAILED_CROSSOVER: "crossover_failed"}
Values = Callable[[Parameters], Numbers]


def make_algorithm(settings: SearchSettings, space: Space) -> "Genetic | EvosaxAlgorithm | Gradient":
    """The algorithm that `--algorithm` names. Raises UserError for settings or spaces that it does not support."""
    if settings.algorithm == "ga":
        return Genetic(settings, space)
    return Gradient(settings, space) if settings.algorithm == "gradient" else EvosaxAlgorithm(settings, space)


class Genetic:
    """The paper's Algorithm 1, by evosax's init, ask and tell."""

    sizes: ClassVar[dict[str, float]] = {}

    def __init__(self, settings: SearchSettings, space: Space):
        self.settings, self.space = settings, space
        self.ga = PaperGA(lattice_of(settings, space), settings.ga)
        self.individuals = settings.ga.population_size + settings.ga.generations * self.ga.population_size
        self.max_evaluations = settings.ga.max_evaluations
        self.search_space = {name: size and str(size) for name, size in self.ga.lattice.search_space().items()}
        self._individuals = jax.jit(jax.vmap(lambda points: space.individual(space.numbers(points))))

    def run(self, model: Llama, tokenizer: Tokenizer, prompts: Sequence[Sequence[Prompt]], history: History) -> None:
        """Run all generations. Keys: one for the start, and one for each generation's ask and tell."""
        ga, key = self.ga, jax.random.key(self.settings.run.seed)
        params = ga.default_params
        genes, lineage = ga.initial_population(jax.random.fold_in(key, 0), params)
        state = ga.init(jax.random.fold_in(key, 1), genes, -self._scores(0, genes, lineage, history), params)
        for generation in range(1, self.settings.ga.generations + 1):
            key_ask, key_tell = jax.random.split(jax.random.fold_in(key, generation + 1))
            genes, state = ga.ask(key_ask, state, params)
            scores = self._scores(generation, genes, state.lineage, history, np.asarray(state.ids).tolist())
            state, _ = ga.tell(key_tell, genes, -scores, state, params)

    def _scores(
        self, generation: int, genes: Float[Array, "P C n"], lineage: Lineage, history: History, parents: Sequence[int] = ()
    ) -> Float[Array, "P"]:
        points, origin = self.ga.recorded_points(genes), jax.tree.map(np.asarray, lineage)
        drafts = [
            {
                "id": int(origin.ids[i]),
                "generation": generation,
                "operator": OPERATORS[int(origin.operator[i])],
                "parents": [int(parent) for parent in origin.parents[i] if parent >= 0],
                "cut": int(origin.cut[i]) if origin.cut[i] >= 0 else None,
                "control_points": points[i].tolist(),
            }
            for i in range(len(points))
        ]
        individuals = Individuals.of(*self._individuals(jnp.asarray(points, jnp.float32)))
        generations, keep = self.settings.ga.generations, self.settings.ga.parents + self.settings.ga.crossovers
        return jnp.asarray(
            history.generation(generation, generations, drafts, individuals, rivals=parents, keep=keep), jnp.float32
        )


class EvosaxAlgorithm:
    """One of evosax's algorithms, or random search, on the y of the control points.

    The algorithm knows only one box. If factors and gains are both learnt, gains are mapped to the box of the factors.
    """

    sizes: ClassVar[dict[str, float]] = {}

    def __init__(self, settings: SearchSettings, space: Space):
        ga = settings.ga
        most = ga.population_size + ga.generations * (ga.mutations + 2 * ga.crossovers)
        self.individuals = self.max_evaluations = most if ga.max_evaluations is None else ga.max_evaluations
        self.settings, self.space, self.search_space = settings, space, None
        first, *rest = space.learnt.values()
        _, self.low, self.high = first
        start = [first[0].ravel()]
        start += [self.low + (g - low) / (high - low) * (self.high - self.low) for g, low, high in rest for g in [g.ravel()]]
        genes = np.concatenate(start)
        self.strategy = strategy(settings.algorithm, genes, self.low, self.high, ga.population_size)
        x = space.x.astype(np.float32)
        self._individuals = jax.jit(jax.vmap(lambda columns: space.individual(space.start._replace(x=x, **columns))))

    def _columns(self, genes: Float[np.ndarray, "P N"]) -> dict[str, Float[np.ndarray, "P C *units"]]:
        """The learnt columns of the control points that genes encode."""
        columns = {}
        for index, (name, (start, low, high)) in enumerate(self.space.learnt.items()):
            column = genes[:, index * start.size : (index + 1) * start.size].reshape(-1, *start.shape)
            columns[name] = low + (column - self.low) / (self.high - self.low) * (high - low) if index else column
        return columns

    def run(self, model: Llama, tokenizer: Tokenizer, prompts: Sequence[Sequence[Prompt]], history: History) -> None:
        generations = math.ceil(self.individuals / self.settings.ga.population_size)

        def score(generation: int, genes: Float[np.ndarray, "P N"]) -> Float[np.ndarray, "P"]:
            first, columns = len(history.records), self._columns(genes.astype(np.float64))
            drafts = [
                {
                    "id": first + i,
                    "generation": generation,
                    "operator": self.settings.algorithm,
                    "control_points": _recorded(
                        self.space, self.space.start._replace(**{name: column[i] for name, column in columns.items()})
                    ),
                }
                for i in range(len(genes))
            ]
            columns_float32 = {name: jnp.asarray(column, jnp.float32) for name, column in columns.items()}
            individuals = Individuals.of(*self._individuals(columns_float32))
            if self.settings.algorithm == RANDOM:
                rivals, keep = ([history.best["id"]] if first else []), 1
            else:
                rivals, keep = [], math.ceil(len(genes) / 2)
            return history.generation(generation, generations, drafts, individuals, rivals=rivals, keep=keep)

        run_strategy(self.strategy, score, self.settings.run.seed, generations)


class Gradient:
    """Adam on -log p of the answers. The history has a line for each look; `state.npz` is the state to resume from."""

    individuals = 0
    max_evaluations = None
    search_space = None

    def __init__(self, settings: SearchSettings, space: Space):
        self.settings, self.space = settings, space
        self.sizes: dict[str, float] = {}
        check_gradient(settings)
        self.gradient = settings.gradient
        self.first_pruned_step = self.gradient.steps // 2 if self.gradient.prune else 0
        self.parameters, self.project, self.values = box_parameters(self.gradient, space)
        self._individual = jax.jit(space.individual)  # one program, not one per operation

    def run(self, model: Llama, tokenizer: Tokenizer, prompts: Sequence[Sequence[Prompt]], history: History) -> None:
        objective, folder, text = history.evaluator.objective, history.folder, self.settings.text
        if text.text is None and (text.text_weight or text.max_text_loss_rise is not None):
            history.progress.note("the model writes plain text that must not become less likely (--text FILE saves this time)")
        train, held_back, longest = self.data(model, tokenizer, prompts, objective.tasks, objective.weights)
        self.sizes = sizes(train, held_back, self.gradient.minibatch_size)
        apply = factors_applied(self.space, self.values, model.config.rope_table(longest))

        def lines(state: State) -> int:
            return 1 + math.ceil(state.step / self.gradient.look_every)

        # The newest state whose lines are all in the history. One more line may be there; it is made again.
        divergence = self.settings.text.text_objective == "kl"
        kept = folder.states(initial_state(self.parameters, len(prompts), len(held_back.texts), divergence=divergence))
        resume = next((state for state in kept if lines(state) <= len(folder.recorded)), None)
        history.keep(0 if resume is None else lines(resume))
        started = time.time() - (history.records[-1]["seconds"] if history.records else 0)
        space, values, stay_close = self.space, self.values, self.gradient.stay_close

        def penalty(parameters: Parameters) -> Float[Array, ""]:
            numbers = values(parameters)
            learnt = [space.at_layers(numbers.x, getattr(numbers, name)) for name in space.learnt]
            return stay_close * jnp.stack([jnp.square(values - 1).mean() for values in learnt]).sum()

        def on_look(measured: Look, state: State) -> None:
            if measured.step == 0 and not math.isfinite(measured.loss):
                raise LossNotFinite("the loss is not finite at the start; try --dtype float32, or another --initial-factor")
            history.add({"id": len(history.records), **self._record(measured), "seconds": round(time.time() - started, 3)})
            folder.save_state(state)
            history.progress.note(self._note(measured, objective.tasks))
            history.stop.check()

        try:
            descend(
                model,
                train,
                held_back,
                self.parameters,
                apply,
                self.gradient,
                self.settings.text,
                project=self.project,
                penalty=penalty if stay_close else None,
                seed=self.settings.run.seed,
                resume=resume,
                on_look=on_look,
            )
        except LossNotFinite as error:
            self._check_model(model, history.evaluator, [*held_back.texts, *train.texts])
            raise error
        if self.first_pruned_step:
            numbers = [array_of(history.best[name]) for name in ("factors", "gains") if name in history.best]
            rows = len(space.layers) if space.curve == "shared" else 1  # shared: all rows are equal
            self.sizes["numbers"] = sum(start.size for start, _, _ in space.learnt.values())
            self.sizes["numbers_not_1"] = sum(int((values != 1).sum()) for values in numbers) // rows

    def _record(self, measured: Look) -> dict[str, Any]:
        """A look as the history has it. Its fitness is null if it cannot be the result."""
        numbers = Numbers(*(np.asarray(value, np.float64) for value in self.values(measured.parameters)))
        found = Individuals.of(*self._individual(Numbers(*(value.astype(np.float32) for value in numbers))))
        is_pruned = not 0 < measured.step < self.first_pruned_step  # the first look has nothing to prune
        is_candidate = measured.allowed and math.isfinite(measured.loss) and is_pruned
        by_length = {"text_losses": measured.text_losses, "text_quarters": measured.text_quarters}
        return {
            "step": measured.step,
            "control_points": _recorded(self.space, numbers),
            **found.record,
            "fitness": -measured.loss if is_candidate else None,
            "task_losses": measured.task_losses,
            "accuracies": measured.accuracies,
            "text_loss": None if math.isnan(measured.text_loss) else measured.text_loss,
            **(by_length if measured.text_quarters else {}),
            **({"text_divergence": measured.text_divergence} if measured.text_divergence else {}),
            "train_loss": None if math.isnan(measured.train_loss) else measured.train_loss,
        }

    def _note(self, measured: Look, tasks: Sequence[MixtureTask]) -> str:
        """A look in one line, for the progress."""
        losses = " ".join(f"{loss:.3f}" for loss in measured.task_losses)
        if tasks:
            figures = zip(tasks, measured.task_losses, measured.accuracies, strict=True)
            by_task = (f"{task.title} {loss:.3f} ({100 * right:.0f} % right)" for task, loss, right in figures)
            losses = f"(nats per answer): {'; '.join(by_task)}"
        text = "" if math.isnan(measured.text_loss) else f", of text {measured.text_loss:.4f}"
        if measured.text_divergence:
            text += f", {np.mean(measured.text_divergence):.4f} from the model as it is"
        if measured.text_quarters:
            text += f" (quarters of the longest {' '.join(f'{loss:.4f}' for loss in measured.text_quarters)})"
        return f"step {measured.step}/{self.gradient.steps}  loss on held-back questions {losses}{text}"

    def _check_model(self, model: Llama, evaluator: Evaluator, texts: Sequence[Int[Array, "W T"]]) -> None:
        """Raise UserError if the model without factors is not finite: on a prompt, or on plain text."""
        unchanged = evaluator.score_factors(np.ones((1, model.config.num_layers), np.float32))
        evaluator.check_model("the loss is not finite", unchanged)
        for windows in texts:
            check_text(model, windows)

    def data(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[Prompt]],
        tasks: Sequence[MixtureTask],
        own_weights: Sequence[float],
    ) -> tuple[Data, Data, int]:
        """The training data, the held-back data (the last questions and windows), and the tokens of the longest prompt.

        If prompts share prefixes, all prompts of a haystack are on one side. Prompts of different lengths are packed in few
        shapes.
        """
        kept_share, held_back_most = self.gradient.validation_share, self.gradient.minibatch_size
        share, train_most = self.gradient.weights_in == "loss", prompts_per_group(held_back_most)
        train, held_back, longest = _Packs(tasks), _Packs(tasks), 0
        for number, own_prompts in enumerate(prompts):
            weights = tasks[number].weights if tasks else own_weights
            num_positions = len(weights)
            questions = len(own_prompts) // num_positions
            held_back_count = math.ceil(kept_share * questions)
            if held_back_count >= questions:
                which = f" ({tasks[number].title})" if tasks else ""
                raise UserError(
                    f"--limit {questions} leaves no question to learn from beside --validation-share; raise it{which}"
                )
            encoded = task_prompts.encode(own_prompts, tokenizer, model.config.max_position_embeddings)
            if tasks:
                encoded = [shortest_gold(*pair) for pair in zip(own_prompts, encoded, strict=True)]
            border = questions - held_back_count
            if share and len(shared_groups(encoded, model.config, train_most)) < len(encoded):
                border = between_families(encoded, num_positions, border)
            border *= num_positions
            lengths = [prompt.num_items for prompt in own_prompts]
            for part, most, data in (
                (slice(border), train_most, train), (slice(border, None), held_back_most, held_back),
            ):  # fmt: skip
                data.add(number, encoded[part], lengths[part], weights, model.config, most if share else None)
            longest = max(longest, *(len(prompt.ids) + max(map(len, prompt.answers)) for prompt in encoded))
        texts, kept_texts = None, None
        text, seed = self.settings.text, self.settings.run.seed
        if text.text_weight or text.max_text_loss_rise is not None:
            texts, kept_texts = split_windows(text.text, model, tokenizer, seed, text.text_window, kept_share)
            longest = max(longest, *(windows.shape[1] for windows in kept_texts))
            texts = texts if text.text_weight else None
        return train.data(texts), held_back.data(kept_texts), longest


class _Packs:
    """Collects packed examples, and the share of each."""

    def __init__(self, tasks: Sequence[MixtureTask]):
        self.tasks = tasks
        self.examples: list[Examples] = []
        self.parts: list[tuple[int, float]] = []  # the task of each, and its part of the task's prompts

    def add(
        self,
        task: int,
        prompts: Sequence[EncodedPrompt],
        lengths: Sequence[int],
        weights: Sequence[float],
        config: LlamaConfig,
        most: int | None,
    ) -> None:
        """Add a task's prompts, question by question, `most` per group (None: no groups), in few shapes by `lengths`."""
        num_positions = len(weights)
        questions = [[index] for index in range(len(prompts) // num_positions)]
        groups = [list(range(len(questions)))] if len(set(lengths)) == 1 else by_length(lengths[::num_positions])
        for group in groups:
            indices = [question * num_positions + position for question in group for position in range(num_positions)]
            chosen = [prompts[index] for index in indices]
            shared = None if most is None else shared_groups(chosen, config, most)
            self.examples.append(pack(chosen, list(weights) * len(group), shared))
            self.parts.append((task, len(group) / len(questions)))

    def data(self, texts: Sequence[Int[np.ndarray, "_W _T"]] | None) -> Data:
        """All examples as the data of a descent."""
        text = None if texts is None else [jnp.asarray(windows) for windows in texts]
        text = text[0] if text is not None and len(text) == 1 else text
        num_tasks = len({task for task, _ in self.parts})
        if not self.tasks and len(self.parts) == num_tasks:
            return Data(self.examples, text)
        if not self.tasks:
            return Data(self.examples, text, tuple(Share(task, part, 1 / num_tasks) for task, part in self.parts))
        return Data(self.examples, text, tuple(Share(task, part, self.tasks[task].share) for task, part in self.parts))


def shortest_gold(prompt: Prompt, encoded: EncodedPrompt) -> EncodedPrompt:
    """The prompt with only the gold answer of the fewest tokens (the first of equals), which a mixture teaches.

    Longer answers are often a sentence around the shortest one. Learning to write such sentences does not improve retrieval.
    """
    return replace(encoded, answers=[min(encoded.answers, key=len)]) if len(prompt.golds) > 1 else encoded


def between_families(prompts: Sequence[EncodedPrompt], num_positions: int, border: int) -> int:
    """The split nearest to `border` that divides no haystack, as the number of questions before it.

    A question has `num_positions` prompts. Returns `border` itself if each such split would hold back less than half or more
    than twice as many questions. Nearly all prompts share a prefix then, for example a header of all questions.
    """
    questions = len(prompts) // num_positions
    found = families([(prompt.ids, prompt.answers[0]) for prompt in prompts])
    spans = [(family[0] // num_positions, family[-1] // num_positions) for family in found]
    kept = questions - border
    borders = [index for index in range(1, questions) if kept / 2 <= questions - index <= 2 * kept]
    clean = [index for index in borders if not any(first < index <= last for first, last in spans)]
    return min(clean, key=lambda index: abs(index - border), default=border)


def box_parameters(settings: GradientSettings, space: Space) -> tuple[Parameters, Callable[[Parameters], Parameters], Values]:
    """The parameters that Adam updates, the projection onto their box, and the function from parameters to control points.

    With `--box clip` the parameters are y (and g), clipped after each step; with `--parameter log` they are the logarithms.
    With `sigmoid` they are u, where y = low + (high - low) sigmoid(u) is always in the box. A moving x is in units of the
    last layer.

    `--prune` is a proximal step after Adam's: in the first half of the steps, |log y| (of a multiplier, |y - 1|) falls by a
    share of the learning rate. The number of steps and the marks of unpruned numbers are parameters without a gradient.
    """
    last, log_scale = max(len(space.layers) - 1.0, 1.0), space.parameter == "log"
    parameters = {}
    for name, (start, low, high) in space.learnt.items():
        y = jnp.asarray(start, jnp.float32)
        if settings.box == "sigmoid":
            share = jnp.clip((y - low) / (high - low), 0.01, 0.99)  # at the border the gradient is 0
            y = jnp.log(share / (1 - share))
        parameters[name] = jnp.log(y) if log_scale else y
    if settings.move_x:
        if space.curve not in ("bezier", "linear"):
            raise UserError(f"--move-x: --curve {space.curve} has no x to move; use bezier or linear")
        x = jnp.asarray(space.x, jnp.float32)
        if not np.allclose(space.in_order(x), x, atol=1e-5):
            raise UserError(
                f"--move-x keeps control points from the first scaled layer to the last, {LEAST_GAP} apart, and those of "
                f"--initial-factors are at {' '.join(f'{value:g}' for value in space.x)}; leave --move-x out"
            )
        parameters["x"] = jnp.asarray(space.x / last, jnp.float32)
    if settings.prune:
        parameters |= {"step": jnp.zeros(())} | {f"stays_{name}": jnp.ones(parameters[name].shape) for name in space.learnt}

    def pruned(moved: Parameters, name: str) -> Parameters:
        """The parameters after a step, with the values of one column moved towards 1, or pruned."""
        half, step = settings.steps // 2, moved["step"]
        value, neutral = moved[name], 0.0 if log_scale else 1.0
        through_log = not log_scale and space.parameter == "factor"
        distance = jnp.log(value) if through_log else value - neutral
        nearer = jnp.sign(distance) * jnp.maximum(jnp.abs(distance) - settings.prune * settings.learning_rate, 0)
        stays = jnp.where(step == half, jnp.abs(nearer) > settings.learning_rate, moved[f"stays_{name}"])
        value = jnp.where(step <= half, jnp.exp(nearer) if through_log else neutral + nearer, value)
        return moved | {name: jnp.where(stays > 0, value, neutral), f"stays_{name}": stays.astype(value.dtype)}

    def project(parameters: Parameters) -> Parameters:
        moved = dict(parameters)
        for name, (_, low, high) in space.learnt.items():
            if settings.box == "clip":
                moved[name] = jnp.clip(moved[name], *((math.log(low), math.log(high)) if log_scale else (low, high)))
        if settings.prune:
            moved["step"] = moved["step"] + 1
            for name in space.learnt:
                moved = pruned(moved, name)
        if "x" in moved:
            moved["x"] = space.in_order(moved["x"] * last) / last
        return moved

    def values(parameters: Parameters) -> Numbers:
        columns = {}
        for name, (_, low, high) in space.learnt.items():
            y = parameters[name]
            if settings.box == "sigmoid":
                y = low + (high - low) * jax.nn.sigmoid(y)
            columns[name] = jnp.exp(y) if log_scale else y
        dtype = next(iter(columns.values())).dtype
        x = parameters["x"] * last if "x" in parameters else jnp.asarray(space.x, dtype)
        return space.start._replace(x=x, **columns)

    return parameters, project, values


def factors_applied(space: Space, values: Values, own: RopeTable) -> Apply:
    """`apply` for `descend`: the unchanged model, and its table `own` with the factors and gains of the parameters."""

    def apply(model: Llama, parameters: Parameters) -> tuple[Llama, RopeTable]:
        return model, space.table(own, values(parameters))

    return apply


def _recorded(space: Space, numbers: Numbers) -> list[list[float]] | None:
    """Control points for the history; None if the units of a layer have their own curves."""
    points = space.points(numbers)
    return None if points is None else np.round(points, 7).tolist()
