"""Contract: what a training token is, no state that a tokenizer's files carry for another use changes: ids of a text
are the model's with nothing added, ids of a conversation are `apply_chat_template`'s."""

import json
import shutil
from itertools import product

import pytest
from chat_tokenizer import FOLDER, TEMPLATE
from titan_recipes.data.source import Source
from titan_recipes.data.tokenizer import TrainingTokenizer, training_tokenizer
from titan_recipes.data.tokens import token_store
from titan_recipes.errors import UserError
from tokenizers import Tokenizer
from torchtitan.components.tokenizer import HuggingFaceTokenizer

TEXT = "The quick brown fox\n\n  jumps over 12 lazy dogs; für dich \U0001f600. " * 4
TALK = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "  Yes. " + TEXT}]

TRUNCATION = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}


def padding(strategy):
    return {
        "strategy": strategy, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip


def template(before, after):
    """A post-processor that puts special tokens around each text, as those of BERT and of Llama do."""
    special = sorted({*before, *after})
    pieces = [
        *({"SpecialToken": {"id": name, "type_id": 0}} for name in before),
        {"Sequence": {"id": "A", "type_id": 0}},
        *({"SpecialToken": {"id": name, "type_id": 0}} for name in after),
    ]
    return {
        "type": "TemplateProcessing", "single": pieces, "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [IDS[name]], "tokens": [name]} for name in special},
    }  # fmt: skip


IDS = {"<|endoftext|>": 2021, "<|im_start|>": 2022, "<|im_end|>": 2023}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PROCESSORS = {
    "no processor": None,
    "trimmed offsets": BYTES,
    "begins": template(["<|endoftext|>"], []),
    "ends": template([], ["<|endoftext|>"]),
    "both": {"type": "Sequence", "processors": [BYTES, template(["<|im_start|>"], ["<|im_end|>"])]},
}
LIMITS = {
    "whole": {},
    "cut": {"truncation": TRUNCATION},
    "cut left": {"truncation": TRUNCATION | {"direction": "Left", "stride": 2}},
    "filled to 64": {"padding": padding({"Fixed": 64})},
    "filled to 4096": {"padding": padding({"Fixed": 4096}) | {"direction": "Left"}},
    "filled to the longest": {"padding": padding("BatchLongest")},
    "cut and filled": {"truncation": TRUNCATION, "padding": padding({"Fixed": 16})},
}
TABLE = list(product(PROCESSORS, LIMITS))


def written(folder, processor=None, **changes):
    content = json.loads((FOLDER / "tokenizer.json").read_text())
    known = {token["content"]: token["id"] for token in content["added_tokens"]}
    text = json.dumps(content | {"post_processor": processor} | changes)
    for name, number in IDS.items():
        text = text.replace(f'"ids": [{number}], "tokens": ["{name}"]', f'"ids": [{known[name]}], "tokens": ["{name}"]')
    (folder / "tokenizer.json").write_text(text)
    shutil.copy(FOLDER / "tokenizer_config.json", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.parametrize(("processor", "limits"), TABLE, ids=[f"{a}, {b}" for a, b in TABLE])
def test_text_and_conversations_are_whole_with_nothing_added(tmp_path, processor, limits):
    from transformers import AutoTokenizer

    plain = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    folder = written(tmp_path, PROCESSORS[processor], **LIMITS[limits])
    tokenizer = TrainingTokenizer(tokenizer_path=str(folder))
    texts = [TEXT, "short", TEXT * 3]
    store = token_store(Source(documents=lambda: texts), tokenizer)
    found = [store.tokens_T[store.slice_of(n)].tolist() for n in range(3)]
    assert found == [[*plain.encode(text, add_special_tokens=False).ids, tokenizer.eos_id] for text in texts]
    theirs = AutoTokenizer.from_pretrained(folder)
    chats = token_store(Source(documents=lambda: [TALK], format="chat"), tokenizer)
    assert chats.tokens_T.tolist() == theirs.apply_chat_template(TALK, return_dict=False)
    # Spaces belong to what the assistant said, wherever a processor would trim the tokens' places.
    said = tokenizer.decode(chats.tokens_T[chats.learned_T].tolist(), skip_special_tokens=False)
    assert said == f"<think>\n\n</think>\n\n{TALK[1]['content']}<|im_end|>"


def test_torchtitans_own_tokenizer_is_taken_for_its_folder(tmp_path):
    stock = HuggingFaceTokenizer(tokenizer_path=str(written(tmp_path, truncation=TRUNCATION)))
    assert type(training_tokenizer(stock)) is TrainingTokenizer
    assert len(token_store(Source(documents=lambda: [TEXT]), stock).tokens_T) > 100


def test_named_templates_give_the_default_and_the_one_for_tools(tmp_path):
    folder = written(tmp_path)
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools | length }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    tokenizer = TrainingTokenizer(tokenizer_path=str(folder))
    assert tokenizer.apply_chat_template(TALK) == "plain"
    assert tokenizer.apply_chat_template(TALK, tools=[{"name": "add"}]) == "with 1"
    tokenizer.set_chat_template(named[1:])
    with pytest.raises(UserError, match="has the chat templates tool_use, and no default"):
        tokenizer.apply_chat_template(TALK)
    with pytest.raises(UserError, match="expected a template, or a list of"):
        tokenizer.set_chat_template(["plain"])


def test_special_tokens_and_generation_marks_are_those_of_transformers(tmp_path):
    from transformers import AutoTokenizer

    folder = written(tmp_path)
    marked = (
        "{{ eos_token }}{% for m in messages %}[{{ m.role }}]"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(marked)
    tokenizer = TrainingTokenizer(tokenizer_path=str(folder))
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        TALK, return_dict=True, return_assistant_tokens_mask=True
    )
    store = token_store(Source(documents=lambda: [TALK], format="chat"), tokenizer)
    assert store.tokens_T.tolist() == theirs["input_ids"]
    assert store.learned_T.astype(int).tolist() == theirs["assistant_masks"]
