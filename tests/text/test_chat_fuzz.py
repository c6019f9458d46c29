# ruff: noqa: E501  (templates read best in one line)
"""Hostile chat templates: each ends soon, in little memory, with an error of ours or a text, and harms nothing.

The property and what it runs over stand in TEMPLATE_FUZZ, for scripts/fuzz.py to run for longer.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.errors import CheckpointError, InvalidArgumentError
from jaxinfer.text import chat, sandbox
from jaxinfer.text.chat import ChatTemplate

# Of the code that Jinja makes of nonsense.
pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")

MESSAGES = [{"role": "user", "content": "hello <|im_end|>\nworld"}, {"role": "assistant", "content": "é" * 50}]
SECONDS = 3.0  # of the processor; a quiet one takes half of that at most
BYTES = 64 << 20


def run(source: str) -> str | None:
    """The text, or None after an error of ours."""
    try:
        return ChatTemplate(source).render(MESSAGES, tools=[{"name": "f", "parameters": {"a": [1, 2.5, None]}}])
    except (CheckpointError, InvalidArgumentError) as error:
        message = str(error)
    assert len(message) < 2000
    return None


def peak_bytes() -> int:
    """The most memory the process has held so far: what one template takes beyond all before it shows."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def check_template(source: str, seconds: float = SECONDS) -> str | None:
    """Time by the thread's own clock: what else the machine does is not the template's, nor is others' garbage."""
    gc.disable()  # after many tests of engines one collection takes seconds
    try:
        before, start = peak_bytes(), time.thread_time()
        text = run(source)
        taken = time.thread_time() - start
    finally:
        gc.enable()
    assert taken < seconds, source
    assert peak_bytes() - before < BYTES, source
    return text


NS = "{% set ns = namespace(x=XX) %}{% for i in range(99) %}{% set ns.x = YY %}{% endfor %}{{ ns.x }}"
LOOP = "{% for i in range(99999) %}XX{% endfor %}"


def doubling(first: str, then: str) -> str:
    return NS.replace("XX", first).replace("YY", then)


def loop(body: str) -> str:
    return LOOP.replace("XX", body)


