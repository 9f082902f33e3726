"""Chat templates that never end or write without end are refused in one line; all others are written as transformers does."""

import json
from pathlib import Path

import pytest
from byte_tokenizer import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import drawn, mostly_long
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from lpes_jax import cli
from lpes_jax.errors import UserError
from lpes_jax.models.llama.chat import make_chat
from lpes_jax.models.llama.templates import MOST_TEMPLATE, TooMuch, check

HI = [{"role": "user", "content": "hi"}]
DOUBLED = "{%% set ns = namespace(x=%s) %%}{%% for i in range(99) %%}{%% set ns.x = %s %%}{%% endfor %%}%s"
HOSTILE = {
    "nested loops": "".join("{% for x in range(99999) %}" for _ in range(3)) + "{% endfor %}" * 3,
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "loops with a test": "{% for a in range(99999) %}{% for b in range(99999) if false %}x{% endfor %}{% endfor %}",
    "loops over the chat": "{% for a in range(99999) %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfor %}" * 9,
    "text block in a loop": "{% for i in range(99999) %}{% set b %}" + "y" * 9999 + "{% endset %}{% endfor %}",
    "a long list in a loop": "{% for i in range(99999) %}{% set b = [" + "1," * 5000 + "] %}{% endfor %}",
    "slices in a loop": "{% set a = 'x' * 999999 %}{% for i in range(99999) %}{% set b = a[1:] %}{% endfor %}",
    "search in a loop": "{% set a = 'x' * 999999 %}{% for i in range(99999) %}{% if 'y' in a %}{% endif %}{% endfor %}",
    "random in loops": "{% for i in range(99999) %}{% for i in range(99999) %}{{ [1]|random }}{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro of many calls": "{% macro f(n) %}{% if n > 0 %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a block that calls itself": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "a recursive loop": "{% for a in [[1, 2]] recursive %}{{ loop([[1, 2], [3, 4]]) }}{% endfor %}",
    "text times": "{{ 'x' * 10**12 }}",
    "text times twice": "{{ ('x' * 99999) * 99999 }}",
    "a list times": "{{ ([range(99999)] * 99999)|map('list')|list|length }}",
    "a power": "{{ (9**99999)**99999 }}",
    "doubled by ~": DOUBLED % ("'ab'", "ns.x ~ ns.x", "{{ ns.x }}"),
    "doubled by +": DOUBLED % ("'ab'", "ns.x + ns.x", ""),
    "doubled lists": DOUBLED % ("[1]", "[ns.x, ns.x]", "{{ ns.x }}"),
    "doubled lists, as JSON": DOUBLED % ("[1]", "[ns.x, ns.x]", "{{ ns.x|tojson|length }}"),
    "doubled lists, compared": DOUBLED % ("[1]", "[ns.x, ns.x]", "{{ ns.x == [1] }}"),
    "doubled tuples as a key": DOUBLED % ("(1, 2)", "(ns.x, ns.x)", "{% set d = {ns.x: 1} %}"),
    "wide %": "{{ '%9999999999d' % 1 }}",
    "wide %*": "{{ '%*d' % (9999999999, 1) }}",
    "wide format": "{{ '{:9999999999d}'.format(1) }}",
    "wide format by name": "{{ '{:{w}}'.format(1, w=9999999999) }}",
    "format of much": "{{ ('{0}' * 999).format('x' * 999999) }}",
    "wide filter": "{{ '%9999999999s'|format('a') }}",
    "center": "{{ 'x'|center(9999999999) }}",
    "ljust": "{{ 'x'.ljust(9999999999) }}",
    "zfill": "{{ '1'.zfill(9999999999) }}",
    "expandtabs": "{{ ('\\t' * 9999).expandtabs(9999999) }}",
    "indent": "{{ ('x\\n' * 99999)|indent(99999) }}",
    "indented JSON": "{{ ([1] * 99999)|tojson(indent=99999) }}",
    "join": "{{ ('x' * 99999).join(['a', 'b'] * 9999) }}",
    "join by a filter": "{{ (['a'] * 9999)|join('x' * 99999) }}",
    "replace": "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
    "replace nothing": "{{ ('x' * 99999)|replace('', 'y' * 99999) }}",
    "translate": "{{ ('x' * 99999).translate({120: 'y' * 99999}) }}",
    "a default for each": "{{ range(99999)|map(attribute='x', default='y' * 99999)|join|length }}",
    "sum of lists": "{{ ([[1] * 999] * 999)|sum(start=[])|length }}",
    "wordwrap": "{{ ('x ' * 99999)|wordwrap(1, wrapstring='y' * 99999) }}",
    "batch": "{{ [1]|batch(9999999999, 'x')|list }}",
    "slice": "{{ [1]|slice(9999999999)|list }}",
    "filler": "{{ lipsum(n=99999999) }}",
    "a range": "{{ range(10**9)|list }}",
    "long": "x" * (MOST_TEMPLATE + 1),
    "deep": "{{ " + "[" * 9999 + "]" * 9999 + " }}",
    "deep statements": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
}


