"""The fitness of an individual, from its scores on the search prompts.

It is the weighted sum over the search positions of the same examples' accuracy (section 3.2), or of their mean answer
log-likelihood. Of a mixture it is the sum over its tasks of their weight times this.

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
class Group:
    """The prompts of one task of a mixture, which follow each other: `count` of them, question by question.

    `positions` of a question's prompts, and their weights, which sum to 1; `share` of the task, of 1 in all.
    """

    title: str
    count: int
    positions: tuple[int, ...]
    weights: tuple[float, ...]
    share: float


@dataclass(frozen=True)
class Objective:
    """What the scores of a prompt count for.

    `positions` are those of each question's prompts, which follow each other. `answer_tokens`: of each prompt.
    `has_likelihood`: whether scores have a log-likelihood. `groups`: the tasks of a mixture; without them all prompts are asked
    at the same positions.
    """

    settings: ObjectiveSettings
    positions: tuple[int, ...]
    answer_tokens: Int[np.ndarray, "N"]
    has_likelihood: bool = True
    groups: Sequence[Group] = ()

    @property
    def weights(self) -> tuple[float, ...]:
        """Of the positions."""
        return self.settings.weights if len(self.positions) == len(self.settings.search_positions) else (1.0,)

    @property
    def accuracy_keys(self) -> list[str]:
        """What the history has an accuracy of: each position, or each task of a mixture."""
        return [group.title for group in self.groups] or [str(position) for position in self.positions]

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
        """Fitness, accuracy and log-likelihood as the history has them, of all prompts or of some, by their numbers.

        The fitness is None where a log-likelihood is not finite.
        """
        if self.groups:
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
        """The same of a mixture: accuracy and log-likelihood are of each task by its title."""
        finite = bool(np.isfinite(log_likelihood).all())
        scale, start, fitness, tie_break = self._tie_break_of_groups(), 0, 0.0, 0.0
        by_task: dict[str, dict[str, Any]] = {"accuracy": {}, "log_likelihood": {}}
        for group in self.groups:
            part = slice(start, start + group.count)
            shape, start = (-1, len(group.positions)), start + group.count
            accuracy = correct[part].reshape(shape).mean(axis=0, dtype=np.float64)
            likelihood = log_likelihood[part].reshape(shape).astype(np.float64)
            weights = np.array(group.weights)
            if self.by_likelihood:
                fitness += group.share * float(weights @ likelihood.mean(axis=0))
            else:
                probability = np.exp(likelihood / self.answer_tokens[part].reshape(shape)).mean(axis=0)
                fitness += group.share * float(weights @ accuracy)
                tie_break += group.share * float(weights @ probability)
            means = zip(group.positions, accuracy.tolist(), likelihood.mean(axis=0).tolist(), strict=True)
            for position, right, likely in means:
                by_task["accuracy"].setdefault(group.title, {})[str(position)] = right
                by_task["log_likelihood"].setdefault(group.title, {})[str(position)] = round(likely, 4) if finite else None
        return {"fitness": round(fitness + scale * tie_break, 12) if finite else None, **by_task}

    def _tie_break_of_groups(self) -> float:
        """`tie_break_scale` of all tasks: how far two fitnesses are apart at least, halved; 0 where ties stay."""
        if self.by_likelihood or not self.settings.tie_break:
            return 0.0
        # A verdict of one prompt changes the fitness by one of these; what has no common measure is told apart to a hundredth.
        changes = [
            group.share * weight * len(group.positions) / group.count
            for group in self.groups
            for weight in group.weights
            if weight > 0
        ]
        fractions = [Fraction(change).limit_denominator(10**6) for change in changes]
        denominator = math.lcm(*(fraction.denominator for fraction in fractions))
        common = math.gcd(*(int(fraction * denominator) for fraction in fractions)) / denominator
        return max(common, min(changes) / 100) / 2

    def by_question(
        self, correct: Bool[np.ndarray, "P N"], log_likelihood: Float[np.ndarray, "P N"]
    ) -> Float[np.ndarray, "P Q"]:
        """What each question adds to the fitness, which is the mean of these; NaN where a score is not finite. No mixture."""
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
        """How much one verdict changes the value of its question at most."""
        return 0.0 if self.by_likelihood else max(self.weights)


def tie_break_scale(weights: Sequence[float], examples: int) -> float:
    """Half of the smallest difference that two weighted accuracies can have: what is added for likelihood stays below it.

    Weights are taken as decimals; two accuracies differ by a multiple of their greatest common divisor over `examples`.
    """
    fractions = [Fraction(str(weight)) for weight in weights if weight > 0]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    return math.gcd(*(int(fraction * denominator) for fraction in fractions)) / denominator / examples / 2


def groups_of(
    titles: Sequence[str],
    shares: Sequence[float],
    slots: Sequence[Sequence[tuple[int, int]]],
    prompts: Sequence[Sequence[Prompt]],
    weights: tuple[float, ...],
) -> list[Group]:
    """The tasks of a mixture, each asked at its (slot, position) pairs; one without positions has the weight 1 there."""
    groups = []
    for title, share, task_slots, task_prompts in zip(titles, shares, slots, prompts, strict=True):
        positions = tuple(position for _, position in task_slots)
        own = weights if len(positions) == len(weights) else (1.0,)
        groups.append(Group(title, len(task_prompts), positions, own, share))
    return groups
