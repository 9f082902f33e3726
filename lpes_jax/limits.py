"""Bounds of the numbers and texts of settings, by field name: the verbs' flags, and settings in Python.

    check_bounds(settings)      # any dataclass of settings; UserError for the first field that is out of bounds

Bounds are far above what any run needs, but low enough that a value within them neither fills the memory nor runs forever
before a model is opened. A field has the same bounds in every dataclass. Limits that depend on the model, the data or other
fields are checked when those are known.
"""

import numbers
import os
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lpes_jax.errors import UserError


@dataclass(frozen=True)
class Bound:
    """A range from `least` to `most`, both included unless `above` or `below` is set; `unit` follows it in messages."""

    least: int | float
    most: int | float
    unit: str
    above: bool = False
    below: bool = False


MOST_TOKENS = 2**24
MOST_LAYERS = 2**14
MOST_TEXT = 2**28  # characters that a task may generate
MOST_INDIVIDUALS = 10**7  # of a search; its history is kept in memory

BOUNDS: dict[str, Bound] = {
    # Questions
    "num_pairs": Bound(1, 100_000, "pairs of a prompt"),
    "key_length": Bound(1, 1024, "characters of a key"),
    "queries_per_haystack": Bound(1, 100_000, "questions about the same pairs"),
    "num_documents": Bound(1, 10_000, "documents of a prompt"),
    "num_sentences": Bound(1, 200_000, "sentences of a prompt"),
    "num_lines": Bound(0, 200_000, "lines of a prompt"),
    "num_words": Bound(1, 1_000_000, "words of a prompt"),
    "num_chains": Bound(1, 1000, "chains of a prompt"),
    "num_hops": Bound(1, 100, "assignments of a chain"),
    "alpha": Bound(1, 100, "an exponent of frequencies", above=True),
    "num_keys": Bound(1, 50, "needles of a prompt"),
    "num_queries": Bound(1, 50, "needles asked for"),
    "max_prompt_tokens": Bound(1, MOST_TOKENS, "tokens of a prompt"),
    "num_shots": Bound(0, 1000, "solved questions of a prompt"),
    "window": Bound(2, MOST_TOKENS, "tokens of a window"),
    "stride": Bound(1, MOST_TOKENS, "tokens between windows"),
    "lengths": Bound(1, 1_000_000, "tokens of a prompt"),
    "limit": Bound(1, 1_000_000, "questions"),
    "test_limit": Bound(1, 1_000_000, "questions"),
    "positions": Bound(0, 100, "percent of the prompt"),
    "search_positions": Bound(0, 100, "percent of the prompt"),
    "slots": Bound(0, 200_000, "the number of an item"),
    "max_new_tokens": Bound(1, 1_000_000, "tokens of an output"),
    "seed": Bound(0, 2**32 - 1, "seeds have 32 bits"),
    # The space of a search
    "num_layers": Bound(0, MOST_LAYERS, "layers of a model"),
    "bands": Bound(0, 4096, "bands of a head"),
    "control_points": Bound(1, MOST_LAYERS, "points of the curve"),
    "min_factor": Bound(0, 1e6, "a factor"),  # 0 is for multipliers only: see search_space
    "max_factor": Bound(1e-6, 1e6, "a factor"),
    "initial_factor": Bound(0, 1e6, "a factor"),
    "min_gain": Bound(0, 1e6, "a gain"),
    "max_gain": Bound(1e-6, 1e6, "a gain"),
    "initial_gain": Bound(0, 1e6, "a gain"),
    "prune": Bound(0, 1, "a share of the learning rate"),
    "initial_points": Bound(0, 1e6, "layers and factors"),
    "x_step": Bound(0, MOST_LAYERS, "layers"),
    "y_step": Bound(0, 1e6, "a difference of factors"),
    "max_change_x": Bound(0, MOST_LAYERS, "layers"),
    "max_change_y": Bound(0, 1e6, "a difference of factors"),
    # Its algorithms
    "population_size": Bound(1, 10_000, "individuals"),
    "parents": Bound(1, 10_000, "individuals"),
    "mutations": Bound(0, 10_000, "mutants of a generation"),
    "crossovers": Bound(0, 10_000, "crossovers of a generation"),
    "crossover_tries": Bound(1, 100, "tries of a crossover"),
    "mutation_rate": Bound(0, 1, "a probability", above=True),
    "generations": Bound(0, 100_000, "generations"),
    "max_evaluations": Bound(1, MOST_INDIVIDUALS, "individuals"),
    "uniform_candidates": Bound(1, 10_000, "factors tried"),
    "steps": Bound(1, 10_000_000, "steps of Adam"),
    "learning_rate": Bound(0, 1000, "per step, in units of a factor", above=True),
    "minibatch_size": Bound(1, 1_000_000, "prompts per step"),
    "validation_share": Bound(0, 1, "a share", above=True, below=True),
    "look_every": Bound(1, 10_000_000, "steps between validations"),
    "patience": Bound(0, 10_000_000, "validations"),
    "stay_close": Bound(0, 1e9, "a weight in the loss"),
    "text_weight": Bound(0, 1e9, "a weight in the loss"),
    "text_minibatch": Bound(1, 100_000, "windows per step"),
    "text_window": Bound(2, MOST_TOKENS, "tokens of a window"),
    "max_text_loss_rise": Bound(0, 1000, "nats per token"),
    # Rivals
    "router_steps": Bound(1, 10_000, "steps of the training"),
    "router_batch": Bound(1, 4096, "windows per step"),
    "channel_strings": Bound(1, 10_000, "strings"),
    "budget": Bound(1, 10_000, "settings tried per method"),
    "repeats": Bound(1, 100_000, "rounds of the timing"),
    # A profile
    "minutes": Bound(0, 10_000, "minutes", above=True),
    "threshold": Bound(0, 1, "a share", above=True),
    "confidence": Bound(0, 1, "a probability", above=True, below=True),
    # How to run
    "batch_size": Bound(1, 65_536, "prompts per pass"),
    "population_chunk": Bound(1, 65_536, "individuals per pass"),
    "model_axis": Bound(1, 65_536, "devices of a model"),
    "memory_gb": Bound(0.1, 4096, "GiB of memory of a card"),
    "prompt_tokens": Bound(8, 2**20, "tokens of a prompt"),
    "num_tokens": Bound(8, 32_768, "tokens of the text that is checked"),
    "num_processes": Bound(1, 65_536, "processes"),
    "process_id": Bound(0, 65_535, "the number of a process"),
    "start_timeout": Bound(1, 604_800, "seconds"),
}