SLOW = ("random in loops", "a macro of many calls", "loops over the chat", "loops that write")


@pytest.mark.parametrize("name", mostly_long(HOSTILE, *(name for name in HOSTILE if name not in SLOW)))
def test_what_never_ends_or_writes_without_end_is_refused(name):
    with pytest.raises((TooMuch, OverflowError)) as refused:
        check(HOSTILE[name], HI, add_generation_prompt=True)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 200


# Everything that templates of models use, and some more.
RICH = """{%- set ns = namespace(system='', n=0) -%}
{%- macro turn(role, text, last=false) -%}
<|{{ role }}|>{{ text | trim }}{% if not last %}<|end|>{{ '\\n' }}{% endif %}
{%- endmacro -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set ns.system = messages[0].content.strip() + '.' -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set rest = messages -%}{%- endif -%}
{{- bos_token ~ (turn('system', ns.system) if ns.system else '') -}}
{%- for message in rest -%}
    {%- if message.content is string and not message.content -%}{%- continue -%}{%- endif -%}
    {%- if message['role'] not in ['user', 'assistant'] -%}{{ raise_exception('a role of ' + message['role']) }}{%- endif -%}
    {%- set ns.n = ns.n + 1 -%}
    {%- if '</think>' in message.content -%}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') -%}
    {%- else -%}{%- set content = message.content -%}{%- endif -%}
    {%- if message.role == 'assistant' -%}{%- generation -%}{{ turn('assistant', content, loop.last) }}{%- endgeneration -%}
    {%- else -%}{{ turn(message.role | upper | lower, content) }}{%- endif -%}
    {%- if loop.first and loop.length > 1 -%}{{ '%03d' % loop.index ~ '{:>4}'.format(loop.revindex) }}{%- endif -%}
    {%- if ns.n >= 40 -%}{%- break -%}{%- endif -%}
{%- else -%}nothing{%- endfor -%}
{{- {'n': ns.n, 'roles': rest | map(attribute='role') | unique | list} | tojson(indent=2) -}}
{{- rest | selectattr('role', 'equalto', 'user') | list | length ~ ' ' ~ (messages | length * 2 ** 3 // 5 % 7) -}}
{{- messages[::-1][0].content | replace('e', 'E') | truncate(40) ~ ('-' * 5) ~ ', '.join(['a', 'b']) -}}
{{- ' yes' if messages | first is mapping and loop is not defined and x is undefined and tools is none -}}
{% for key, value in messages[-1].items() | sort %}{{ key | capitalize }}={{ value | string | length }} {% endfor %}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- if enable_thinking is defined and not enable_thinking %}<think></think>
{%- endif -%}{%- endif -%}
"""
FLAT = "{% for message in messages %}{{ message['role'] ~ ': ' + message['content'] + '\n' }}{% endfor %}"
CHATS = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "tool"]),
            "content": st.text(max_size=60) | st.sampled_from(["<think>\na\n</think>\n\nb", "{{ 7 }}", "", "%s %d {0}"]),
        }
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=drawn(150), deadline=None)
@given(CHATS, st.booleans(), st.sampled_from([RICH, FLAT]), st.sampled_from([{}, {"enable_thinking": False}]))
def test_the_templates_of_models_are_written_as_transformers_writes_them(messages, prompt, template, more):
    variables = {"add_generation_prompt": prompt, "bos_token": "<s>", "eos_token": "</s>"} | more
    try:
        theirs = render_jinja_template([messages], chat_template=template, **variables)[0][0]
    except Exception as error:
        with pytest.raises(type(error)) as ours:
            check(template, messages, **variables)
        assert str(ours.value) == str(error)
    else:
        assert check(template, messages, **variables) == theirs


