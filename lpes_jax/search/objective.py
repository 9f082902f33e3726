"""The fitness of an individual, from its scores on the search prompts.

It is the weighted sum over the search positions of the accuracy on the same examples (section 3.2), or of their mean answer
log-likelihood. The fitness of a mixture is the weighted sum of its tasks' fitnesses.

Letters: P population, N prompts, Q questions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from lpes_jax.settings.search import ObjectiveSettings
from lpes_jax.tasks.prompts import Prompt


@dataclass(frozen=True)
class MixtureTask:
    """The prompts of one task of a mixture: `count` consecutive prompts, question by question.

    `positions` and `weights` (which sum to 1) are those of a question's prompts. The shares of all tasks sum to 1.
    """

    title: str
    count: int
    positions: tuple[int, ...]
    weights: tuple[float, ...]
    share: float


@dataclass(frozen=True)
class Objective:
    """How the scores of prompts make up the fitness.

    `positions` are those of each question's prompts, which are consecutive. `answer_tokens` has the number of answer tokens of
    each prompt. `has_likelihood`: whether scores have a log-likelihood. `tasks` are the tasks of a mixture; without them all
    questions are asked at the same positions.
    """

    settings: ObjectiveSettings
    positions: tuple[int, ...]
    answer_tokens: Int[np.ndarray, "N"]
    has_likelihood: bool = True
    tasks: Sequence[MixtureTask] = ()

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the positions."""
        return self.settings.weights if len(self.positions) == len(self.settings.search_positions) else (1.0,)

    @property
    def accuracy_keys(self) -> list[str]:
        """The keys of an accuracy in the history: the positions, or the tasks of a mixture."""
        return [task.title for task in self.tasks] or [str(position) for position in self.positions]

    @property
    def by_likelihood(self) -> bool:
        """Whether the fitness is the log-likelihood."""
        return self.settings.fitness == "log_likelihood"

    def summary(
        self,
        correct: Bool[np.ndarray, "n"] | Float[np.ndarray, "n"],
        log_likelihood: Float[np.ndarray, "n"],
        prompts: Int[np.ndarray, "n"] | None = None,
    ) -> dict[str, Any]:
        """Fitness, accuracy and log-likelihood as the history has them, on all prompts or on some, given by their indices.

        The fitness is None if a log-likelihood is not finite.
        """
        if self.tasks:
            return self._summary_by_task(correct, log_likelihood)
        per_question = len(self.positions)
        answer_tokens = self.answer_tokens if prompts is None else self.answer_tokens[prompts]
        accuracy = correct.reshape(-1, per_question).mean(axis=0, dtype=np.float64)
        likelihood = log_likelihood.reshape(-1, per_question).astype(np.float64)
        # The geometric mean of the answer tokens' probabilities: in (0, 1], whatever the answer's length.
        probability = np.exp(likelihood / answer_tokens.reshape(-1, per_question)).mean(axis=0)
        weights = np.array(self.weights)
        finite = bool(np.isfinite(likelihood).all())
        if self.by_likelihood:
            fitness = float(weights @ likelihood.mean(axis=0))
        else:
            fitness = float(weights @ accuracy)
            if self.settings.tie_break and self.has_likelihood:
                fitness += tie_break_scale(weights.tolist(), len(likelihood)) * float(weights @ probability)
        return {
            "fitness": round(fitness, 9) if finite else None,
            "accuracy": {str(position): value for position, value in zip(self.positions, accuracy.tolist(), strict=True)},
            "log_likelihood": {
                str(position): round(value, 4) if finite and self.has_likelihood else None
                for position, value in zip(self.positions, likelihood.mean(axis=0).tolist(), strict=True)
            },
        }

    def _summary_by_task(self, correct: np.ndarray, log_likelihood: np.ndarray) -> dict[str, Any]:
        """The summary for a mixture: accuracy and log-likelihood by the tasks' titles."""
        finite = bool(np.isfinite(log_likelihood).all())
        scale, start, fitness, tie_break = self._tie_break_of_tasks(), 0, 0.0, 0.0
        by_task: dict[str, dict[str, Any]] = {"accuracy": {}, "log_likelihood": {}}
        for task in self.tasks:
            part = slice(start, start + task.count)
            shape, start = (-1, len(task.positions)), start + task.count
            accuracy = correct[part].reshape(shape).mean(axis=0, dtype=np.float64)
            likelihood = log_likelihood[part].reshape(shape).astype(np.float64)
            weights = np.array(task.weights)
            if self.by_likelihood:
                fitness += task.share * float(weights @ likelihood.mean(axis=0))
            else:
                probability = np.exp(likelihood / self.answer_tokens[part].reshape(shape)).mean(axis=0)
                fitness += task.share * float(weights @ accuracy)
                tie_break += task.share * float(weights @ probability)
            means = zip(task.positions, accuracy.tolist(), likelihood.mean(axis=0).tolist(), strict=True)
            for position, correct_share, mean_likelihood in means:
                by_task["accuracy"].setdefault(task.title, {})[str(position)] = correct_share
                by_task["log_likelihood"].setdefault(task.title, {})[str(position)] = (
                    round(mean_likelihood, 4) if finite else None
                )
        return {"fitness": round(fitness + scale * tie_break, 12) if finite else None, **by_task}

    def _tie_break_of_tasks(self) -> float:
        """Half of the smallest difference that two fitnesses of a mixture can have; 0 without tie-breaking."""
        if self.by_likelihood or not self.settings.tie_break:
            return 0.0
        # The verdict on one prompt changes the fitness by one of these. If their divisor is tiny, 1 % of the smallest is used.
        changes = [
            task.share * weight * len(task.positions) / task.count
            for task in self.tasks
            for weight in task.weights
            if weight > 0
        ]
        fractions = [Fraction(change).limit_denominator(10**6) for change in changes]
        denominator = math.lcm(*(fraction.denominator for fraction in fractions))
        common = math.gcd(*(int(fraction * denominator) for fraction in fractions)) / denominator
        return max(common, min(changes) / 100) / 2

    def by_question(
        self, correct: Bool[np.ndarray, "P N"], log_likelihood: Float[np.ndarray, "P N"]
    ) -> Float[np.ndarray, "P Q"]:
        """The values of the questions, whose mean is the fitness; NaN if a score is not finite. Not for mixtures."""
        likelihood = np.where(np.isfinite(log_likelihood), log_likelihood, np.nan).astype(np.float64)
        if self.by_likelihood:
            by_prompt = likelihood
        else:
            questions = correct.shape[1] // len(self.positions)
            scale = tie_break_scale(self.weights, questions) if self.settings.tie_break else 0.0
            by_prompt = correct + scale * np.exp(likelihood / self.answer_tokens)
        return by_prompt.reshape(len(correct), -1, len(self.positions)) @ np.array(self.weights)

    @property
    def most_of_a_verdict(self) -> float:
        """The most that one verdict can change the value of its question."""
        return 0.0 if self.by_likelihood else max(self.weights)


def tie_break_scale(weights: Sequence[float], examples: int) -> float:
    """Half of the smallest difference that two weighted accuracies can have, so that likelihood only breaks ties.

    Weights are read as decimals. Two accuracies differ by a multiple of the weights' greatest common divisor / `examples`.
    """
    fractions = [Fraction(str(weight)) for weight in weights if weight > 0]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    return math.gcd(*(int(fraction * denominator) for fraction in fractions)) / denominator / examples / 2


def mixture_tasks(
    titles: Sequence[str],
    shares: Sequence[float],
    slots: Sequence[Sequence[tuple[int, int]]],
    prompts: Sequence[Sequence[Prompt]],
    weights: tuple[float, ...],
) -> list[MixtureTask]:
    """The tasks of a mixture, each with its (slot, position) pairs. A task without positions has one, of weight 1."""
    tasks = []
    for title, share, task_slots, task_prompts in zip(titles, shares, slots, prompts, strict=True):
        positions = tuple(position for _, position in task_slots)
        own = weights if len(positions) == len(weights) else (1.0,)
        tasks.append(MixtureTask(title, len(task_prompts), positions, own, share))
    return tasks