def check_bounds(settings: Any, prefix: str = "--") -> None:
    """Raise UserError if a number of a dataclass is out of `BOUNDS`, or a text or path is invalid; nested dataclasses too.

    The message names the flag (`prefix` and the field's name), the value and the bound. Fields without bounds are not checked
    (`weights` must sum to 1), None counts as no number, and each element of a tuple is checked.
    """
    kinds = numbers_of(type(settings))
    for field in fields(settings):
        flag, setting = flag_of(field.name, prefix), getattr(settings, field.name)
        if is_dataclass(setting):
            check_bounds(setting, prefix)
            continue
        for value in _leaves(setting):
            if isinstance(value, str) and field.name in kinds and (ends := re.fullmatch(r"(\d{1,9}):(\d{1,9})", value)):
                for end in map(int, ends.groups()):  # lengths from a range
                    check_number(flag, end, BOUNDS[field.name], kinds[field.name])
            elif field.name in kinds and field.name in BOUNDS:
                check_number(flag, value, BOUNDS[field.name], kinds[field.name])
            elif isinstance(value, str | Path):
                _check_text(flag, value, is_path=isinstance(value, Path) or field.name == "model")


def check_number(flag: str, value: Any, bound: Bound, kind: type = int) -> None:
    """Raise UserError for a value that is not a number of type `kind` (float: any number) or is out of `bound`."""
    wanted = numbers.Integral if kind is int else numbers.Real
    shown, unit = _shown(value), f" ({bound.unit})"
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise UserError(f"{flag} must be a {'whole ' if kind is int else ''}number, got {shown}")
    number: Any = value  # int or float; the types of `numbers` have no order
    if number != number:
        raise UserError(f"{flag} must be a number from {_plain(bound.least)} to {_plain(bound.most)}{unit}, got {shown}")
    low = number <= bound.least if bound.above else number < bound.least
    high = number >= bound.most if bound.below else number > bound.most
    if (low or high) and bound.above and bound.below:
        raise UserError(f"{flag} must be between {bound.least:g} and {bound.most:g}, got {shown}")
    if low:
        raise UserError(f"{flag} must be {'above' if bound.above else 'at least'} {_plain(bound.least)}, got {shown}")
    if high:
        raise UserError(f"{flag} must be {'below' if bound.below else 'at most'} {_plain(bound.most)}{unit}, got {shown}")


def check_text_size(count: int, item: str, characters: int, way_out: str) -> None:
    """Raise UserError if `count` examples of `characters` characters each exceed what a task may generate."""
    if count * characters > MOST_TEXT:
        raise UserError(
            f"{count} examples of {item} are {count * characters:,} characters, more than the {MOST_TEXT:,} that are "
            f"generated; lower {way_out}"
        )


def check_individuals(individuals: int) -> None:
    """Raise UserError for a search of more individuals than a history can have."""
    if individuals > MOST_INDIVIDUALS:
        raise UserError(
            f"--generations makes {individuals:,} individuals with these settings, more than {MOST_INDIVIDUALS:,}; "
            "lower it, --population-size, --mutations or --crossovers"
        )


def check_path(what: str, path: str | Path) -> None:
    """Raise UserError, beginning with `what`, for an impossible path: too long, or with a null character."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{what}{_shown(str(path))} cannot be a file's name ({reason})") from error


@cache
def numbers_of(settings: type) -> dict[str, type]:
    """The numeric fields of a dataclass and of nested ones, with their types: int, or float if fractions are allowed."""
    hints = typing.get_type_hints(settings)
    found: dict[str, type] = {}
    for field in fields(settings):
        if isinstance(hint := hints[field.name], type) and is_dataclass(hint):
            found |= numbers_of(hint)
        elif (kinds := set(_types(hint))) & {int, float}:
            found[field.name] = float if float in kinds else int
    return found


def flag_of(name: str, prefix: str = "--") -> str:
    """The name of a field's flag."""
    return prefix + (name.replace("_", "-") if prefix else name)


def _types(hint: Any) -> Iterator[Any]:
    """The types that a hint consists of: those of a union, and of the elements of a tuple."""
    arguments = [argument for argument in typing.get_args(hint) if argument is not ...]
    if typing.get_origin(hint) is typing.Literal or not arguments:
        yield hint
        return
    for argument in arguments:
        yield from _types(argument)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for element in value:
            yield from _leaves(element)
    elif value is not None:
        yield value


def _check_text(flag: str, value: str | Path, is_path: bool) -> None:
    try:
        str(value).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{flag} {_shown(str(value))} is not valid Unicode text; give it in UTF-8") from error
    if is_path:
        check_path(f"{flag} ", value)


def _shown(value: Any) -> str:
    """A value for a message, in at most sixty characters."""
    try:
        text = repr(value) if isinstance(value, str | Path) else str(value)
    except ValueError:  # an integer of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _plain(number: int | float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)
