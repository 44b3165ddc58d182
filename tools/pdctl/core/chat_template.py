"""The tiny model's chat template: tools, tool results, and reasoning that earlier turns lose.

Separate from the weights because tests of reuse lean on its behaviour: an ordinary turn renders as a pure extension of
the turn before, while a turn with reasoning doesn't, since reasoning before the last user message is left out, as the
templates of real reasoning models do it.
"""

from typing import Final

START: Final = "<|im_start|>"
END: Final = "<|im_end|>"
PAD: Final = "<|endoftext|>"
CONTROL_TOKENS: Final = (PAD, START, END)
"""Ids 0, 1 and 2. Never part of a decoded text."""
VISIBLE_TOKENS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Whole tokens, as the engine's reasoning and tool parsers expect, yet part of a decoded text."""

CHAT_TEMPLATE: Final = """\
{%- set ns = namespace(last_user=-1, first=0) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools or (messages and messages[0].role in ('system', 'developer')) -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if messages[0].role in ('system', 'developer') -%}
    {%- set ns.first = 1 -%}
    {{- messages[0].content -}}
    {%- if tools -%}{{- '\\n\\n' -}}{%- endif -%}
  {%- endif -%}
  {%- if tools -%}
    {{- 'Functions you may call, one JSON object per line:\\n' -}}
    {%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
    {{- 'To call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>' -}}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages[ns.first:] -%}
  {%- set position = loop.index0 + ns.first -%}
  {%- set content = m.content if m.content is string else '' -%}
  {{- '<|im_start|>' + m.role + '\\n' -}}
  {%- if m.role == 'assistant' -%}
    {%- set reasoning = m.reasoning if m.reasoning is string else m.reasoning_content -%}
    {%- if position > ns.last_user -%}
      {%- if reasoning is string and reasoning -%}{{- '<think>\\n' + reasoning + '</think>\\n' -}}{%- endif -%}
    {%- elif '</think>' in content -%}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- content -}}
    {%- for call in m.tool_calls or [] -%}
      {%- set f = call.function -%}
      {{- '<tool_call>\\n{"name": ' + (f.name | tojson) + ', "arguments": ' -}}
      {{- (f.arguments if f.arguments is string else f.arguments | tojson) + '}\\n</tool_call>' -}}
    {%- endfor -%}
  {%- elif m.role == 'tool' -%}
    {{- '<tool_response>\\n' + content + '\\n</tool_response>' -}}
  {%- else -%}
    {{- content -}}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking -%}{{- '<think>\\n' -}}{%- endif -%}
{%- endif -%}
"""
