"""Tasks that ask for several words at once: RULER's score. The tasks niah, vt, cwe, fwe and needle share it."""

from lpes_jax.tasks.metrics import contains, normalise, substring
from lpes_jax.tasks.prompts import Generation, Prompt


class Recall(Generation):
    """Base of the tasks that are scored by RULER's string_match_all. Their prompts have no forced opener."""

    @property
    def plain(self) -> None:
        return None

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("recall", "recall_bounded")

    def score(self, output: str, prompt: Prompt) -> dict[str, float]:
        """The share of the gold words in the output: `recall` anywhere (RULER's), `recall_bounded` as whole words."""
        said, golds = normalise(output), prompt.references
        return {
            "recall": sum(substring(output, gold) for gold in golds) / len(golds),
            "recall_bounded": sum(contains(said, normalise(gold), bounded=True) for gold in golds) / len(golds),
        }
