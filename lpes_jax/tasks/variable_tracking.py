"""RULER's variable tracking (Hsieh et al., 2024): which variables get a value through a chain of assignments?

    Memorize and track the chain(s) of variable assignment hidden in the following text.

    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
     VAR XQZEF = 53721 The grass is green. ...
     VAR BNTAK = VAR XQZEF  The grass is green. ...
    Question: Find all variables that are assigned the value 53721 in the text above. Answer: According to the chain(s) of
    variable assignment in the text above, 5 variables are assigned the value 53721, they are:

A solved example of the same kind comes first. Template, answer prefix, noise and score equal those of NVIDIA/RULER
(Apache-2.0), `scripts/data/synthetic/variable_tracking.py`, byte for byte; the code is our own. As in RULER, each prompt draws
the names of its solved example.

With `placing="spread"`, as in RULER, each assignment is at a random point of the text, in order, and there are no positions.
With `together`, the chain's assignments are consecutive at the slot, which controls their depth. Other chains (`num_chains`)
are always spread.

The prompt ends in a space, as RULER's does, and RULER's solved example has a second space before its answer. A tokenizer that
joins the two makes an answer that no generation could begin with; `answer_opener=""` removes the last space of the prompt.
Differences from RULER: the names in a prompt differ from each other and from the word VAR, and the solved example has a fixed
number of lines (`SHOT_LINES`, which RULER's rule of 500 tokens gives for most tokenizers).

A hash of a chain's first name assigns an example to `search` (40 %) or `test` (60 %).
"""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from lpes_jax.choices import Placing
from lpes_jax.errors import UserError
from lpes_jax.limits import check_bounds
from lpes_jax.tasks.data import content_id, generated_count, split_of
from lpes_jax.tasks.niah import NOISE
from lpes_jax.tasks.prompts import Prompt, Split
from lpes_jax.tasks.prompts import position as position_of
from lpes_jax.tasks.recall import Recall

QUESTION = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find all "
    "variables that are assigned the value {value} in the text above. Answer: According to the chain(s) of variable assignment "
    "in the text above, {count} variables are assigned the value {value}, they are:"
)
SHOT_LINES = 10


@dataclass(frozen=True)
class Chain:
    """A value, the names that get it one from another, and the index of the piece of text that follows each assignment.

    `before` indexes the pieces without this chain, but with those of earlier chains.
    """

    value: str
    names: tuple[str, ...]
    before: tuple[int, ...]

    @property
    def assignments(self) -> list[str]:
        """One per name; all but the first end in a space, as in RULER."""
        following = (f"VAR {name} = VAR {source} " for source, name in zip(self.names, self.names[1:], strict=False))
        return [f"VAR {self.names[0]} = {self.value}", *following]


