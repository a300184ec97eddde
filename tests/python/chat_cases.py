# SPDX-License-Identifier: Apache-2.0
"""Chat templates in the forms that published models use, and conversations for them. chat_cases.json has what apply_chat_template of
transformers gives for each; written by

    .deps/peers/transformers5/bin/python tests/python/chat_cases.py tests/language_model/tokenizer/fixtures/gpt2.json
"""
import json
import sys
import tempfile
from pathlib import Path

RECORDED = Path(__file__).resolve().with_name("chat_cases.json")

CHATML = """{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou answer briefly.<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set instruction = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set instruction = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nDate: ' + (date if date is defined else '1 Jan 2026') + '\\n\\n' + instruction + eos_token }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception('no role ' + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}\
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
MISTRAL = """{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set ns.system = message.content + '\\n\\n' -%}
        {%- continue -%}
    {%- endif -%}
    {%- if loop.first or (loop.index0 == 1 and ns.system) -%}
        {{- bos_token -}}
    {%- endif -%}
    {%- if message.role == 'user' -%}
        {{- '[INST] ' + ns.system + message.content + ' [/INST]' -}}
        {%- set ns.system = '' -%}
    {%- else -%}
        {{- ' ' + message.content | trim + eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""
QWEN3 = """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\\n' + (message.reasoning_content | default('') | trim('\\n')) + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.content is string %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content | tojson + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "qwen3": QWEN3}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def turns(*texts, system=None):
    messages = [] if system is None else [{"role": "system", "content": system}]
    return messages + [{"role": "user" if number % 2 == 0 else "assistant", "content": text} for number, text in enumerate(texts)]


CONVERSATIONS = [
    {"messages": turns("Hi", "Hello.")},
    {"messages": turns("Hi", "Hello.", "And?", " More. ")},
    {"messages": turns("  What is 2+2?\n", "4", "Sure?"), "generation_prompt": True},
    {"messages": turns("Who?", "I.", system="Be brief.")},
    {"messages": turns("Who?", "I.", "Why?", system="  Be\nbrief. "), "generation_prompt": True},
    {"messages": turns("<b>&\"'\\ é 😀 <|im_end|>", "x</think>\n\ny", "{{ bos_token }}", "{% if %}")},
    {"messages": [{"role": "user", "content": "Think"}, {"role": "assistant", "content": "No", "reasoning": "\nWell\n", "tool_calls": None}]},
    {"messages": turns("Q"), "generation_prompt": True, "variables": {"enable_thinking": False, "date": "2 Feb 2026"}},
    {"messages": turns("", "")},
    {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]},
]


def cases():
    """(name of the template, number of the conversation, conversation)"""
    return [(name, number, conversation) for name in TEMPLATES for number, conversation in enumerate(CONVERSATIONS)]


def write_model(folder, template, as_file=False):
    """The directory of a model with a chat template, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**TOKENS, "tokenizer_class": "PreTrainedTokenizerFast"}
    if as_file:
        (folder / "chat_template.jinja").write_text(template)
    else:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def record(tokenizer_file):
    import transformers
    recorded = []
    with tempfile.TemporaryDirectory() as folder:
        for name, number, conversation in cases():
            model = write_model(Path(folder) / name, TEMPLATES[name])
            (model / "tokenizer.json").write_bytes(Path(tokenizer_file).read_bytes())
            tokenizer = transformers.AutoTokenizer.from_pretrained(model)
            try:
                text = tokenizer.apply_chat_template(conversation["messages"], tokenize=False, add_generation_prompt=conversation.get(
                    "generation_prompt", False), **conversation.get("variables", {}))
            except Exception as failure:
                text = None
                print(name, number, failure, file=sys.stderr)
            recorded.append({"template": name, "conversation": number, "text": text})
    return {"transformers": transformers.__version__, "cases": recorded}


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(record(sys.argv[1]), indent=1, ensure_ascii=False) + "\n")
