#!/usr/bin/env python3
"""Makes tests/runtime/data/chat_templates.json: templates, chats, and what Jinja2 renders.

    python tests/runtime/make_chat_golden.py

Needs transformers (for its Jinja2 environment). The model templates are those of the golden
checkpoints (tools/golden/templates.py), written from the prompts that the published ones make.
"""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools" / "golden"))

import templates
from transformers.utils.chat_template_utils import _compile_jinja_template

OUT = pathlib.Path(__file__).parent / "data" / "chat_templates.json"

# The same order of items over several lines, whose ends are part of the text.
LINES = """\
{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}
{# Images first, then videos, then text #}
{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}
{{ '<image>\n' }}{% endfor %}
{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}
{{ '<video>\n' }}{% endfor %}
{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}
{{ content['text'] }}{% endfor %}
{{ '<|im_end|>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

# What thinking models use of the language: a macro that counts images in a namespace outside it.
THINKING = """\
{%- set images = namespace(seen=0) %}
{%- set clips = namespace(seen=0) %}
{%- macro written(content, number, quiet=false) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}
            {%- if 'image' in item or item.type == 'image' %}
                {%- if quiet %}
                    {{- raise_exception('An instruction has an image.') }}
                {%- endif %}
                {%- if number %}
                    {%- set images.seen = images.seen + 1 %}
                {%- endif %}
                {%- if add_vision_id %}Picture {{ images.seen }}: {% endif -%}
                <|vision_start|><|image_pad|><|vision_end|>
            {%- elif item.type == 'video' %}
                {%- if number %}{% set clips.seen = clips.seen + 1 %}{% endif %}
                {%- if add_vision_id %}Video {{ clips.seen }}: {% endif -%}
                <|vision_start|><|video_pad|><|vision_end|>
            {%- elif 'text' in item %}
                {{- item.text }}
            {%- else %}
                {{- raise_exception('Unexpected item.') }}
            {%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}
        {{- '' }}
    {%- endif %}
{%- endmacro %}
{%- if messages and messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + written(messages[0].content, false, true)|trim + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(found=false, index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if not last.found and message.role == 'user' %}
        {%- set text = written(message.content, number=false) %}
        {%- if not(text.startswith('<tool_response>') and text.endswith('</tool_response>')) %}
            {%- set last.found = true %}
            {%- set last.index = (messages|length - 1) - loop.index0 %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = written(message.content, True) %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > last.index and (loop.last or thoughts) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
{%- endif %}
"""
# A macro for each part of a turn, one calls another, defined in a block and after a use by name.
PARTS = """\
{% macro turn(message) %}
[{{ message.role }}]
{{ parts(message.content, sep='|') }}
{% endmacro %}
{% if messages %}
  {% macro parts(items, sep=', ', shout=not items) %}
    {%- for item in items %}
      {%- if item.type == 'text' %}{{ part(item.text) }}{% else %}<{{ item.type }}>{% endif %}
      {%- if not loop.last %}{{ sep }}{% endif %}
    {%- endfor %}
    {%- if shout %}!{% endif %}
  {% endmacro %}
{% endif %}
{% macro part(text) -%}
  {% set text = text | trim %}
  {{ text }}
{%- endmacro %}
{% for message in messages %}
{{ turn(message) | trim }}
{% endfor %}
{% if add_generation_prompt %}{{ turn({'role': 'assistant', 'content': []}) }}{% endif %}
"""

MODELS = {"llava15": templates.LLAVA15, "next_vicuna": templates.NEXT_VICUNA,
          "next_mistral": templates.NEXT_MISTRAL, "next_34b": templates.NEXT_34B,
          "next_72b": templates.NEXT_72B, "onevision": templates.ONEVISION,
          "qwen2_vl": templates.QWEN2_VL, "qwen3_vl": templates.QWEN3_VL,
          "internvl": templates.INTERNVL, "lines": LINES, "thinking": THINKING, "parts": PARTS}
# Templates that number pictures and clips when asked.
NUMBERED = ("qwen2_vl", "qwen3_vl", "thinking")


def text(value):
    return {"type": "text", "text": value}


IMAGE, VIDEO = {"type": "image"}, {"type": "video"}
CHATS = {
    "one": [{"role": "user", "content": [IMAGE, text("What is shown in this image?")]}],
    "text": [{"role": "user", "content": [text("Hi \u00e9\u4f60 {{ x }} {% y %}\n")]}],
    "late": [{"role": "user", "content": [text("Compare"), IMAGE, text("and"), IMAGE, VIDEO]}],
    "thoughts": [{"role": "user", "content": [IMAGE, text("One?")]},
                 {"role": "assistant",
                  "content": [text("<think>\nIs it?\n</think>\n\nIt is one.")]},
                 {"role": "user", "content": [text("<tool_response>1</tool_response>")]},
                 {"role": "assistant", "content": [text("<think>\nSure.\n</think>\n\nYes.")]}],
    "turns": [{"role": "user", "content": [IMAGE, text("One?")]},
              {"role": "assistant", "content": [text(" It is one. ")]},
              {"role": "user", "content": [text("Two?")]}],
    "system": [{"role": "system", "content": [text("Be brief.")]},
               {"role": "user", "content": [IMAGE, text("Q")]},
               {"role": "assistant", "content": [text("A")]}],
    "none": [],
    "empty": [{"role": "user", "content": []}],
    "two": [{"role": "user", "content": [IMAGE, IMAGE, text("How do they differ?")]}],
    "video": [{"role": "user", "content": [VIDEO, text("What moves where?")]}],
    "both": [{"role": "user", "content": [VIDEO, text("Is it "), IMAGE, text("?")]}],
    "texts": [{"role": "user", "content": [text("First. "), text("Second.\n"), IMAGE]}],
    "later": [{"role": "system", "content": [text("Be brief. "), text("Be kind.")]},
              {"role": "user", "content": [IMAGE, text("One?")]},
              {"role": "assistant", "content": [text("One.")]},
              {"role": "user", "content": [text("And "), IMAGE, VIDEO, text("?")]},
              {"role": "assistant", "content": [text("Two.\n")]},
              {"role": "user", "content": [text("Sure?")]}],
    "markup": [{"role": "user", "content": [IMAGE, text("<|im_end|>\n<image> </s> [/INST] <b>&\"'")]}],
}

# One construct each; all rendered with the chat "late".
PIECES = r"""
plain text
{{ messages | length }} {{ messages[0].role }} {{ messages[0]['role'] }} {{ messages[-1].role }}
{{ messages[5] }}|{{ messages[0].nothing }}|{{ nothing }}|{{ messages['x'] }}
{{ messages[0].nothing.more }}
{{ nothing.more }}
{{ nothing + 'a' }}
{{ 'a' ~ nothing ~ 1 ~ 1.5 ~ true ~ none }}
{{ 1 + 2 * 3 - 4 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 6 / 2 }} {{ 7.5 // 2 }} {{ -7.5 % 2 }}
{{ 1 - 2 - 3 }} {{ - 5 + 2 }} {{ +3 }} {{ (1 + 2) * 3 }} {{ 2 * 'ab' }} {{ 'ab' * 2 }} {{ [1] * 3 }} {{ 'a' * -1 }}
{{ 1 / 0 }}
{{ 1 + 'a' }}
{{ 'a' + 1 }}
{{ 1 ~ 2 + 3 }}
{{ 1 + 2 ~ 3 }}
{{ 1 == 1.0 }} {{ true == 1 }} {{ 'a' == 'a' }} {{ 'a' != 'b' }} {{ 1 < 2 <= 2 }} {{ 3 > 2 > 2 }} {{ 'a' < 'b' }} {{ [1,2] < [1,3] }} {{ none == none }} {{ nothing == nothing2 }} {{ none == false }}
{{ 1 < 'a' }}
{{ 'a' in 'cat' }} {{ 'x' not in 'cat' }} {{ 1 in [1,2] }} {{ 'k' in {'k': 1} }} {{ 1 in nothing }} {{ not 'a' in 'cat' }}
{{ 1 in 'abc' }}
{{ 1 in none }}
{{ true and false }} {{ 1 and 'x' }} {{ 0 or 'y' }} {{ not 0 }} {{ not not '' }} {{ 'a' or b.c.d }} {{ [] or {} or 0 }}
{{ 'yes' if 1 else 'no' }} {{ 'yes' if 0 else 'no' }} {{ 'yes' if 0 }} {{ 'a' if 0 else 'b' if 0 else 'c' }}
{{ ('a' if 1 else 'b') + 'c' }}
{{ [1, 'a', none, true, 1.0, [2], {'k': 'v'}, (1,), (1, 2), ()] }}
{{ {'a': 1, 'b': [1]}['b'] }} {{ {'a': 1}.a }} {{ {'a': 1, 'a': 2} }} {{ {1: 2, 'x': "it's"} }}
{{ "it's" }} {{ ["it's", 'say "x"', 'both \' and "', 'tab\t nl\n cr\r bs\\ del\x7f é \u00a0 \U0001f600'] }}
{{ '\x41\u00e9\101\q\'' }} {{ "\"" }} {{ 'a' 'b' "c" }}
{{ 1.0 }} {{ 1.5e3 }}
{{ 1.0 }} {{ 0.1 + 0.2 }} {{ 100000000000000000.0 * 1 }} {{ 1.0 / 3 }} {{ 1.0 / 30000 }} {{ 1.0 / 3000000 }} {{ 123456789.0 }}
{{ 'abc'[1] }} {{ 'abc'[-1] }} {{ 'abc'[5] }} {{ 'abc'[1:] }} {{ 'abc'[:-1] }} {{ 'abcdef'[::2] }} {{ 'abc'[::-1] }} {{ 'é你x'[1:] }} {{ 'abc'[10:] }} {{ 'abc'[-10:2] }}
{{ [1,2,3,4][1:3] }} {{ [1,2,3][::-1] }} {{ [1,2,3][5:] }} {{ [1,2,3][-2:] }} {{ [1,2,3][2:0:-1] }} {{ (1,2,3)[1:] }} {{ [1,2][none:1] }}
{{ messages[1:] }} {{ messages[:1] | length }}
{{ ' Ab c '.strip() }}|{{ ' x '.lstrip() }}|{{ ' x '.rstrip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'abcba'.strip('ab') }}|{{ '\n\t x\u2003'.strip() }}|
{{ 'aBc'.upper() }} {{ 'aBc'.lower() }} {{ 'straße É'.upper() }} {{ 'hello wORLD'.title() }} {{ 'hELLO'.capitalize() }} {{ 'ПРИВЕТ'.lower() }}
{{ 'a b  c'.split() }} {{ 'a,b,,c'.split(',') }} {{ 'a,b,c'.split(',', 1) }} {{ ' a  b c'.split(none, 1) }} {{ ''.split() }} {{ ''.split(',') }} {{ 'a</think>b'.split('</think>')[-1] }} {{ '  '.split() }}
{{ 'abc'.startswith('ab') }} {{ 'abc'.endswith('bc') }} {{ 'abc'.endswith(('x', 'c')) }} {{ 'aXbX'.replace('X', '--') }} {{ 'aaa'.replace('a', 'b', 2) }} {{ 'ab'.replace('', '-') }} {{ 'abcb'.find('b') }} {{ 'abc'.find('z') }}
{{ {'a': 1, 'b': 2}.items() | list }} {{ {'a': 1}.get('a') }} {{ {'a': 1}.get('b') }} {{ {'a': 1}.get('b', 'd') }} {{ {'a': 1}.keys() | list }} {{ {'a': 1}.values() | list }}
{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }};{% endfor %}
{% for k, v in {'a': 1, 'b': 2} | items %}{{ k }}={{ v }};{% endfor %}
{% for k in {'a': 1, 'b': 2} %}{{ k }}{% endfor %}{% for c in 'é你x' %}[{{ c }}]{% endfor %}
{% for a, b in [(1, 2), [3, 4]] %}{{ a + b }} {% endfor %}
{% for a, b in [(1, 2, 3)] %}{{ a }}{% endfor %}
{% for x in none %}{% endfor %}
{% for x in nothing %}x{% else %}empty{% endfor %}
{% for x in [1,2,3] %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.depth }};{% endfor %}
{% for x in [1,2,3] if x != 2 %}{{ x }}:{{ loop.index }}/{{ loop.length }} {% endfor %}
{% for x in [1,2] %}{% for y in 'ab' %}{{ x }}{{ y }}{{ loop.depth }}{{ loop.index }} {% endfor %}{{ loop.index }}{% endfor %}
{% for x in [1,2,3,4,5] %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 4 %}{% break %}{% endif %}{{ x }}{% endfor %}
{% for x in [] %}{% else %}none{% endfor %}{% for x in range(3) %}{{ x }}{% endfor %}{{ range(1, 4) | list }}{{ range(5, 0, -2) | list }}
{% for x in [1,2] %}{% set y = x %}{% endfor %}{{ y is defined }}
{% set x = 1 %}{% for i in [1,2] %}{{ x }}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}
{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}
{% set ns = namespace(n=0, items=[]) %}{% for i in [1,2,3] %}{% set ns.n = ns.n + i %}{% set ns.items = ns.items + [i] %}{% endfor %}{{ ns.n }} {{ ns.items }} {{ ns['n'] }} {{ ns.missing is defined }}
{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a }}{{ ns.b }}
{% set x = {'a': 1} %}{% set x.a = 2 %}{{ x }}
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set t = 1, 2 %}{{ t }}
{% set block %}in {{ 1 + 1 }}{% endset %}[{{ block }}]
{% generation %}{% set g = 1 %}{{ g }}{% endgeneration %}{{ g }}
{% if 0 %}a{% elif nothing %}b{% elif 1 %}c{% else %}d{% endif %}{% if '' %}{% else %}e{% endif %}
{{ 'a' is string }} {{ 1 is string }} {{ messages[0].content is string }} {{ messages[0].content is iterable }} {{ messages[0] is mapping }} {{ none is none }} {{ 1 is not none }} {{ x is defined }} {{ x is not defined }} {{ x is undefined }} {{ 1 is number }} {{ 1.0 is float }} {{ 1 is integer }} {{ true is integer }} {{ true is boolean }} {{ true is true }} {{ 1 is true }} {{ 'a' is sequence }} {{ 3 is odd }} {{ 4 is even }} {{ 4 is divisibleby 2 }} {{ 4 is divisibleby(3) }} {{ 1 is eq 1 }} {{ 1 is in [1] }} {{ 'a' is lower }} {{ 'A' is upper }} {{ x is iterable }} {{ none is iterable }}
{{ 'x' if y is defined else 'z' }} {{ not x is defined }} {{ 1 is string or 1 is number and true }} {{ x is defined and x }}
{{ messages[0].content | selectattr('type', 'equalto', 'text') | list }} {{ messages[0].content | rejectattr('type', 'equalto', 'text') | map(attribute='type') | join(',') }} {{ messages[0].content | selectattr('text') | list | length }} {{ messages[0].content | selectattr('text', 'defined') | map(attribute='text') | list }} {{ messages | selectattr('role', 'in', ['user', 'x']) | list | length }}
{{ [1,2,3,4] | select('odd') | list }} {{ [1,0,2] | select | list }} {{ [1,2,3] | reject('gt', 1) | list }} {{ ['a','b'] | map('upper') | list }} {{ [{'a': {'b': 1}}] | map(attribute='a.b') | list }} {{ [[1,2]] | map(attribute=1) | list }} {{ [{'a': 1}, {}] | map(attribute='a', default='x') | list }} {{ ['a', 'b'] | map('replace', 'a', 'z') | list }}
{{ '  x ' | trim }}|{{ 'xax' | trim('x') }}|{{ 5 | string + 'a' }}|{{ [1,2] | join }}|{{ [1,2] | join('-') }}|{{ [{'a': 1}, {'a': 2}] | join(',', attribute='a') }}|{{ 'abc' | join('.') }}
{{ 'abc' | length }} {{ 'é你' | length }} {{ [1] | count }} {{ {} | length }} {{ nothing | length }}
{{ 'a' | upper }} {{ 'A' | lower }} {{ 'ab cd' | title }} {{ 'ab CD' | capitalize }} {{ [1,2] | first }} {{ [1,2] | last }} {{ [] | first }} {{ 'abc' | first }} {{ 'abc' | list }} {{ [1,2] | reverse | list }} {{ 'abc' | reverse }} {{ 'aXb' | replace('X', '-') }} {{ [1,1,2,'a','A'] | unique | list }} {{ -3 | abs }} {{ 'x' | safe }}
{{ nothing | default('d') }} {{ '' | default('d') }} {{ '' | default('d', true) }} {{ none | default('d') }} {{ nothing | d }} {{ 0 | default('z', boolean=true) }} {{ nothing | default(default_value='k') }}
{{ '12' | int }} {{ 'x' | int }} {{ 'x' | int(5) }} {{ 3.9 | int }} {{ -3.9 | int }} {{ ' 7 ' | int }} {{ '3.7' | int }} {{ true | int }} {{ '1.5' | float }} {{ 'x' | float }} {{ 2 | float }}
{{ {'a': [1, 'é"\n\\', none, true, 1.5], 'b': {}} | tojson }} {{ [] | tojson }} {{ 'x</a>&\'' | tojson }} {{ '\x01\x1f\x7f' | tojson }}
{{ {'a': [1, {'b': 2}], 'c': [], 'd': {}} | tojson(indent=2) }}
{{ messages | tojson }}
{{ nothing | tojson }}
{{ 'a' | upper | lower ~ 'B' | lower }} {{ 'a' ~ 'b' | upper }} {{ ('a' ~ 'b') | upper }} {{ -1 | string }}
{{ raise_exception('no ' ~ 'way') }}
{{ tools is defined }} {{ tools is none }} {{ tools }} {{ documents is none }}
{{ bos_token }}{{ eos_token }} {{ add_generation_prompt }}
{% raw %}{{ x }} {% if %}{% endraw %} after
a {%- if 1 -%} b {%- endif -%} c
a {{- ' x ' -}} b
a {#- comment -#} b
x{# a comment {{ y }} {% z %} #}y
{%- set x = 1 -%}   {{ x }}
{{ {'a': {'b': 1}}['a']['b'] }}{{ {'a': {'b': 1}}.a.b }}{{ [[1, 2], [3]][0][1] }}{{ messages.0.role }}
{{ [1, 2,] }}{{ {'a': 1,} }}{{ (1,) }}
{{ 'a' if true }}{{ 1 if false }}
{{ loop }}
{{ 1, 2 }}
{{ messages[0].content[0].text.upper() }} {{ messages[0]['content'][0]['text'][0] }}
{% for m in messages[::-1] %}{{ m.role }}{% endfor %}
{% for m in messages | list + messages %}{{ loop.index }}{% endfor %}
{% set x = [1,2,3] %}{% set x = x[1:] %}{{ x | length }}{{ x[-1] }}
{{ nothing is defined and nothing.x }}
{{ 'a'.nothing() is defined }}
{{ none.foo }}
{{ none.foo.bar }}
{{ none['a'] }}
{{ 5[0] }}
{{ messages[0].items() | list | length }} {{ messages[0].content.0.text }}
{{ 'true' if true == 'true' else 'other' }} {{ True }} {{ False }} {{ None }}
{{ 10 > 9 > 8 }} {{ '10' < '9' }} {{ 1 <= 1.0 }} {{ 2 >= 3 }}
{{ "a" in ["a"] and "b" in ["a"] }} {{ 'a' in 'b' or 'c' in 'c' }}
{{ (messages[0].role == 'user') != (0 % 2 == 0) }}
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system = '' %}{% endif %}{{ loop_messages | length }}[{{ system }}]
{{ }}
{{ 1
{% if 1 %}
{% endif %}
{% for %}{% endfor %}
{{ 'a }}
{{ a b }}
{% if 1 %}{% else %}{% elif 2 %}{% endif %}
{{ 1 + }}
{{ (1 }}
{{ 1) }}
{{ [1 }}
{% unknown %}
{{ 'a' | }}
{% break %}
{# open
{% set true = 1 %}{{ true }}
{% macro m() %}x{% endmacro %}{{ m() }}{{ m() | upper }}[{{ m }}]{{ m is defined }}{{ m is string }}{{ m() is string }}
{% macro m(a, b='B', c=a ~ b) %}{{ a }}{{ b }}{{ c }};{% endmacro %}{{ m(1) }}{{ m(1, 2) }}{{ m(1, c=3) }}{{ m(b=2, a=1) }}{{ m(c='c', a='a') }}{{ m() }}
{% macro m(a) %}{{ a is defined }}{{ a }}{% endmacro %}{{ m() }}{{ m(nothing) }}{{ m(none) }}{{ m(false) }}
{% macro m(a, b=c, c=a) %}{{ a }},{{ b }},{{ c }};{% endmacro %}{{ m(1) }}{{ m(1, c=2) }}{% set c = 9 %}{{ m(1) }}
{% macro m(a=a) %}{{ a }}.{% endmacro %}{% set a = 1 %}{{ m() }}{{ m(2) }}
{% macro m(a) %}{{ a.b }}{% endmacro %}{{ m() }}
{% macro m(a) %}x{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}x{% endmacro %}{{ m(1, a=2) }}
{% macro m(a) %}x{% endmacro %}{{ m(b=2) }}
{% macro m(a) %}x{% endmacro %}{{ m(a=1, a=2) }}
{% macro m(a, a) %}x{% endmacro %}{{ m(1, 2) }}
{% macro m(a=1, b) %}x{% endmacro %}{{ m(1, 2) }}
{% macro m(a,) %}x{% endmacro %}{{ m(1) }}
{% macro m %}x{% endmacro %}{{ m() }}
{% macro m() %}x
{% macro m() %}x{% endmacro m %}{{ m() }}
{% macro () %}x{% endmacro %}
{% macro m() %}x{% endmacro %}{{ m( }}
{% endmacro %}
{{ m() }}{% macro m() %}x{% endmacro %}
{% if 0 %}{% macro m() %}x{% endmacro %}{% endif %}{{ m is defined }}
{% if 0 %}{% macro m() %}x{% endmacro %}{% endif %}{{ m() }}
{% if 1 %}{% macro m() %}x{% endmacro %}{% else %}{% macro m() %}y{% endmacro %}{% endif %}{{ m() }}
{% macro m() %}x{% endmacro %}{{ m() }}{% macro m() %}y{% endmacro %}{{ m() }}
{% macro m() %}x{% endmacro %}{% set m = 1 %}{{ m }}{{ m() }}
{% set x = 1 %}{% macro m() %}{{ x }}{% set x = 2 %}{{ x }}{% endmacro %}{{ m() }}{{ x }}{{ m() }}
{% macro m() %}{{ x }}{% endmacro %}{{ m() }}{% set x = 1 %}{{ m() }}{% set x = 2 %}{{ m() }}
{% macro m() %}[{{ x }}]{% endmacro %}{% for x in [1, 2] %}{{ m() }}{% endfor %}
{% set x = 0 %}{% macro m() %}[{{ x }}]{% endmacro %}{% for x in [1, 2] %}{{ x }}{{ m() }}{% endfor %}
{% for x in [1, 2] %}{% macro m(y) %}{{ x }}{{ y }}{% endmacro %}{{ m('a') }}{{ m('b') }}{% endfor %}{{ m is defined }}
{% for x in [1, 2] %}{% macro m() %}{{ loop.index }}{{ x }}{% endmacro %}{{ m() }}{% endfor %}
{% macro m() %}{{ loop is defined }}{% endmacro %}{% for x in [1] %}{{ m() }}{% endfor %}
{% macro m(x) %}{% for y in x %}{{ y }}{{ loop.index }}{% if y == 2 %}{% break %}{% endif %}{% endfor %}{% endmacro %}{{ m([1, 2, 3]) }}
{% for x in [1, 2] %}{% macro m() %}{% break %}{% endmacro %}{{ m() }}{% endfor %}
{% macro a() %}{% macro b() %}b{{ x }}{% endmacro %}{{ b() }}{% endmacro %}{% set x = 1 %}{{ a() }}{{ b is defined }}
{% macro a(x) %}{% macro b(y) %}{{ x }}{{ y }}{% endmacro %}{{ b(2) }}{{ b(3) }}{% endmacro %}{{ a(1) }}{{ a(4) }}
{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}
{% macro even(n) %}{{ 'even' if n == 0 else odd(n - 1) }}{% endmacro %}{% macro odd(n) %}{{ 'odd' if n == 0 else even(n - 1) }}{% endmacro %}{{ even(7) }}{{ odd(7) }}
{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ g() }}
{% macro call(f, x) %}{{ f(x) }}{% endmacro %}{% macro f(x) %}<{{ x }}>{% endmacro %}{{ call(f, 1) }}
{% set ns = namespace(n=0) %}{% macro m(by=1) %}{% set ns.n = ns.n + by %}{% endmacro %}{{ m() }}{{ m(by=3) }}{{ ns.n }}
{% macro m() %}a{% endmacro %}{% set x = m() ~ 'b' %}{{ x }}{{ x | length }}{{ (m() + 'c') * 2 }}{{ 'a' == m() }}
{% macro m() %}  a  {% endmacro %}[{{ m() }}][{{ m() | trim }}][{{ m().strip() }}]
{% macro range(n) %}mine {{ n }}{% endmacro %}{{ range(2) }}
{% macro m(x) %}{{ x }}{% endmacro %}{{ m(x='a') if m else 'no' }}{{ m == m }}{{ m != 1 }}
{% macro m() %}x{% endmacro %}{{ m | length }}
{% macro m() %}x{% endmacro %}{% for c in m %}{{ c }}{% endfor %}
{% macro m() %}x{% endmacro %}{{ m + 'y' }}
{% macro m() %}x{% endmacro %}{{ m | tojson }}
{% set block %}{% macro m() %}x{% endmacro %}{{ m() }}{% endset %}{{ block }}{{ m is defined }}
{% generation %}{% macro m() %}x{% endmacro %}{{ m() }}{% endgeneration %}{{ m is defined }}
{% macro m(messages) %}{{ messages }}{% endmacro %}{{ m('mine') }}{{ messages | length }}
{% macro m() %}{{ bos_token }}{{ messages | length }}{{ nothing }}{% endmacro %}{{ m() }}
{% macro m() %}{{ raise_exception('from a macro') }}{% endmacro %}{{ m() }}
{% macro m(a) %}{% set a = a + 1 %}{{ a }}{% endmacro %}{{ m(1) }}{{ m(1) }}
{% macro varargs() %}x{% endmacro %}{{ varargs() }}
{% macro m(kwargs) %}{{ kwargs }}{% endmacro %}{{ m(1) }}
""".strip("\n").split("\n")

BLOCKS = [
    "a\n  {% if 1 %}\n  b\n  {% endif %}\nc\n",
    "a\n  {%+ if 1 %}\n  b\n  {% endif +%}\nc\n\n",
    "  {% if 1 %}x{% endif %}\n\n  {{ 1 }}\n  {# c #}\n  y",
    "\r\na\r{% if 1 %}\r\nb\r\n{% endif %}\r\n",
    "{% if 1 -%}\n\n   a\n\n{%- endif %}   \n   b",
    "\t {% if 1 %}\t\n\t{% if 1 %}\n \t x{% endif %}{% endif %}",
    "{{ 'a' }}\n{{ 'b' }}\n\n",
    "{{ 'a' }}  {% if 1 %}x{% endif %}",
    "{% if 1 %}\n{% if 1 %}\n{% endif %}\n{% endif %}\nend",
    "a {%- raw -%}\n  {{ x }}  \n {%- endraw -%}\n b",
    "a\n  {% raw %}\n  {{ x }}\n  {% endraw %}\nb",
    "{{\n  'multi'\n  ~\n  'line'\n}}\n{%\n set x\n = 1 %}\n{{ x }}",
    "{%- for m in messages -%}\n  {{- m.role -}}\n{%- endfor -%}\n",
    "a\u00a0{%- if 1 -%}\u2003b{% endif %}",
    "a\u00a0\n\u00a0{% if 1 %}b{% endif %}",
    "{{- 'x' }} \n {{- 'y' -}} \n z",
    "a{#- x #}\n  {#- y -#}\n b {# z #}\nc",
    "{% macro m(a) %}\n  a {{ a }}\n{% endmacro %}\n[{{ m(1) }}]\n",
    "{%- macro m(a) -%}\n  a {{ a }}\n{%- endmacro -%}\n\n[{{ m(1) }}]\n",
    "  {% macro m(a) %}{{ a }}  \n  {% endmacro %}  \n x {{- m(1) -}} y",
    "{%+ macro m(\n  a,\n  b='x'\n) +%}\n{{ a -}}\n {{ b }}\n{% endmacro %}\n\n{{ m(\n 1\n) }}",
    "{% if 1 %}\n  {% macro m() %}\n  {% if 1 -%}\n    x\n  {%- endif %}\n  {% endmacro %}\n{% endif %}\n{{ m() }}|",
    "{{ '{{' }}{{ '}}' }}{{ '%}' }}{% if '%}' == '%}' %}ok{% endif %}",
    "{ % } } { # {",
    "{{ {'a':{'b':1}}}}",
    "",
    "\n",
    "\n\n",
]


def render(source, chat, prompt, bos="<s>", eos="</s>", **variables):
    try:
        template = _compile_jinja_template(source)
        return {"text": template.render(
            messages=CHATS[chat], tools=None, documents=None, add_generation_prompt=prompt,
            bos_token=bos, eos_token=eos, **variables)}
    except Exception as error:  # whatever it is, ours must refuse too
        return {"error": f"{type(error).__name__}: {error}"}


def main():
    cases = []
    for name, source in MODELS.items():
        for chat in CHATS:
            for prompt in (True, False):
                cases.append({"model": name, "chat": chat, "prompt": prompt,
                              **render(source, chat, prompt)})
            if name in NUMBERED:
                variables = {"add_vision_id": True}
                cases.append({"model": name, "chat": chat, "prompt": True, "variables": variables,
                              **render(source, chat, True, **variables)})
    pieces = [{"source": source, **render(source, "late", True)} for source in PIECES + BLOCKS]
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"models": MODELS, "chats": CHATS, "cases": cases, "pieces": pieces},
                              ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
