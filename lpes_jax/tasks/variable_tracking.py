"""RULER's variable tracking (Hsieh et al., 2024): which variables have a value, by a chain of assignments?

    Memorize and track the chain(s) of variable assignment hidden in the following text.

    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
     VAR XQZEF = 53721 The grass is green. ...
     VAR BNTAK = VAR XQZEF  The grass is green. ...
    Question: Find all variables that are assigned the value 53721 in the text above. Answer: According to the chain(s) of
    variable assignment in the text above, 5 variables are assigned the value 53721, they are:

Before it stands a solved example of the same kind. Template, answer prefix, noise and score are those of NVIDIA/RULER
(Apache-2.0), `scripts/data/synthetic/variable_tracking.py`, to the byte; the code is written anew. The names in the solved
example are drawn for each prompt, as there.

`placing`: `spread` is RULER's, each assignment at a random place of its own, in order; there are no positions then. `together`:
the chain's assignments follow each other at the slot, so that its depth is under control. Other chains (`num_chains`) are
spread in any case.

The prompt ends in a space, as RULER's does, and RULER's solved example has a second one before its answer. A tokenizer that
joins the two makes an answer that no generation could begin with; `answer_opener=""` leaves the last space out of the prompt.
Where this differs from RULER: names in a prompt differ from each other and from the word VAR; the solved example has a fixed
number of lines (`SHOT_LINES`, what RULER's rule of 500 tokens gives for most tokenizers).

A chain's first name decides by a hash whether an example belongs to `search` (40 %) or `test` (60 %).
"""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from lpes_jax.choices import Placing
from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds, check_text_size
from lpes_jax.tasks.data import content_id, split_of
from lpes_jax.tasks.metrics import contains, normalise, substring
from lpes_jax.tasks.niah import NOISE
from lpes_jax.tasks.prompts import Generation, Prompt, Split
from lpes_jax.tasks.prompts import position as position_of

QUESTION = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find all "
    "variables that are assigned the value {value} in the text above. Answer: According to the chain(s) of variable assignment "
    "in the text above, {count} variables are assigned the value {value}, they are:"
)
SHOT_LINES = 10


@dataclass(frozen=True)
class Chain:
    """A value, the names that get it one from the other, and the piece of the text that each assignment stands before.

    `at` counts pieces as they are before this chain comes in, those of earlier chains included.
    """

    value: str
    names: tuple[str, ...]
    at: tuple[int, ...]

    @property
    def assignments(self) -> list[str]:
        """One a piece; all but the first end in a space, as in RULER."""
        following = (f"VAR {name} = VAR {before} " for before, name in zip(self.names, self.names[1:], strict=False))
        return [f"VAR {self.names[0]} = {self.value}", *following]


