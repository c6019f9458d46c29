"""Jinja for templates that nobody vouches for: whatever one does, it ends soon, in little memory, or with an error.

Jinja's own sandbox keeps a template from the attributes it may not have. Here its work is bounded too:

- Every operation is paid for out of a budget of steps, by what it reads and what it makes; turns of loops and calls
  of macros by the length of their bodies. The syntax tree is changed so that operations that Jinja has no hook for
  go through filters of ours, whose names no template can write.
- An operation whose result may be larger than its operands is refused before it makes a result that is too large.
- Filters, methods and types of values are closed lists, so that the size of every value can be told.
"""

from __future__ import annotations

import datetime
import functools
import json
import operator
import re
import string
import sys
import types
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from itertools import chain
from typing import Any

import jinja2
import jinja2.defaults
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

MAX_SOURCE = 50_000  # characters, twice what the longest templates have: so many take up to two seconds to compile
_BYTES_A_STEP = 256
_NODES_A_STEP = 4
_MAX_DEPTH = 100
_MAX_ITEMS = 100_000  # of a range, as in Jinja's own sandbox, or of a string that is taken apart
_MAX_SEARCHED = 64  # characters; where Python compares every one of them at every place
_METER = "meter of the render"  # a variable no template can name


class TemplateLimitError(Exception):
    """A template asked for more than it may take."""


