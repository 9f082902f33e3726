"""Metrics of an output: every score is in [0, 1], and among several golds the best one counts.

Each follows its benchmark's own rule, quirks included. If a quirk is a fault, the repaired rule is the default and the original
is available by name.
"""

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from lpes_jax.choices import FirstLine

ROUGE = ("rouge1", "rouge2", "rougeL")


def substring(output: str, gold: str) -> bool:
    """lost-in-the-middle's key-value accuracy: the gold value occurs anywhere in the output, ignoring case."""
    return gold.lower() in output.lower()


def begins_with(output_ids: Sequence[int], answers_ids: Sequence[Sequence[int]]) -> bool:
    """The `prefix` rule: the generated ids begin with one of the admitted answers' ids."""
    return any(list(output_ids[: len(answer)]) == list(answer) for answer in answers_ids)


def normalise(text: str, unicode: bool = False) -> str:
    """SQuAD's normalisation: lower case, no ASCII punctuation, no articles, single spaces. "Spider-Man" becomes "spiderman".

    `unicode` also removes accents and all other punctuation, so that "Beyoncé" becomes "beyonce".
    """
    text = text.lower()
    if unicode:
        decomposed = unicodedata.normalize("NFKD", text)
        text = "".join(char for char in decomposed if unicodedata.category(char)[0] not in "MP")
    text = "".join(char for char in text if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def first_line(output: str, rule: FirstLine = "stripped") -> str:
    """The text that is scored: the first line after leading white space. `original` cuts first, so "\\nParis" is empty."""
    if rule == "all":
        return output
    return (output.lstrip() if rule == "stripped" else output).split("\n")[0].strip()


def best_subspan_em(
    output: str,
    golds: Iterable[str],
    *,
    rule: FirstLine = "stripped",
    empty_golds_match: bool = False,
    unicode: bool = False,
    bounded: bool = False,
) -> bool:
    """lost-in-the-middle's accuracy: a normalised gold is a substring of the normalised first line.

    Args:
        output: The generated text.
        golds: The right answers.
        rule: See `first_line`.
        empty_golds_match: Whether a gold that normalises to nothing ("*") counts as found, as in the original.
        unicode: See `normalise`.
        bounded: Match whole words only, so that "2" is not in "1920s".
    """
    said = normalise(first_line(output, rule), unicode)
    return any(
        contains(said, normalise(gold, unicode), bounded) if normalise(gold, unicode) else empty_golds_match for gold in golds
    )


def contains(text: str, part: str, bounded: bool = False) -> bool:
    """Whether a normalised part is in a normalised text; with `bounded` as whole words."""
    return f" {part} " in f" {text} " if bounded else part in text


def f1(output: str, golds: Iterable[str], *, unicode: bool = False) -> float:
    """SQuAD's F1: harmonic mean of precision and recall over normalised words, for the best gold."""
    return max(_f1(normalise(output, unicode).split(), normalise(gold, unicode).split()) for gold in golds)


def _f1(said: list[str], gold: list[str]) -> float:
    common = sum((Counter(said) & Counter(gold)).values())
    return 2 * common / (len(said) + len(gold)) if common else 0.0


def rouge(output: str, golds: Iterable[str]) -> dict[str, float]:
    """ROUGE-1, -2 and -L F without stemming, each for its own best gold, and `rouge`, their geometric mean.

    The benchmarks instead take the geometric mean of the means over all examples: `corpus_rouge`.
    """
    scores = [_rouge_scorer().score(gold, output) for gold in golds]
    figures = {kind: float(max(score[kind].fmeasure for score in scores)) for kind in ROUGE}
    return {"rouge": math.prod(figures.values()) ** (1 / 3), **figures}


@cache
def _rouge_scorer() -> Any:
    from rouge_score import rouge_scorer  # takes a second to import, and few tasks need it

    return rouge_scorer.RougeScorer(ROUGE, use_stemmer=False)


def corpus_rouge(scores: Sequence[Mapping[str, float]]) -> float:
    """The ROUGE of ZeroSCROLLS and L-Eval: geometric mean of the three means. It is 0 if no example shares a bigram."""
    return math.prod(sum(score[kind] for score in scores) / len(scores) for kind in ROUGE) ** (1 / 3)


def says_nothing(gold: str, metric: str) -> bool:
    """Whether the normalisation of `f1` or `rouge` leaves nothing of a gold answer, so that every output scores 0."""
    return not (re.search("[a-z0-9]", gold.lower()) if metric == "rouge" else normalise(gold))


def exponential_similarity(output: str, gold: str) -> float:
    """SpaceDigest's score: 2^(-|difference| / 10) of the first percentages in the texts; 0 if the output has none."""
    said, right = percentage(output), percentage(gold)
    if right is None:
        raise ValueError(f"the gold answer {gold!r} is not a percentage")
    return 0.0 if said is None else 2 ** (-abs(said - right) / 10)


def percentage(text: str) -> float | None:
    """The first number that is followed by a % sign."""
    found = re.search(r"\d+\.?\d*%", text)
    return None if found is None else float(found[0][:-1])


def concordance(output: str, gold: str) -> float:
    """BookSumSort's score: the share of pairs in the right order; 0 if the output is not a permutation of the gold ids."""
    said, right = (re.sub(r"[^0-9\s,]", "", text).replace(",", " ").split() for text in (output, gold))
    if sorted(said) != sorted(right) or len(set(right)) < 2:
        return float(said == right)
    indices = [said.index(number) for number in right]
    pairs = [(indices[i], indices[j]) for j in range(len(indices)) for i in range(j)]
    return sum(first < second for first, second in pairs) / len(pairs)


def choice(output: str) -> str | None:
    """ZeroSCROLLS' QuALITY: the first letter A to D that is a word of its own."""
    found = re.search(r"\b[A-D]\b", output)
    return found and found[0]


def exam_letters(output: str, several: bool) -> str:
    """L-Eval's letters of an output; "A" if it names none, "None" if it is empty.

    With one right letter: the first A to D anywhere. With several: the letters at the beginning, else those before a space, dot
    or bracket, else the first run.
    """
    if not output.strip():
        return "None"
    if output in "ABCD":
        return output
    if not several and (found := re.search("[A-D]", output)):
        return found[0]
    leading = _leading_letters(output)
    if len(leading) > 1:
        return "".join(sorted(set(leading)))
    rest = output[len(leading) :].split("Question")[0]
    named = leading + "".join(letter for letter in re.findall(r"[A-Z](?=[\s.)])", rest) if letter in "ABCD")
    run = re.search("[A-D]+", rest)
    return "".join(sorted(set(named))) or (run[0] if run else "A")


def _leading_letters(text: str) -> str:
    found = re.match("[A-D]*", text)
    return found[0] if found else ""


def exam_score(said: str, gold: str) -> float:
    """L-Eval's score: 1 for the same letters, 0.25 for some of the right ones and no wrong one."""
    if said == gold:
        return 1.0
    return 0.25 if set(said) <= set(gold) else 0.0


def effective_length(lengths: Sequence[int], scores: Sequence[float], threshold: float = 0.85) -> int | None:
    """The longest length with at least `threshold` of the score at the shortest length; None if that score is 0."""
    by_length = sorted(zip(lengths, scores, strict=True))
    needed = threshold * by_length[0][1]
    return max(length for length, score in by_length if score >= needed) if needed > 0 else None