@dataclass(frozen=True)
class Example:
    """The chain asked for and the others, in so many lines, and the chain of the solved example with its number of lines."""

    chains: tuple[Chain, ...]
    num_lines: int
    shot: Chain
    shot_lines: int = SHOT_LINES

    @property
    def id(self) -> str:
        return content_id([(it.value, it.names, it.at) for it in (*self.chains, self.shot)], self.num_lines, self.shot_lines)

    def of_length(self, num_lines: int) -> "Example":
        """The same chains in fewer lines, as far down as they were."""
        chains, standing = [], 0
        for chain in self.chains:
            before, now = (len(pieces(lines, len(chain.names))) + standing for lines in (self.num_lines, num_lines))
            chains.append(replace(chain, at=tuple(at * now // before for at in chain.at)))
            standing += len(chain.names)
        return replace(self, chains=tuple(chains), num_lines=num_lines)


@dataclass(frozen=True)
class VariableTracking(Generation):
    """The task `vt`.

    num_lines: lines of noise; num_chains: chains of assignments, the first of which is asked for; num_hops: assignments of a
    chain behind its first.
    placing: see above. answer_opener: the end of the prompt behind "they are:", a space or nothing.

    Raises UserError for settings that cannot be.
    """

    num_lines: int = 100
    num_chains: int = 1
    num_hops: int = 4
    placing: Placing = "spread"
    answer_opener: str = " "

    name: ClassVar[str] = "vt"

    def __post_init__(self):
        check_bounds(self)
        if self.answer_opener not in ("", " "):
            raise UserError(f"--answer-opener {self.answer_opener!r}: a prompt of --task vt ends in ' ' or in ''")
        if self.placing == "spread" and (room := len(pieces(self.num_lines, self.num_hops + 1))) < self.num_hops + 1:
            raise UserError(
                f"--num-lines {self.num_lines}: its {room} pieces are too few for the {self.num_hops + 1} assignments of "
                f"--num-hops {self.num_hops}; use more lines, or --placing together"
            )

    @property
    def num_items(self) -> int:
        return self.num_lines + 1 if self.placing == "together" else 1

    @property
    def max_new_tokens(self) -> int:
        return 30

    @property
    def plain(self) -> None:
        return None

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("recall", "recall_bounded")

    def examples(self, split: Split, count: int | None, seed: int) -> list[Example]:
        """The first `count` examples of the split, each from a random stream of its own."""
        if count is None or count < 0:
            raise UserError(f"--limit must not be negative, got {count}" if count else "generated chains need a --limit")
        characters = 90 * (self.num_lines + 20) + 30 * self.num_chains * (self.num_hops + 1)
        check_text_size(count, f"--num-lines {self.num_lines}", characters, "--limit, --num-lines or --num-chains")
        return [self._generate(split, index, seed) for index in range(count)]

    def prompt(self, example: Example, slot: int, position: int | None = None) -> Prompt:
        """The example with its chains where they stand; with `together` the first one's assignments before the line at
        `slot`."""
        own_position = position_of(slot, self.num_items)  # refuses a slot that is not there
        first = example.chains[0]
        texts = self._together(example, slot) if self.placing == "together" else _spread(self.num_lines, example.chains)
        shot = _question(_spread(example.shot_lines, [example.shot]), example.shot)
        text = f"{shot}  {' '.join(example.shot.names)}\n\n\n\n{_question(texts, first)}"
        answer = " ".join(first.names)
        return Prompt(
            text=text + self.answer_opener,
            answers=(f" {answer}", answer) if self.answer_opener else (f" {answer}", f"  {answer}"),
            gold=answer,
            example=example.id,
            position=own_position if position is None else position,
            slot=slot,
            num_items=self.num_items,
            golds=first.names,
        )

    def score(self, output: str, prompt: Prompt) -> dict[str, float]:
        """RULER's string_match_all: the share of the names that stand anywhere in the output; and the same at word ends
        only."""
        said, golds = normalise(output), prompt.references
        return {
            "recall": sum(substring(output, gold) for gold in golds) / len(golds),
            "recall_bounded": sum(contains(said, normalise(gold), bounded=True) for gold in golds) / len(golds),
        }

    def _together(self, example: Example, slot: int) -> list[str]:
        """The lines with the first chain before the one at `slot`; the others' assignments stand about where they would."""
        first, *others = example.chains
        before: list[list[str]] = [[] for _ in range(self.num_lines + 1)]
        room = len(pieces(example.num_lines, len(first.names)))
        for number, chain in enumerate(others, 1):
            for at, assignment in zip(chain.at, chain.assignments, strict=True):
                before[at * (self.num_lines + 1) // (room + number * len(first.names))].append(assignment)
        before[slot] = first.assignments + before[slot]
        lines = [*([NOISE + "\n"] for _ in range(self.num_lines)), []]
        return [text for assignments, line in zip(before, lines, strict=True) for text in assignments + line]

    def _generate(self, split: Split, index: int, seed: int) -> Example:
        # As in key_value.py: a string seeds the same everywhere, and getrandbits is the bare Mersenne Twister.
        rng = random.Random(f"lpes vt {seed} {split} {index}")
        used = {"VAR"}

        def chain(room: int, letters: int, of: Split = "all") -> Chain:
            names: list[str] = []
            while len(names) <= self.num_hops:
                name = "".join(string.ascii_uppercase[rng.getrandbits(32) % 26] for _ in range(letters))
                if name not in used and (names or of in ("all", split_of(name))):
                    used.add(name)
                    names.append(name)
            at: set[int] = set()
            while len(at) < min(len(names), room):
                at.add(rng.getrandbits(32) % room)
            return Chain(str(10_000 + rng.getrandbits(32) % 89_999), tuple(names), tuple(sorted(at)))

        room = len(pieces(self.num_lines, self.num_hops + 1))
        chains: list[Chain] = []
        for number in range(self.num_chains):
            chains.append(chain(room + number * (self.num_hops + 1), 5, split if not number else "all"))
        return Example(tuple(chains), self.num_lines, chain(len(pieces(SHOT_LINES, self.num_hops + 1)), 3))


def pieces(num_lines: int, assignments: int) -> list[str]:
    """The noise as RULER cuts it: lines, or sentences and line ends where there are no more lines than assignments."""
    if num_lines > assignments:
        return [NOISE + "\n"] * num_lines
    return [f"{piece}." if piece.strip() else piece for piece in (NOISE + "\n").split(".")] * num_lines


def _spread(num_lines: int, chains: Sequence[Chain]) -> list[str]:
    """The pieces of the noise with all chains among them."""
    written = pieces(num_lines, len(chains[0].names))
    for chain in chains:
        for number, (at, assignment) in enumerate(zip(chain.at, chain.assignments, strict=True)):
            written.insert(at + number, assignment)
    return written


def _question(texts: Sequence[str], chain: Chain) -> str:
    """The question about a chain in these texts, up to the colon."""
    context = " ".join(texts).replace(". \n", ".\n")
    return QUESTION.format(context=context, value=chain.value, count=len(chain.names))
