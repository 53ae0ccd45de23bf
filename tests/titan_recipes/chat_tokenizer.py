"""The debug tokenizer with a template that has the habits of Qwen3's: an optional system turn, tools, and thinking that
is written out in the last turn and left out of earlier ones."""

import json
import shutil
from pathlib import Path

from titan_recipes.data.tokenizer import TrainingTokenizer

FOLDER = Path(__file__).parents[2] / "recipes" / "debug_tokenizer"

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools ' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content.lstrip('\\n') }}
        {%- if message.tool_calls is defined %}
            {{- '<tool_call>' + message.tool_calls | tojson + '</tool_call>' }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


THINKING = TEMPLATE.replace(
    "{{- '<|im_start|>assistant\\n' }}",
    """{%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}""",
)
"""The template above, but thinking is taken out of the content at the last closing mark, as Qwen3's template does."""

assert THINKING != TEMPLATE


def tokenizer(folder: Path, template: str | None = TEMPLATE) -> TrainingTokenizer:
    """Write one in `folder`, with `template` (None: without any)."""
    shutil.copyfile(FOLDER / "tokenizer.json", folder / "tokenizer.json")
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return TrainingTokenizer(tokenizer_path=str(folder))
