"""Limits for chat templates. Templates are programs that come with a model's files; one that does not terminate is refused.

    text = render(tokenizer, messages, add_generation_prompt=True)

transformers renders a template in a sandbox. The sandbox protects the machine, but does not stop a template from running
forever or filling the memory. So a template first runs here, in a sandbox of the same kind, with a budget that pays for
everything that takes time or memory: each pass of a loop, each call of a macro, function, filter or operator, and the
characters that these read and write. If the budget suffices, transformers renders the template, which takes as much work again.
The size of an operation's result is computed before the operation: `'x' * 10**12` is refused without being tried.

The budget is at least ten times what templates of real models need, and grows with the text of the chat.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    import transformers

MOST_TEMPLATE = 2**18  # characters of a template
# Units for any text, and per character of template and chat: templates of image models loop over each character.
_BUDGET, _OF_TEXT = 2**22, 512
_STEP, _MACRO = 64, 1024  # units of a step and of a macro call, in addition to one per character that it reads or writes
_OUTPUT, _OUTPUT_OF_TEXT = 2**20, 16  # characters of output, for any text and per character of the chat

# Names whose time and memory are proportional to their input. Others cost the square.
_LINEAR = frozenset(
    "abs attr bool boolean callable capitalize casefold copy count d default defined dict dictsort divisibleby e "
    "endswith eq escape even false filter find first float forceescape get groupby gt ge index in int integer "
    "isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper "
    "items iterable joiner keys last le length list lower lstrip lt map mapping max min namespace ne next none "
    "number odd partition raise_exception random range reject rejectattr removeprefix removesuffix reverse rfind "
    "rindex round rpartition rsplit rstrip safe safe_range sameas select selectattr sequence sort split splitlines "
    "startswith strftime_now string strip swapcase test title trim true truncate undefined unique upper values "
    "cycle cycler".split()
)


class TooMuch(Exception):
    """A template exceeds its budget."""


def render(
    tokenizer: "transformers.PreTrainedTokenizerFast",
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    **how: Any,
) -> str:
    """Render a chat with the tokenizer's template or with `template`; `how` is passed to transformers' `apply_chat_template`.

    Raises:
        TooMuch: The template exceeds its budget.
        Exception: Whatever the template raises.
    """
    chosen: Any = tokenizer.get_chat_template() if template is None else template
    if not isinstance(chosen, str):
        raise TooMuch(f"it must be a text, got {type(chosen).__name__}")
    unseen = ("tokenize", "continue_final_message")
    seen = {name: value for name, value in how.items() if name not in unseen}
    check(chosen, messages, **{"add_generation_prompt": False, **tokenizer.special_tokens_map, **seen})
    return str(
        tokenizer.apply_chat_template([dict(message) for message in messages], chat_template=chosen, tokenize=False, **how)
    )


def check(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Run a template within its budget and return its output. Raises TooMuch, or what the template raises."""
    if len(template) > MOST_TEMPLATE:
        raise TooMuch(f"it has {len(template):,} characters, more than {MOST_TEMPLATE:,}")
    budget = _Budget(len(template))
    budget.left += _OF_TEXT * min(size_of([list(messages), variables]), 2**40)
    room = _OUTPUT + _OUTPUT_OF_TEXT * size_of([template, list(messages), variables])
    written: list[str] = []
    try:
        environment, compiled = _compiled(template)
        environment.budget = budget
        for part in compiled.generate(**{"tools": None, "documents": None, **variables, "messages": messages}):
            written.append(part)
            room -= len(part)
            if room < 0:
                raise TooMuch("its output is far longer than the chat")
    except (RecursionError, MemoryError) as error:
        raise TooMuch("it recurses without end, or nests too deeply") from error
    return "".join(written)


class _Budget:
    """The units that are left."""

    def __init__(self, characters: int = 0):
        self.left = _BUDGET + _OF_TEXT * characters

    def spend(self, units: int) -> None:
        self.left -= units + _STEP
        if self.left < 0:
            raise TooMuch("it takes more steps, or longer texts, than a template needs")


def size_of(value: Any) -> int:
    """The characters of a text, the bytes of a whole number, or the sum over a list or mapping; repeated parts count again."""
    return _size(value, {})


def _size(value: Any, known: dict[int, int]) -> int:
    if isinstance(value, str | bytes | range):
        return len(value)
    if isinstance(value, int):
        return 1 + value.bit_length() // 8
    if isinstance(value, Mapping):
        parts: Iterable[Any] = (part for item in value.items() for part in item)
    elif isinstance(value, list | tuple | set | frozenset) or type(value).__name__ in (
        "dict_items",
        "dict_keys",
        "dict_values",
    ):
        parts = value
    else:
        return 1
    if id(value) not in known:
        known[id(value)] = 0  # for a value that contains itself
        known[id(value)] = min(2**64, 1 + sum(_size(part, known) for part in parts))
    return known[id(value)]


def _cost(name: str, values: Sequence[Any]) -> int:
    """An upper bound of the time and memory of a filter, function or method, in units. A method's text is the first value."""
    sizes = [size_of(value) for value in values]
    whole, numbers = sum(sizes), [abs(value) for value in values if isinstance(value, int) and not isinstance(value, bool)]
    largest = max(numbers, default=0)
    if name in _LINEAR:
        return whole
    if name == "replace" and all(isinstance(value, str) for value in values[:3]) and len(values) > 2:
        text, old, new = values[:3]
        return whole + text.count(old) * len(new)
    if name == "join":
        items, between = sorted(values, key=lambda value: isinstance(value, str))[:2] if len(values) > 1 else (values[0], "")
        return whole + (len(items) if hasattr(items, "__len__") else 0) * size_of(between)
    if name in ("center", "ljust", "rjust", "zfill"):
        return whole + largest
    if name in ("indent", "tojson", "expandtabs"):
        return whole * (1 + max([8, largest, *(len(value) for value in values[1:] if isinstance(value, str))]))
    if name in ("format", "format_map", "%"):
        widths = [int(digits[:30]) for digits in re.findall(r"\d+", values[0])] if isinstance(values[0], str) else []
        fields = values[0].count("{") + values[0].count("%") if isinstance(values[0], str) else 1
        return whole * (1 + fields) + sum(widths) + (fields * _largest(values[1:]) if set("*{") & set(values[0]) else 0)
    return (whole + largest) ** 2


