"""Contract: what ends a learned turn is found in the data, for whatever is published to stop there."""

import pytest
from chat_tokenizer import tokenizer
from titan_recipes.data.chat import CHATML
from titan_recipes.data.loader import TextDataLoader
from titan_recipes.data.source import Source
from titan_recipes.data.taught import Taught, taught

TALKS = [
    [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}] * (1 + n % 3) for n in range(30)
]


def config(**options):
    return TextDataLoader.Config(documents=lambda: TALKS, format="chat", **options)


def test_the_end_of_a_turn_is_the_token_that_every_turn_ends_in(tmp_path):
    tok = tokenizer(tmp_path)
    assert taught(config(), tok) == Taught(tok.token_to_id("<|im_end|>"))


def test_a_template_that_is_not_the_tokenizers_own_is_taught_too(tmp_path):
    tok = tokenizer(tmp_path, template=None)
    for _ in range(2):  # the second time the tokens are there already
        assert taught(config(), tok) == Taught(tok.token_to_id("<|im_end|>"), CHATML)


@pytest.mark.parametrize("marked", ["{{ m.content }}<|box_end|>", "{{ m.content }}"])
def test_a_template_that_marks_turns_itself_teaches_what_it_marks(tmp_path, marked):
    marks = "{% for m in messages %}<|box_start|>{% generation %}" + marked + "{% endgeneration %}\n{% endfor %}"
    only = marks.replace("{% for m in messages %}", "{% for m in messages if m.role == 'assistant' %}")
    tok = tokenizer(tmp_path, only)
    talks = [[{"role": "assistant", "content": "one"}], [{"role": "assistant", "content": "two"}]]
    found = taught(TextDataLoader.Config(documents=lambda: talks, format="chat"), tok)
    assert found.end_of_turn == (tok.token_to_id("<|box_end|>") if "box" in marked else None)


def test_texts_teach_no_turns_and_a_mixture_those_of_its_conversations(tmp_path):
    tok = tokenizer(tmp_path)
    assert taught(TextDataLoader.Config(documents=lambda: ["a text"]), tok) == Taught()
    sources = [
        Source(documents=lambda: ["a text"], weight=1),
        Source(documents=lambda: TALKS, format="chat", weight=1),
    ]
    assert taught(TextDataLoader.Config(sources=sources), tok).end_of_turn == tok.token_to_id("<|im_end|>")