class Meter:
    """What one render may still take.

    Args:
      steps: how many; a step is an operation, or a part of one that handles much.
      largest: bytes of the largest value, and of all output.
    """

    def __init__(self, steps: int, largest: int):
        self.largest = largest
        self._steps = steps
        self._output = 0
        # Of each container its size and depth; the container itself keeps its id from being used again. Containers
        # do not change: the sandbox is an immutable one.
        self._measured: dict[int, tuple[Any, int, int]] = {}

    def spend(self, steps: int) -> None:
        self._steps -= abs(steps) + 1
        if self._steps < 0:
            raise TemplateLimitError("it takes too many steps")

    def read(self, *values: Any) -> None:
        """Pays for an operation that may look at all that is in its operands."""
        self.spend(sum(map(self.size, values)) // _BYTES_A_STEP)

    def fits(self, size: int) -> None:
        if size > self.largest:
            raise TemplateLimitError(f"it makes a value of up to {size} bytes, over {self.largest}")

    def made[T](self, value: T) -> T:
        """Pays for a value that an operation has made."""
        size = self.size(value)
        self.fits(size)
        if isinstance(value, int) and value.bit_length() > 64:
            raise TemplateLimitError("it makes a number of over 64 bits")
        self.spend(size // _BYTES_A_STEP)
        return value

    def materialized(self, items: Iterator[Any]) -> Iterator[Any]:
        """The items of a lazy iterator, made now: a chain of such iterators would be as long as a template likes."""
        made = []
        for item in items:
            self.spend(0)
            made.append(item)
        self.made(made)
        again = iter(made)
        self._measured[id(again)] = (again, *self.measure(made))
        return again

    def put_out(self, size: int) -> None:
        self._output += size
        self.spend(size // _BYTES_A_STEP)
        if self._output > self.largest:
            raise TemplateLimitError(f"its output is over {self.largest} characters")

    def size(self, value: Any) -> int:
        """Bytes of a value, each part counted as often as it would be written out."""
        return self.measure(value)[0]

    def measure(self, value: Any) -> tuple[int, int]:
        """Its size, and how deep it is nested."""
        if value is None or isinstance(value, (str, int, float)):
            return sys.getsizeof(value), 0
        if isinstance(value, range):
            return 64 + 8 * len(value), 1
        if (known := self._measured.get(id(value))) is not None:
            return known[1:]
        parts = _parts(value)
        if parts is None:
            if not isinstance(value, _OPAQUE):
                raise TemplateLimitError(f"it makes a {type(value).__name__}")
            return 64, 0
        size, depth, count = 64, 0, 0
        for part in parts:
            part_size, part_depth = self.measure(part)
            size, depth, count = size + 8 + part_size, max(depth, part_depth), count + 1
        if depth >= _MAX_DEPTH:
            raise TemplateLimitError(f"it nests values over {_MAX_DEPTH} deep")
        self.spend(count // 2)
        self._measured[id(value)] = (value, size, depth + 1)
        return size, depth + 1


class _Namespace(jinja2.utils.Namespace):
    def __repr__(self) -> str:  # Jinja's writes out all that is in it, namespaces too
        return "<namespace>"


# What has no parts that could be written out.
_OPAQUE = (
    *(jinja2.runtime.Undefined, jinja2.runtime.Macro, jinja2.runtime.LoopContext, jinja2.runtime.BlockReference),
    *(jinja2.runtime.TemplateReference, jinja2.utils.Cycler, jinja2.utils.Joiner, _Namespace),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, type),
)


def _parts(value: Any) -> Iterable[Any] | None:
    if isinstance(value, (list, tuple, KeysView, ValuesView)):
        return value
    if isinstance(value, ItemsView):
        return chain.from_iterable(value)
    if isinstance(value, dict):
        return chain(value, value.values())
    return None


# ---- How large a result may be: (meter, operands as the operation has them) -> bytes. Few are larger than the
# operands: those of all other operations are measured once they are made.


def _wide(meter: Meter, value: Any, width: int = 80, *more: Any) -> int:
    return meter.size(value) + 4 * max(width, 0)


def _replaced(meter: Meter, text: Any, old: str, new: str, count: int | None = None) -> int:
    return meter.size(text) + str(text).count(old) * meter.size(new)


def _joined(meter: Meter, items: Any, separator: Any = "", attribute: Any = None) -> int:
    _check_items(items)
    return meter.size(items) + operator.length_hint(items) * meter.size(separator)


def _indented(meter: Meter, text: Any, width: Any = 4, *more: Any, **options: Any) -> int:
    if not isinstance(text, str):
        raise TypeError("indent takes a text")  # Jinja's own adds a line to a list in place
    return _lines(meter, text) + sum(map(text.count, _LINE_ENDS), 2) * _width(width)


def _as_json(
    meter: Meter,
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> int:
    size, depth = meter.measure(value)
    return size + size // 8 * (depth * _width(indent or 0) + sum(map(len, separators or ())))


def _percent(meter: Meter, format: Any, *args: Any, **kwargs: Any) -> int:
    """Of `%`; every field could hold all arguments."""
    text, values = str(format), (*args, *kwargs.values())
    if _WIDE_FIELD.search(text):
        raise TemplateLimitError(_TOO_WIDE)
    given = chain(values, *(value for value in values if isinstance(value, tuple)))
    if _STAR.search(text) and any(isinstance(value, int) and abs(value) > _MAX_FIELD for value in given):
        raise TemplateLimitError(_TOO_WIDE)
    return meter.size(text) + text.count("%") * sum(map(meter.size, values))


def _formatted(meter: Meter, format: str, *args: Any, **kwargs: Any) -> int:
    """Of `str.format`, likewise."""
    fields = 0
    for _, name, spec, _ in string.Formatter().parse(format):
        fields += name is not None
        if "{" in (spec or "") or any(int(number) > _MAX_FIELD for number in re.findall(r"\d{1,9}", spec or "")):
            raise TemplateLimitError(_TOO_WIDE)
    return meter.size(format) + fields * sum(map(meter.size, (*args, *kwargs.values())))


_MAX_FIELD = 9999
_TOO_WIDE = f"it formats a field of over {_MAX_FIELD} characters, or of a width that is computed"
# Where a width or a precision may stand before a conversion: a number; a star, which takes it from the arguments.
_WIDE_FIELD, _STAR = (
    re.compile(rf"(?<=[%.+\-# 0)]){width}(?=[.hlLdiouxXeEfFgGcrsa%])") for width in (r"\d{5,}", r"\*")
)


def _batched(meter: Meter, value: Any, count: int, *more: Any, **options: Any) -> int:
    return 2 * meter.size(value) + 64 * max(count, 0)


def _summed(meter: Meter, value: Any, attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, (int, float)):
        raise TemplateLimitError("it sums up what are no numbers")  # sums of lists take a time that grows as squares
    return 0


def _rounded(meter: Meter, value: Any, precision: int = 0, method: str = "common") -> int:
    if abs(precision) > 300:
        raise TemplateLimitError("it rounds to over 300 places")
    return 0


def _split(meter: Meter, text: str, separator: str | None = None, maxsplit: int = -1) -> int:
    pieces = sum(map(text.count, _WHITESPACE)) if separator is None else text.count(separator)
    return meter.size(text) + 64 * (min(pieces, maxsplit) if maxsplit >= 0 else pieces)


def _split_from_the_end(meter: Meter, text: str, separator: str | None = None, maxsplit: int = -1) -> int:
    _search_backwards(meter, text, separator or "")
    return _split(meter, text, separator, maxsplit)


def _search_backwards(meter: Meter, text: str, wanted: str, *more: Any) -> int:
    _check_searched(wanted)
    meter.spend(len(text) * len(wanted) // _BYTES_A_STEP)
    return 0


def _stripped(meter: Meter, text: Any, characters: str | None = None) -> int:
    _check_searched(characters or "")
    return 0


def _lines(meter: Meter, text: str, *more: Any, **options: Any) -> int:
    return meter.size(text) + 64 * sum(map(text.count, _LINE_ENDS))


def _words(meter: Meter, text: Any) -> int:
    return 32 * len(str(text))


_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_WHITESPACE = [char for char in map(chr, range(0x3001)) if char.isspace()]


def _width(indent: Any) -> int:
    return len(indent) if isinstance(indent, str) else max(indent, 0)


def _check_searched(wanted: str) -> None:
    if len(wanted) > _MAX_SEARCHED:
        raise TemplateLimitError(f"it looks for over {_MAX_SEARCHED} characters from the end, or strips so many")


def _check_items(value: Any) -> None:
    if isinstance(value, str) and len(value) > _MAX_ITEMS:
        raise TemplateLimitError(f"it takes a text of over {_MAX_ITEMS} characters apart")


type _Room = Callable[..., int]

_TEXT_METHODS: dict[str, _Room | None] = {
    **dict.fromkeys(("capitalize", "casefold", "count", "endswith", "find", "index", "lower", "partition")),
    **dict.fromkeys(("removeprefix", "removesuffix", "startswith", "swapcase", "title", "upper")),
    **dict.fromkeys(("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric")),
    **dict.fromkeys(("isprintable", "isspace", "istitle", "isupper")),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _wide),
    **dict.fromkeys(("rfind", "rindex", "rpartition"), _search_backwards),
    **dict.fromkeys(("strip", "lstrip", "rstrip"), _stripped),
    **dict.fromkeys(("format", "format_map"), _formatted),
    "join": lambda meter, separator, items: _joined(meter, items, separator),
    "replace": _replaced,
    "rsplit": _split_from_the_end,
    "split": _split,
    "splitlines": _lines,
}
_METHODS: dict[type, dict[str, _Room | None]] = {
    str: _TEXT_METHODS,
    dict: dict.fromkeys(("get", "items", "keys", "values", "copy")),
    list: dict.fromkeys(("count", "index", "copy")),
    tuple: dict.fromkeys(("count", "index")),
    range: {},
    int: {},
    float: {},
    type({}.items()): {},
    type({}.keys()): {},
    type({}.values()): {},
    type(iter([])): {},
}
_FILTERS: dict[str, _Room | None] = {
    **dict.fromkeys(("abs", "attr", "capitalize", "d", "default", "e", "escape", "first", "float", "forceescape")),
    **dict.fromkeys(("int", "items", "last", "length", "count", "lower", "safe", "string", "title", "upper")),
    **dict.fromkeys(("truncate", "dictsort")),
    "batch": _batched,
    "center": _wide,
    "format": _percent,
    "indent": _indented,
    "join": _joined,
    "replace": _replaced,
    "round": _rounded,
    "slice": _batched,
    "sum": _summed,
    "tojson": _as_json,
    "trim": _stripped,
    "wordcount": _words,
}
# These take their first operand apart, and look things up in what they find by the other operands.
_TAKING_APART: tuple[str, ...] = (
    "groupby",
    "list",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "reverse",
    "select",
    "selectattr",
)
_TAKING_APART += ("sort", "unique")
_FILTERS |= dict.fromkeys(_TAKING_APART)
# These look at no more than the outside of their operand.
_SHALLOW: tuple[str, ...] = (
    "attr",
    "count",
    "d",
    "default",
    "first",
    "last",
    "length",
    "boolean",
    "callable",
    "defined",
    "filter",
)
_SHALLOW += ("false", "float", "integer", "iterable", "mapping", "none", "number", "sameas", "sequence", "string")
_SHALLOW += ("test", "true", "undefined")


def _meter(context: jinja2.runtime.Context) -> Meter:
    return context.parent[_METER]  # not what a template may have set


def _metered(name: str, function: Callable[..., Any], room: _Room | None = None) -> Callable[..., Any]:
    """A filter or test that pays for what it does."""
    wants = getattr(function, "jinja_pass_arg", None)  # as Jinja's decorators leave it

    @jinja2.pass_context
    def metered(context: jinja2.runtime.Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        meter.spend(2)  # it costs as much as a few others
        if name not in _SHALLOW:
            meter.read(value, *args, *kwargs.values())
        if name in _TAKING_APART:
            _check_items(value)
            if any(isinstance(arg, str) and len(arg) > 1000 for arg in (*args, *kwargs.values())):
                raise TemplateLimitError(f"it gives {name} a name of over 1000 characters")
        if room:
            meter.fits(room(meter, value, *args, **kwargs))
        given = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        lead = (given[wants.name],) if wants else ()
        result = function(*lead, value, *args, **kwargs)
        return meter.materialized(result) if isinstance(result, Iterator) else meter.made(result)

    return metered


# ---- Operations of the syntax tree, as filters


@jinja2.pass_context
def _turn(context: jinja2.runtime.Context, steps: int, characters: int) -> bool:
    """Pays for the body of a loop, a macro or a block, and for the text in it."""
    meter = _meter(context)
    meter.spend(steps)
    meter.put_out(characters)
    return True


@jinja2.pass_context
def _read(context: jinja2.runtime.Context, value: Any) -> Any:
    _meter(context).read(value)
    return value


@jinja2.pass_context
def _made(context: jinja2.runtime.Context, value: Any) -> Any:
    return _meter(context).made(value)


@jinja2.pass_context
def _concatenated(context: jinja2.runtime.Context, items: list[Any]) -> str:
    meter = _meter(context)
    meter.fits(meter.size(items))
    join = jinja2.runtime.markup_join if context.eval_ctx.autoescape else jinja2.runtime.str_join
    return meter.made(join(items))


@jinja2.pass_context
def _spread(context: jinja2.runtime.Context, args: Any) -> Any:
    """What stands for several arguments."""
    if isinstance(args, str):
        raise TemplateLimitError("it takes a text apart for arguments")
    return args


@jinja2.pass_context
def _put_out(context: jinja2.runtime.Context, value: Any) -> Any:
    meter = _meter(context)
    meter.put_out(meter.size(value))
    return value


_OPERATIONS = {f"the operation {f.__name__}": f for f in (_turn, _read, _made, _concatenated, _spread)}


def _operation(function: Callable[..., Any], node: jinja2.nodes.Expr, *args: int) -> jinja2.nodes.Filter:
    consts: list[jinja2.nodes.Expr] = [jinja2.nodes.Const(arg) for arg in args]
    name = f"the operation {function.__name__}"
    return jinja2.nodes.Filter(node, name, consts, [], None, None, lineno=node.lineno)


class _Metering(jinja2.visitor.NodeTransformer):
    """Puts the operations above into a template's syntax tree."""

    def _pay(self, node: Any) -> jinja2.nodes.Filter:
        inside = list(node.find_all(jinja2.nodes.Node))
        text = sum(len(each.data) for each in inside if isinstance(each, jinja2.nodes.TemplateData))
        cost = jinja2.nodes.Const(len(inside) // _NODES_A_STEP, lineno=node.lineno)
        return _operation(_turn, cost, 4 * text)

    def _with_body(self, node: Any) -> jinja2.nodes.Node:
        pay = self._pay(node)
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(pay, lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _with_body

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        if node.test is not None:
            pay = self._pay(node.test)
            self._with_body(node)
            node.test = jinja2.nodes.And(pay, node.test, lineno=node.lineno)
            return node
        return self._with_body(node)

    def _literal(self, node: Any) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _operation(_made, node) if getattr(node, "ctx", "load") == "load" else node

    visit_List = visit_Tuple = visit_Dict = _literal

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _operation(_concatenated, jinja2.nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:
        self.generic_visit(node)
        holders: list[Any] = [node, *node.ops]
        for holder in holders:
            if not isinstance(holder.expr, jinja2.nodes.Const):
                holder.expr = _operation(_read, holder.expr)
        return node

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _operation(_made, node) if isinstance(node.arg, jinja2.nodes.Slice) else node

    def _with_arguments(self, node: Any) -> jinja2.nodes.Node:
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = _operation(_spread, node.dyn_args)
        return node

    visit_Call = visit_Filter = visit_Test = _with_arguments


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(jinja2.sandbox.SandboxedEnvironment.default_binop_table)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = _Metering().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, methods in _METHODS.items():
            if isinstance(obj, kind):
                return attr in methods
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context, __obj, *args, **kwargs):  # noqa: N805  (a template's arguments may be named anything)
        meter = _meter(__context)
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        if isinstance(method, types.BuiltinMethodType):
            owner = method.__self__
            options = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
            meter.read(owner, *args, *options.values())
            if isinstance(owner, str) and (room := _TEXT_METHODS[method.__name__]):
                meter.fits(room(meter, owner, *args, **options))
        else:
            meter.spend(0)
        return meter.made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter(context)
        meter.read(left, right)
        if isinstance(left, int) and isinstance(right, int):
            meter.made(left), meter.made(right)
            if operator == "**" and abs(right) * left.bit_length() > 64:
                raise TemplateLimitError("it takes too large a power")
        elif operator == "%" and isinstance(left, str):
            meter.fits(_percent(meter, left, right))
        elif operator == "*":
            for times, repeated in ((left, right), (right, left)):
                sized = not isinstance(repeated, (int, float))
                if sized and isinstance(times, int) and times * meter.size(repeated) > meter.largest:
                    raise TemplateLimitError("it repeats a value too often")
        return meter.made(super().call_binop(context, operator, left, right))


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, by which templates mark the model's own words for training: here, just its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _range(*args: int) -> range:
    # Numbers within 2**53 are their own hashes: equal hashes of unequal numbers make sets as slow as lists.
    if any(abs(arg) > 1 << 53 for arg in args):
        raise OverflowError("range over 2**53")
    return jinja2.sandbox.safe_range(*args)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > 256 or re.search(r"%[^a-zA-Z%]*\d", format):  # the C library takes widths
        raise TemplateLimitError("it formats the time at too great a length")
    return datetime.datetime.now().strftime(format)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, finalize=_put_out, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    filters: dict[str, Callable[..., Any]] = {**jinja2.filters.FILTERS, "tojson": _to_json}
    environment.filters = {name: _metered(name, filters[name], room) for name, room in _FILTERS.items()} | _OPERATIONS
    tests: Any = environment.tests
    environment.tests = {name: _metered(name, test) for name, test in tests.items()}
    environment.globals = {
        **{"range": _range, "dict": dict, "namespace": _Namespace},
        **{"cycler": jinja2.utils.Cycler, "joiner": jinja2.utils.Joiner},
        **{"raise_exception": _raise_exception, "strftime_now": _strftime_now},
    }
    return environment


class Sandbox:
    """A compiled template.

    Raises:
      TemplateLimitError: the source is too long; whatever Jinja and Python raise where it is no template.
    """

    def __init__(self, source: str):
        if len(source) > MAX_SOURCE:
            raise TemplateLimitError(f"it has {len(source)} characters, over {MAX_SOURCE}")
        self._template = _environment().from_string(source)

    def render(self, variables: Mapping[str, Any], *, steps: int, largest: int) -> str:
        """The template's text; it may raise anything.

        Args:
          steps, largest: as `Meter`, but for what the variables allow: to handle each of their bytes some 64 times,
            and to write each four times.
        """
        size = Meter(sys.maxsize, sys.maxsize).size(dict(variables))
        meter = Meter(steps + size // 4, largest + 4 * size)
        return "".join(self._template.generate({**variables, _METER: meter}))