def _largest(value: Any) -> int:
    """The largest whole number in lists and mappings."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return max(map(_largest, value), default=0)
    return abs(value) if isinstance(value, int) else 0


def _cost_of_operator(operator: str, left: Any, right: Any) -> int:
    whole = size_of(left) + size_of(right)
    if operator == "*":
        if isinstance(left, int) and isinstance(right, int):
            return whole
        return max(
            size_of(left) * right if isinstance(right, int) else 0, size_of(right) * left if isinstance(left, int) else 0
        )
    if operator == "**":
        return whole * (1 + abs(right)) if isinstance(right, int) else whole
    if operator == "%" and isinstance(left, str):
        return _cost("%", [left, right])
    return whole


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment, with the budget charged for everything."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self):
        self.budget = _Budget(MOST_TEMPLATE)
        options = {"trim_blocks": True, "lstrip_blocks": True, "finalize": self._read}
        super().__init__(extensions=[_Generation, loopcontrols], **options)
        self.filters |= {"tojson": _tojson}
        self.filters = {name: self._paid(name, function) for name, function in self.filters.items()}
        self.tests = {name: self._paid(name, function) for name, function in self.tests.items()}
        self.filters |= {
            "_spend": self._spend,
            "_read": self._in_context(self._read),
            "_joined": self._in_context(self._joined),
        }
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
            "lipsum": _lipsum,
        }

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.spend(_cost_of_operator(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        bound = getattr(function, "__wrapped__", function)
        receiver = getattr(bound, "__self__", None)
        own = [receiver] if isinstance(receiver, str | bytes | list | tuple | Mapping) else []
        values = [*own, *args, *kwargs.values()]
        ours = isinstance(function, Macro | LoopContext | _Dict) or function in (_Namespace, dict)
        name = "namespace" if ours else getattr(function, "__name__", type(function).__name__.lower())
        self.budget.spend((_cost(name, values) if values else 1) + _MACRO * isinstance(function, Macro))
        return super().call(context, function, *args, **kwargs)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, str | int):
            self.budget.spend(size_of(argument))
        return super().getitem(obj, argument)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Paid().visit(source), *args, **kwargs)

    def _paid(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter or test that is charged for its cost; a generator's values are charged one by one."""

        @functools.wraps(function)
        def paid(*args: Any, **kwargs: Any) -> Any:
            values = [
                value for value in (*args, *kwargs.values()) if not isinstance(value, Context | EvalContext | _Environment)
            ]
            self.budget.spend(_cost(name, values) if values else 1)
            made = function(*args, **kwargs)
            return self._one_by_one(made) if isinstance(made, GeneratorType) else made

        return paid

    def _one_by_one(self, made: Iterator[Any]) -> Iterator[Any]:
        for value in made:
            self.budget.spend(size_of(value))
            yield value

    def _read(self, value: Any) -> Any:
        self.budget.spend(size_of(value))
        return value

    def _joined(self, values: Sequence[Any]) -> str:
        self.budget.spend(size_of(values))
        return "".join(map(str, values))

    @property
    def _spend(self) -> Callable[[Context, int], bool]:
        @pass_context
        def spend(context: Context, units: int) -> bool:
            self.budget.spend(units)
            return True

        return spend

    def _in_context(self, function: Callable[[Any], Any]) -> Callable[[Context, Any], Any]:
        """The function as a filter that is never evaluated while a template is compiled."""

        @pass_context
        def in_context(context: Context, value: Any) -> Any:
            return function(value)

        return in_context


class _Paid(NodeTransformer):
    """Add the costs to the template's program: those of a body each time it runs, and those that no hook sees."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        node = self._body(node)
        if node.test is not None:
            node.test = nodes.And(_spent(_count(node.test)), node.test)
        return node

    def _body(self, node: Any) -> Any:
        cost = sum(map(_count, node.body))
        self.generic_visit(node)
        node.body = [nodes.ExprStmt(_spent(cost)), *node.body]
        return node

    visit_Macro = visit_CallBlock = visit_Block = _body

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_joined")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _filter(node.expr, "_read")
        for operand in node.ops:
            operand.expr = _filter(operand.expr, "_read")
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        node.key = _filter(node.key, "_read")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_read") if isinstance(node.arg, nodes.Slice) else node


def _filter(value: Any, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _spent(units: int) -> nodes.Filter:
    return _filter(nodes.Const(units, lineno=1), "_spend")


def _count(node: nodes.Node) -> int:
    """The number of nodes of a part of the program, plus the characters of text in it."""
    own = len(node.data) if isinstance(node, nodes.TemplateData) else 1
    return own + sum(map(_count, node.iter_child_nodes()))


class _Generation(Extension):
    """transformers' `{% generation %}`, which marks the assistant's text and does not change it."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Dict:
    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """transformers' version rejects names that begin with an underscore; it does so when it renders."""


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _lipsum(*args: Any, **kwargs: Any) -> str:
    raise TooMuch("it asks for filler text (lipsum)")


@lru_cache(maxsize=8)
def _compiled(template: str) -> tuple[_Environment, Any]:
    environment = _Environment()
    return environment, environment.from_string(template)