BOUNDED = {
    "loops": loop(loop("")),
    "loops with a filter": loop("{% for j in range(99999) if j < 0 %}{% endfor %}"),
    "a long body": loop("{% if a %}{% endif %}" * 2000),
    "a body of text": loop("x" * 40_000),
    "a recursive loop": "{% for x in [1] recursive %}{% if loop.depth < 3 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "macros of text": "{% macro f() %}" + "x" * 40_000 + "{% endmacro %}" + loop("{% set y = f() %}"),
    "calls": "{% macro f() %}{{ caller() }}{% endmacro %}" + loop("{% call f() %}" + loop("x") + "{% endcall %}"),
    "blocks": "{% block a %}" + loop("{{ self.b() }}") + "{% endblock %}{% block b %}" + loop("x") + "{% endblock %}",
    "filters": loop(loop("{{ 'x' | upper | lower | title }}")),
    "a counter of its own": "{% set __steps = cycler(1) %}" + loop(loop("")),
    "payment taken back": loop(loop("{{ [0] | map('the operation _turn', 0 - 10 ** 15) | list }}")),
    "~": doubling("'a'", "ns.x ~ ns.x"),
    "+": doubling("'a'", "ns.x + ns.x"),
    "join": doubling("'a'", "[ns.x, ns.x] | join"),
    "set": doubling("'a'", "yy").replace("{% set ns.x", "{% set yy %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x"),
    "lists": doubling("[]", "[ns.x, ns.x]"),
    "dicts": doubling("{}", "{'a': ns.x, 'b': ns.x}"),
    "dict()": doubling("{}", "dict(a=ns.x, b=ns.x)"),
    "views": doubling("{}", "[{'a': ns.x}.items(), {'a': ns.x}.values()]"),
    "tuples": doubling("1", "(ns.x, ns.x)"),
    "numbers": doubling("3", "ns.x * ns.x"),
    "powers": doubling("3", "ns.x ** 9"),
    "a deep list": "{% set ns = namespace(x=[]) %}" + loop("{% set ns.x = [ns.x] %}"),
    "a chain of iterators": "{% set ns = namespace(x='abc') %}" + loop("{% set ns.x = ns.x | map('upper') %}"),
    "equal hashes": "{{ range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1) | unique | list }}",
    "comparing": "{% set x = ['a' * 999] * 999 %}{% set y = ['a' * 999] * 999 %}" + loop("{% if x == y %}{% endif %}"),
    "slices": "{% set x = 'a' * 90000 %}" + loop("{% set y = x[::-1] %}"),
    "sorting": loop("{% set y = range(99999) | sort | list %}"),
    "methods": "{% set x = 'é' * 40000 %}" + loop("{% set y = x.upper().title() %}"),
    "the output": loop("{{ messages }}"),
    "pieces": "{% set x = 'a ' * 40000 %}" + loop("{% set y = x.split() %}"),
    "from the end": "{% set x = 'a' * 90000 %}" + loop("{% set y = x.rfind('b' + 'a' * 63) %}"),
}
REFUSED = {
    **{f"center {n}": text for n, text in enumerate(("'x' | center(N)", "['x'] | map('center', N) | list"))},
    **{name: f"'x'.{name}(N)" for name in ("center", "ljust", "rjust", "zfill")},
    **{f"percent {n}": text for n, text in enumerate(('"%1000000000d" % 1', '"%*d" % (N, 1)', '"%.1000000000f" % 1'))},
    "percent with a key": '"%(a(b))1000000000d" % {"a(b)": 1}',
    "percent of much": '("%s" * 9999) % (("x" * 9999,) * 9999)',
    **{f"format {n}": text for n, text in enumerate(('"%1000000000d" | format(1)', '"%*d" | format(N, 1)'))},
    **{f"str.format {n}": text for n, text in enumerate(("'{:1000000000}'.format(1)", "'{:{}}'.format(1, N)"))},
    "str.format by a text": "'{:{}}'.format(1, '1000000000')",
    "str.format by an item": "'{0:{1[a]}}'.format(1, {'a': N})",
    "str.format of much": "('{0}' * 9999).format('x' * 9999)",
    "str.format with a fill": "'{:x<1000000000}'.format(1)",
    "other digits": "'{:１００００００００}'.format(1)",
    "format_map": "'{a:{b}}'.format_map({'a': 1, 'b': N})",
    "indent": "'x\ny' | indent(N)",
    "indent by a text": "('x\n' * 9999) | indent('y' * 9999)",
    "replace": "('x' * 9999) | replace('x', 'y' * 9999)",
    "str.replace": "('x' * 9999).replace('', 'y' * 9999)",
    "join": "range(9999) | map('string') | join('y' * 9999)",
    "str.join": "('y' * 9999).join('x' * 9999)",
    "batch": "[1] | batch(N, 'x') | list",
    "slice": "[1] | slice(N) | list",
    "tojson": "messages | tojson(indent=N)",
    "tojson by a text": "messages | tojson(indent='x' * 99999)",
    "tojson separators": "range(9999) | list | tojson(separators=('x' * 9999, ':'))",
    "sum": "[[0] * 999] * 99 | sum(start=[])",
    "round": "3.5 | round(N * N, 'ceil')",
    "round down": "3 | round(-N * N)",
    "range": "range(N)",
    "repeat": "'x' * N",
    "repeat a list": "N * [1]",
    "power": "10 ** 10 ** 10",
    "complex": "(0 - 1) ** 0.5",
    "encode": "'x'.encode()",
    "to_bytes": "(1).to_bytes(N)",
    "expandtabs": "'\t'.expandtabs(N)",
    "translate": "'a'.translate({97: 'x' * 9999})",
    "strip": "('a' * 9999).strip('b' * 99 + 'a')",
    "trim": "('a' * 9999) | trim('b' * 99 + 'a')",
    "rfind": "('a' * 9999).rfind('b' + 'a' * 99)",
    "spread": "dict(*('a' * 99999))",
    "strftime": "strftime_now('%1000000000d')",
    "strftime of much": "strftime_now('%c' * 9999)",
    "a name": "[1] | map(attribute='a.' * 9999) | list",
    "append": "messages.append(1)",
    "class": "''.__class__.x",
    "class by attr": "('' | attr('__class__')).x",
    "class by item": "''['__class__'].x",
    "class by map": "([''] | map(attribute='__class__') | first).x",
    "class by format": "'{0.__class__.x}'.format('')",
    "class by format_map": "'{a.__class__.x}'.format_map({'a': 1})",
    "mro": "dict.mro()",
    "subclasses": "dict.__subclasses__()",
    "globals": "raise_exception.__globals__.os",
    "globals of a class": "namespace.__init__.__globals__.sys",
    "the context": "self._TemplateReference__context.parent",
    "mapping": "{}.items().mapping.x",
    "code of a method": "messages[0].content.upper.__self__.x",
    "lipsum": "lipsum(99999)",
    **{name: f"'x' | {name}" for name in ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")},
}
COMPILED = {
    "nested loops": "{% for a in c %}" * 30 + "{% endfor %}" * 30,
    "a long number": "{{ 0x" + "f" * 40_000 + " }}",
    "minus": "{{ " + "-" * 40_000 + "1 }}",
    "plus": "{{ " + "1+" * 20_000 + "1 }}",
    "brackets": "{{ " + "[" * 20_000 + "]" * 20_000 + " }}",
    "attributes": "{{ a" + ".b" * 20_000 + " }}",
    "length": "{{ a }}" * 10_000,
    "a surrogate": "{{ '\ud800' }}{% for %}",
}


@pytest.mark.parametrize("name", BOUNDED)
def test_what_runs_for_long_is_ended(name: str) -> None:
    assert check_template(BOUNDED[name]) is None


@pytest.mark.parametrize("name", REFUSED)
def test_one_operation_is_refused_before_it_takes_much(name: str) -> None:
    source = "{{ " + REFUSED[name].replace("N", "(10 ** 9)") + " }}"
    assert check_template(source, seconds=1) is None


@pytest.mark.parametrize("name", COMPILED)
def test_sources_that_are_hard_to_compile(name: str) -> None:
    check_template(COMPILED[name])
    with pytest.raises(CheckpointError, match="not valid Jinja"):
        ChatTemplate(COMPILED[name])


@pytest.mark.parametrize("statement", ["include", "extends", "import"])
def test_no_other_template_is_read(statement: str) -> None:
    more = " as y" if statement == "import" else ""
    assert run(f"{{% {statement} '/etc/passwd'{more} %}}") is None


def test_no_filter_changes_the_messages() -> None:
    messages = [dict(message) for message in MESSAGES]
    for name in sandbox._FILTERS:
        for operand in ("messages", "messages[0]"):
            run_over(f"{{{{ {operand} | {name} }}}}{{{{ [{operand}] | map('{name}') | list }}}}", messages)
    assert messages == MESSAGES


def run_over(source: str, messages: list[Any]) -> None:
    with contextlib.suppress(InvalidArgumentError):
        ChatTemplate(source).render(messages)


def test_namespaces_are_not_written_out() -> None:
    source = "{% set ns = namespace() %}{% for i in range(99) %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}"
    assert run(source + "{{ ns }}{{ ns.x }}") == "<namespace><namespace>"


def test_the_message_holds_no_more_than_a_few_lines() -> None:
    with pytest.raises(InvalidArgumentError, match=r"says: x{500}\.\.\.$"):
        ChatTemplate("{{ raise_exception('x' * 9999) }}").render(MESSAGES)


def test_nothing_the_template_made_outlives_its_error() -> None:
    tracemalloc.start()
    try:
        try:
            ChatTemplate("{% set x = 'a' * 40000 * 30 %}{{ x[0].y.z }}").render(MESSAGES)
        except InvalidArgumentError as error:
            caught = error
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
        assert caught.__context__ is None
    finally:
        tracemalloc.stop()


def test_values_too_deep_are_refused() -> None:
    deep: Any = "x"
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    tokenizer = type("Stub", (), {"chat_template": "x", "special_tokens": {}})()
    with pytest.raises(InvalidArgumentError, match="nested less deeply"):
        chat.encode_chat(tokenizer, MESSAGES, tools=deep)
    assert run_with(tools=deep) is None


def run_with(**variables: Any) -> str | None:
    try:
        return ChatTemplate("{{ tools }}").render(MESSAGES, **variables)
    except InvalidArgumentError:
        return None


def test_what_templates_do_in_earnest_is_left_as_it_was() -> None:
    """Against Jinja's own environment, over what the changed syntax tree touches."""
    import jinja2

    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    sources = [
        "{{ 'a' ~ 1 ~ none ~ [1, 'b'] ~ {'k': (1, 2)} }}{{ ('<' | e) ~ '<' }}",
        "{{ [1, 2] + [3] }}{{ (1, 2) * 2 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ -7 / 2 }}{{ '%05.1f|%s' % (2.5, 'x') }}",
        "{% for a, b in [(1, 2), (3, 4)] if a > 1 %}{{ a }}{{ b }}{{ loop.index }}{% else %}none{% endfor %}",
        "{% for m in messages[::-1] %}{{ m.role }}{{ m['content'][:3] }}{% if not loop.last %},{% endif %}{% endfor %}",
        "{% macro f(a, b=[1]) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller is defined }}{% endmacro %}"
        "{{ f(1) }}{{ f(*[1, 2, 3], k=2) }}{% call f(1) %}x{% endcall %}",
        "{% set x %}a{% for i in range(3) %}{{ i }}{% endfor %}{% endset %}{{ x | upper }}{{ x | length }}",
        "{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', 'equalto', 'user') | list }}",
        "{% if messages | rejectattr('role', 'in', ['user', 'assistant']) %}true as an iterator is{% endif %}",
        "{{ '{:>5}|{0[role]}'.replace(':>5', '1:>5').format(messages[0], 7) }}{{ '{a}'.format_map({'a': 1}) }}",
        "{{ 'a\nb' | indent(2) }}{{ 'x' | center(5) }}{{ 'ab'.center(6, '*') }}{{ ' x '.strip() }}{{ 'a,b'.rsplit(',', 1) }}",
        "{{ {'b': 1, 'a': 2} | dictsort }}{{ [3, 1] | sort }}{{ [1, 2, 3] | batch(2) | list }}{{ 2.567 | round(1) }}",
        "{{ 1 < 2 <= 2 != 3 }}{{ 'a' in 'abc' }}{{ 3 not in [1, 2] }}{{ x is defined }}{{ messages is iterable }}",
        "{% for x in [[1, [2]]] recursive %}{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}{% endif %}{% endfor %}",
        "{% set ns = namespace(found=false, text='') %}{% for m in messages %}{% set ns.text = ns.text + m.role %}"
        "{% endfor %}{{ ns.text }}{{ ns.found }}{{ [1, 2] | sum }}{{ {'a': 1}.items() | list }}{{ {'a': 1} | items | list }}",
        "{% block a %}b{% endblock %}{{ self.a() }}{% filter upper %}x{{ 1 }}{% endfilter %}{{ cycler('a', 'b').next() }}",
    ]
    for source in sources:
        want = plain.from_string(source).render(messages=MESSAGES)
        assert ChatTemplate(source).render(MESSAGES) == want, source


def test_a_long_conversation_has_room() -> None:
    """A million tokens' worth in a thousand messages, by a template that looks at each text many times."""
    content = "word " * 800
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": content} for i in range(1000)]
    source = (
        "{% for m in messages %}{% set text = m.content | trim %}{% if '</think>' in text %}"
        "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}{% if text.startswith('<') %}!{% endif %}"
        "{% if (loop.index0 % 2 == 0) != (m['role'] == 'user') %}{{ raise_exception('order') }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    )
    assert len(ChatTemplate(source).render(messages)) > 3_900_000


# ---- Random templates

NAMES = st.sampled_from(
    ["messages", "m", "x", "y", "ns.x", "ns", "loop", "i", "range", "self", "tools", "f", "nothing"]
)
ATTRIBUTES = [
    "content",
    "role",
    "items",
    "upper",
    "split",
    "join",
    "format",
    "replace",
    "index",
    "__class__",
    "mro",
    "x",
]
NUMBERS = st.sampled_from(["0", "1", "2", "-1", "7", "99", "10**5", "2**40", "10**9", "2**63", "1.5", "1e308"])
TEXTS = st.sampled_from(
    ["''", "'a'", "'{}'", "'{:{}}'", "'%s%*d'", "'a b\n'", "'__class__'", "'upper'", "'\U0001f336'"]
)
OPERATORS = st.sampled_from(["+", "-", "*", "**", "/", "//", "%", "~", "==", "<", "in", "and", "or"])
FILTERS = [*sandbox._FILTERS, "pprint", "the operation _turn"]
METHODS = [*sandbox._TEXT_METHODS, "encode", "get", "items", "keys", "copy", "append"]


def expressions(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    args = st.lists(inner, max_size=3).map(", ".join)
    return st.one_of(
        st.builds("({} {} {})".format, inner, OPERATORS, inner),
        st.builds("({} {} {})".format, inner, OPERATORS, inner),
        st.builds("({} | {}({}))".format, inner, st.sampled_from(FILTERS), args),
        st.builds("({} | {})".format, inner, st.sampled_from(FILTERS)),
        st.builds("{}.{}({})".format, inner, st.sampled_from(METHODS), args),
        st.builds("{}.{}".format, inner, st.sampled_from(ATTRIBUTES)),
        st.builds("{}[{}]".format, inner, inner),
        st.builds("{}[{}:{}]".format, inner, inner, inner),
        st.builds("{}({})".format, NAMES, args),
        st.builds("f(*{})".format, inner),
        st.builds("[{}]".format, args),
        st.builds("({}, {})".format, inner, inner),
        st.builds("{{'a': {}, 'b': {}}}".format, inner, inner),
        st.builds("range({})".format, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("({} is {})".format, inner, st.sampled_from(["defined", "none", "string", "iterable", "odd"])),
    )


EXPRESSIONS = st.recursive(NAMES | NUMBERS | TEXTS, expressions, max_leaves=8)


def statements(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    body = st.lists(inner, max_size=3).map("".join)
    return st.one_of(
        st.builds("{{% for i in {} %}}{}{{% endfor %}}".format, EXPRESSIONS, body),
        st.builds("{{% for i in range(99999) %}}{}{{% endfor %}}".format, body),
        st.builds(
            "{{% for i in {} recursive %}}{}{{{{ loop({}) }}}}{{% endfor %}}".format, EXPRESSIONS, body, EXPRESSIONS
        ),
        st.builds("{{% for i in {} if {} %}}{}{{% endfor %}}".format, EXPRESSIONS, EXPRESSIONS, body),
        st.builds("{{% if {} %}}{}{{% else %}}{}{{% endif %}}".format, EXPRESSIONS, body, body),
        st.builds("{{% macro f(m, y=1) %}}{}{{% endmacro %}}".format, body),
        st.builds("{{% call f({}) %}}{}{{% endcall %}}".format, EXPRESSIONS, body),
        st.builds("{{% set y %}}{}{{% endset %}}".format, body),
        st.builds("{{% filter {} %}}{}{{% endfilter %}}".format, st.sampled_from(FILTERS[:-2]), body),
        st.builds("{{% block b %}}{}{{% endblock %}}".format, body),
        st.builds("{{% autoescape true %}}{}{{% endautoescape %}}".format, body),
        st.builds("{{% with x = {} %}}{}{{% endwith %}}".format, EXPRESSIONS, body),
    )


STATEMENTS = st.recursive(
    st.one_of(
        st.builds("{{{{ {} }}}}".format, EXPRESSIONS),
        st.builds("{{% set ns.x = {} %}}".format, EXPRESSIONS),
        st.builds(
            "{{% set ns.x = {} %}}".format, st.sampled_from(["[ns.x, ns.x]", "ns.x ~ ns.x", "ns.x | map('string')"])
        ),
        st.builds("{{% set x = {} %}}".format, EXPRESSIONS),
        st.just("text"),
    ),
    statements,
    max_leaves=10,
)
TEMPLATES = st.lists(STATEMENTS, min_size=1, max_size=4).map(
    lambda parts: "{% set ns = namespace(x='ab') %}{% set x = [1, 'a'] %}" + "".join(parts)
)
TEMPLATE_FUZZ = (check_template, {"source": TEMPLATES})


@pytest.mark.timeout(300)
@settings(max_examples=60, deadline=None)
@given(source=TEMPLATES)
def test_random_templates(source: str) -> None:
    check_template(source)
