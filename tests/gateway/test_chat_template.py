"""Chat templates give what transformers gives, and cannot reach out of their sandbox."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gateway import chat_template
from gateway.chat_template import ChatTemplate
from mesh.errors import InvalidFieldError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATION = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Was heißt 삼겹살?\n"},
    {"role": "assistant", "content": "Pork belly."},
    {"role": "user", "content": "😀"},
]
CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA2 = """{{ bos_token }}{% for m in messages %}
  {%- if m.role == 'system' %}{% continue %}{% endif -%}
  {%- if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]
  {%- else %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif -%}
{% endfor %}"""
JSON = "{{ messages | tojson }}{{ messages[0] | tojson(indent=2, sort_keys=true, separators=(',', ': ')) }}"
NAMESPACE = """
{% macro turn(m, place) %}
{% for _ in range(place) %}{{ loop.index }}{% endfor %}{{ m.content }}
{% endmacro %}
{% set ns = namespace(turns=0, system='') %}
{% if messages[0].role == 'system' %}
{% set ns.system = messages[0].content %}{% set messages = messages[1:] %}
{% endif %}
{% for m in messages if m.role == 'user' recursive %}
{% set ns.turns = ns.turns + 1 %}{{ turn(m, loop.index0) }}
{% else %}nobody{% endfor %}
{{ ns.turns }}{{ ns.system }}{% if tools is not none %}tools{% endif %}{{ dict(a=1).a }}"""


@pytest.mark.parametrize("source", [CHATML, LLAMA2, JSON, NAMESPACE])
def test_the_result_is_that_of_transformers(source):
    expected, _ = render_jinja_template(
        [CONVERSATION], chat_template=source, add_generation_prompt=True, **TOKENS
    )
    assert ChatTemplate(source, TOKENS).render(CONVERSATION) == expected[0]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content.x }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append('x') }}",
        "{{ 1 / 'x' }}",
        "{{ 1 / 0 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% include 'other' %}",
    ],
)
def test_a_template_that_fails_or_breaks_out_is_an_error_of_the_chat(source):
    with pytest.raises(InvalidFieldError) as caught:
        ChatTemplate(source, TOKENS).render(CONVERSATION)
    assert caught.value.field == "chat"


def test_a_broken_template_is_named():
    with pytest.raises(InvalidFieldError, match="broken"):
        ChatTemplate("{% for %}", TOKENS)


def test_output_has_a_limit(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 1000)
    with pytest.raises(InvalidFieldError, match="1000"):
        ChatTemplate("{% for i in range(10000) %}xxxxxxxx{% endfor %}", TOKENS).render(CONVERSATION)


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SHADOW = "{% set check_time = 1 %}" + LOOP
MACRO = "{% macro two(n) %}{% if n %}{{ two(n - 1) }}{{ two(n - 1) }}{% endif %}{% endmacro %}{{ two(60) }}"
RECURSION = "{% for a in [1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}"


@pytest.mark.parametrize("source", [LOOP, SHADOW, MACRO, RECURSION])
def test_time_has_a_limit(source, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.05)
    with pytest.raises(InvalidFieldError, match=r"0\.05 s"):
        ChatTemplate(source, TOKENS).render(CONVERSATION)


def test_a_rendering_after_one_that_took_too_long_has_its_own_time(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.05)
    source = "{% for a in range(messages|length * 9999) %}{% for b in range(a) %}{% endfor %}{% endfor %}done"
    template = ChatTemplate(source, TOKENS)
    with pytest.raises(InvalidFieldError):
        template.render(CONVERSATION)
    assert template.render([]) == "done"