def test_a_long_chat_has_a_longer_budget():
    text = "A long <b>document</b> & its end. </think> \n" * 40_000  # 1.8 million characters
    messages = [{"role": "system", "content": text}, {"role": "user", "content": text}]
    variables = {"add_generation_prompt": True, "bos_token": "<s>"}
    ours = check(RICH, messages, **variables)
    assert ours == render_jinja_template([messages], chat_template=RICH, **variables)[0][0] and len(ours) > 10**6


def test_a_template_may_look_at_each_character():
    """Templates of models that take pictures go over a message's parts, which of a text are its characters."""
    template = (
        "{% for m in messages %}{{ m.role }}: {% for c in m.content %}{% if c == 'e' %}{{ '<e>' }}{% elif c.type is defined "
        "and c['type'] == 'text' %}{{ c['text'] + '?' }}{% else %}{{ c }}{% endif %}{% endfor %}{% endfor %}"
    )
    text = "Each letter of this text, one by one. " * 150
    assert check(template, [{"role": "user", "content": text}]) == "user: " + text.replace("e", "<e>")


def tokenizer_of(template: object, folder: Path | None = None) -> PreTrainedTokenizerFast:
    """Bytes for tokens; if a folder is given, written there and read again, like a model's."""
    made = byte_tokenizer(["<s>"])
    if folder is None:
        made.chat_template = template
        return made
    made.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["nested loops", "text times twice", "a macro that calls itself", "doubled by ~", "deep"])
def test_a_chat_of_such_a_template_is_one_line(name):
    chat = make_chat(tokenizer_of(HOSTILE[name]), apply_chat_template=True)
    with pytest.raises(UserError, match="--apply-chat-template: the model's chat template fails") as refused:
        chat.render("What is it?")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("template", [7, 1.5, True, ["a"], "\ud800 {{ messages }}", {"default": 7}])
def test_a_template_that_is_no_text_is_one_line(template, tmp_path):
    try:
        tokenizer = tokenizer_of(template, tmp_path)
    except Exception:  # transformers does not read it: load_tokenizer says so
        tokenizer = tokenizer_of(template)
    with pytest.raises(UserError, match="chat template must be a text|has no chat template"):
        make_chat(tokenizer, apply_chat_template=True)


def test_a_template_that_writes_half_a_character_is_one_line():
    chat = make_chat(tokenizer_of("{{ '\\ud800' }}{{ messages[0].content }}"), apply_chat_template=True)
    with pytest.raises(UserError, match="half of a surrogate pair"):
        chat.render("hi")


def test_the_verb_refuses_it_and_leaves_nothing(model_folder, tmp_path, capfd):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(HOSTILE["nested loops"])
    flags = [
        "--num-pairs",
        "2",
        "--key-length",
        "2",
        "--limit",
        "1",
        "--apply-chat-template",
        "--output-path",
        str(tmp_path / "o"),
    ]
    assert cli.main(["evaluate", "--model", str(folder), *flags]) == 2
    [line] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "chat template fails (it takes more steps" in line and not (tmp_path / "o").exists()
