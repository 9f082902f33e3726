"""When an answer counts as right, and how much: every score is in [0, 1], and several golds count by the best of them.

Each is its benchmark's own rule, quirks included; where a quirk is a fault, the repaired rule is the default and the
original goes by its name.
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
    """lost-in-the-middle's key-value accuracy: the gold value stands anywhere in the output, whatever the case."""
    return gold.lower() in output.lower()


def begins_with(output_ids: Sequence[int], answers_ids: Sequence[Sequence[int]]) -> bool:
    """The `prefix` rule: the generated ids begin with one of the admitted answers' ids."""
    return any(list(output_ids[: len(answer)]) == list(answer) for answer in answers_ids)


def normalise(text: str, unicode: bool = False) -> str:
    """SQuAD's: lower case, without ASCII punctuation and articles, single spaces. "Spider-Man" is "spiderman".

    unicode: also without accents and any other punctuation, so that "Beyoncé" is "beyonce".
    """
    text = text.lower()
    if unicode:
        decomposed = unicodedata.normalize("NFKD", text)
        text = "".join(char for char in decomposed if unicodedata.category(char)[0] not in "MP")
    text = "".join(char for char in text if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def first_line(output: str, rule: FirstLine = "stripped") -> str:
    """The text that is scored: the first line behind leading white space; `original` cuts first, so "\\nParis" is empty."""
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

    empty_golds_match: as the original does, a gold of which nothing is left ("*") is in every output.
    bounded: at word ends only, so that "2" is not in "1920s".
    """
    said = normalise(first_line(output, rule), unicode)
    return any(
        contains(said, normalise(gold, unicode), bounded) if normalise(gold, unicode) else empty_golds_match for gold in golds
    )


def contains(text: str, part: str, bounded: bool = False) -> bool:
    """Whether a normalised part is in a normalised text, `bounded` at word ends only."""
    return f" {part} " in f" {text} " if bounded else part in text


def f1(output: str, golds: Iterable[str], *, unicode: bool = False) -> float:
    """SQuAD's: harmonic mean of precision and recall over normalised words, of the best gold. `unicode`: as `normalise`."""
    return max(_f1(normalise(output, unicode).split(), normalise(gold, unicode).split()) for gold in golds)


def _f1(said: list[str], gold: list[str]) -> float:
    common = sum((Counter(said) & Counter(gold)).values())
    return 2 * common / (len(said) + len(gold)) if common else 0.0


def rouge(output: str, golds: Iterable[str]) -> dict[str, float]:
    """ROUGE-1, -2 and -L F without stemming, each by its own best gold, and `rouge`: the geometric mean of the three.

    The benchmarks take the mean of the means over all examples instead: `corpus_rouge`.
    """
    scores = [_rouge_scorer().score(gold, output) for gold in golds]
    figures = {kind: float(max(score[kind].fmeasure for score in scores)) for kind in ROUGE}
    return {"rouge": math.prod(figures.values()) ** (1 / 3), **figures}


@cache
def _rouge_scorer() -> Any:
    from rouge_score import rouge_scorer  # a second to import, for few tasks

    return rouge_scorer.RougeScorer(ROUGE, use_stemmer=False)


def corpus_rouge(scores: Sequence[Mapping[str, float]]) -> float:
    """ZeroSCROLLS' and L-Eval's figure: geometric mean of the three means. All examples without a common bigram give 0."""
    return math.prod(sum(score[kind] for score in scores) / len(scores) for kind in ROUGE) ** (1 / 3)


def says_nothing(gold: str, metric: str) -> bool:
    """Whether a gold answer is empty by the normalisation of `f1` or `rouge`: then no output has anything in common with it."""
    return not (re.search("[a-z0-9]", gold.lower()) if metric == "rouge" else normalise(gold))


def exponential_similarity(output: str, gold: str) -> float:
    """SpaceDigest: 2^(-|difference| / 10) of the first percentages in the texts; 0 where the output has none."""
    said, right = percentage(output), percentage(gold)
    if right is None:
        raise ValueError(f"the gold answer {gold!r} is no percentage")
    return 0.0 if said is None else 2 ** (-abs(said - right) / 10)


def percentage(text: str) -> float | None:
    """The number before the first % sign that has one."""
    found = re.search(r"\d+\.?\d*%", text)
    return None if found is None else float(found[0][:-1])


def concordance(output: str, gold: str) -> float:
    """BookSumSort: the share of pairs in the right order; 0 where the output is no permutation of the gold ids."""
    said, right = (re.sub(r"[^0-9\s,]", "", text).replace(",", " ").split() for text in (output, gold))
    if sorted(said) != sorted(right) or len(set(right)) < 2:
        return float(said == right)
    at = [said.index(number) for number in right]
    pairs = [(at[i], at[j]) for j in range(len(at)) for i in range(j)]
    return sum(first < second for first, second in pairs) / len(pairs)


def choice(output: str) -> str | None:
    """ZeroSCROLLS' QuALITY: the first letter A to D that stands alone."""
    found = re.search(r"\b[A-D]\b", output)
    return found and found[0]


def exam_letters(output: str, several: bool) -> str:
    """L-Eval's letters of an answer. One: the first A to D anywhere. Several: the ones at the beginning, else those before
    a space, dot or bracket, else the first run. It answers "A" for an output that names none, and "None" for an empty one."""
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
    """L-Eval: 1 for the same letters, 0.25 for some of several right ones and none that is wrong."""
    if said == gold:
        return 1.0
    return 0.25 if set(said) <= set(gold) else 0.0


def effective_length(lengths: Sequence[int], scores: Sequence[float], threshold: float = 0.85) -> int | None:
    """The longest length with at least `threshold` of the score at the shortest length; None where that score is 0."""
    by_length = sorted(zip(lengths, scores, strict=True))
    needed = threshold * by_length[0][1]
    return max(length for length, score in by_length if score >= needed) if needed > 0 else None