@dataclass(frozen=True)
class Example:
    """The chain asked for, then the other chains; the number of lines; and the solved example's chain and number of lines."""

    chains: tuple[Chain, ...]
    num_lines: int
    shot: Chain
    shot_lines: int = SHOT_LINES

    @property
    def id(self) -> str:
        chains = [(chain.value, chain.names, chain.before) for chain in (*self.chains, self.shot)]
        return content_id(chains, self.num_lines, self.shot_lines)

    def with_length(self, num_lines: int) -> "Example":
        """The same chains in fewer lines, at the same relative depths."""
        chains, assignments = [], 0
        for chain in self.chains:
            old, new = (len(pieces(lines, len(chain.names))) + assignments for lines in (self.num_lines, num_lines))
            chains.append(replace(chain, before=tuple(piece * new // old for piece in chain.before)))
            assignments += len(chain.names)
        return replace(self, chains=tuple(chains), num_lines=num_lines)


@dataclass(frozen=True)
class VariableTracking(Recall):
    """The task `vt`.

    Attributes:
        num_lines: Lines of noise.
        num_chains: Chains of assignments; the prompt asks for the first.
        num_hops: Assignments of a chain after its first.
        placing: See above.
        answer_opener: The end of the prompt after "they are:": a space or nothing.

    Raises:
        UserError: Invalid settings.
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
                f"--num-lines {self.num_lines}: has {room} pieces, too few for the {self.num_hops + 1} assignments of "
                f"--num-hops {self.num_hops}; use more lines, or --placing together"
            )

    @property
    def num_items(self) -> int:
        return self.num_lines + 1 if self.placing == "together" else 1

    @property
    def max_new_tokens(self) -> int:
        return 30

    def examples(self, split: Split, count: int | None, seed: int) -> list[Example]:
        """The first `count` examples of the split, each from its own random stream."""
        size = 90 * (self.num_lines + 20) + 30 * self.num_chains * (self.num_hops + 1)
        way_out = "--limit, --num-lines or --num-chains"
        count = generated_count(count, "chains", f"--num-lines {self.num_lines}", size, way_out)
        return [self._generate(split, index, seed) for index in range(count)]

    def prompt(self, example: Example, slot: int, position: int | None = None) -> Prompt:
        """The example with its chains; with `together` the first chain's assignments come before the line at `slot`."""
        own_position = position_of(slot, self.num_items)  # refuses a slot that does not exist
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

    def _together(self, example: Example, slot: int) -> list[str]:
        """The lines with the first chain before the line at `slot`; the others' assignments keep their relative depths."""
        first, *others = example.chains
        before: list[list[str]] = [[] for _ in range(self.num_lines + 1)]
        room = len(pieces(example.num_lines, len(first.names)))
        for number, chain in enumerate(others, 1):
            for piece, assignment in zip(chain.before, chain.assignments, strict=True):
                before[piece * (self.num_lines + 1) // (room + number * len(first.names))].append(assignment)
        before[slot] = first.assignments + before[slot]
        lines = [*([NOISE + "\n"] for _ in range(self.num_lines)), []]
        return [text for assignments, line in zip(before, lines, strict=True) for text in assignments + line]

    def _generate(self, split: Split, index: int, seed: int) -> Example:
        # See key_value.py: string seeds and getrandbits give the same values on every platform.
        rng = random.Random(f"lpes vt {seed} {split} {index}")
        used = {"VAR"}

        def chain(room: int, letters: int, first_split: Split = "all") -> Chain:
            names: list[str] = []
            while len(names) <= self.num_hops:
                name = "".join(string.ascii_uppercase[rng.getrandbits(32) % 26] for _ in range(letters))
                if name not in used and (names or first_split in ("all", split_of(name))):
                    used.add(name)
                    names.append(name)
            before: set[int] = set()
            while len(before) < min(len(names), room):
                before.add(rng.getrandbits(32) % room)
            return Chain(str(10_000 + rng.getrandbits(32) % 89_999), tuple(names), tuple(sorted(before)))

        room = len(pieces(self.num_lines, self.num_hops + 1))
        chains: list[Chain] = []
        for number in range(self.num_chains):
            chains.append(chain(room + number * (self.num_hops + 1), 5, split if not number else "all"))
        return Example(tuple(chains), self.num_lines, chain(len(pieces(SHOT_LINES, self.num_hops + 1)), 3))


def pieces(num_lines: int, assignments: int) -> list[str]:
    """The noise in pieces, as RULER cuts it: lines, or sentences and line ends if there are no more lines than assignments."""
    if num_lines > assignments:
        return [NOISE + "\n"] * num_lines
    return [f"{piece}." if piece.strip() else piece for piece in (NOISE + "\n").split(".")] * num_lines


def _spread(num_lines: int, chains: Sequence[Chain]) -> list[str]:
    """The pieces of the noise with all chains inserted."""
    written = pieces(num_lines, len(chains[0].names))
    for chain in chains:
        for number, (piece, assignment) in enumerate(zip(chain.before, chain.assignments, strict=True)):
            written.insert(piece + number, assignment)
    return written


def _question(texts: Sequence[str], chain: Chain) -> str:
    """The question about a chain in these texts, up to the colon."""
    context = " ".join(texts).replace(". \n", ".\n")
    return QUESTION.format(context=context, value=chain.value, count=len(chain.names))
