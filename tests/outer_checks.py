"""jaxtyping and beartype check functions and classes of lpes_jax while tests run, but no functions inside functions.

Those are made anew at each call, and beartype would compile their checks anew each time: an eighth of the time of a search.
"""

from collections.abc import Callable
from typing import Any

import jaxtyping

_checked = jaxtyping.jaxtyped


def _jaxtyped(*arguments: Any, **named: Any) -> Any:
    decorate = _checked(*arguments, **named)
    return decorate if arguments else _unless_inside(decorate)


def _unless_inside(decorate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda decorated: decorated if "<locals>" in getattr(decorated, "__qualname__", "") else decorate(decorated)


jaxtyping.jaxtyped = _jaxtyped
