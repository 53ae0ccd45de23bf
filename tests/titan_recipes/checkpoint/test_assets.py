"""Contract: what was taught is what is published: where to stop, and the template that conversations were written
with.
"""

import json

import pytest
from chat_tokenizer import FOLDER
from titan_recipes.checkpoint.assets import write_assets
from titan_recipes.data.taught import Taught


def written(folder, taught, tokenizer=FOLDER):
    write_assets(
        folder,
        config={"model_type": "qwen3", "eos_token_id": 10},
        tokenizer_folder=tokenizer,
        eos_token_id=10,
        taught=taught,
        recipe=None,
        recipe_source=None,
    )
    return tuple(json.loads((folder / name).read_text()) for name in ("config.json", "generation_config.json"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, [12, 10]),
        ({"eos_token_id": 10}, [12, 10]),
        ({"eos_token_id": [12, 10]}, [12, 10]),
        ({"eos_token_id": [10, 12], "temperature": 0.6}, [12, 10]),
        ({"temperature": 0.6}, [12, 10]),
    ],
)
def test_a_fine_tuned_base_stops_at_the_end_of_a_turn(tmp_path, before, after):
    """A base's files know <|endoftext|> alone: generation ran on to its limit."""
    tokenizer = tmp_path / "base"
    tokenizer.mkdir()
    if before is not None:
        (tokenizer / "generation_config.json").write_text(json.dumps(before))
    config, generation = written(tmp_path / "out", Taught(12), tokenizer)
    assert config["eos_token_id"] == 12 and generation["eos_token_id"] == after
    assert generation.get("temperature") == (before or {}).get("temperature")


def test_a_run_on_texts_publishes_what_its_tokenizer_came_with(tmp_path):
    config, generation = written(tmp_path / "a", Taught())
    assert (config["eos_token_id"], generation) == (10, {"eos_token_id": 10, "pad_token_id": 10})
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": [7]}')
    _, generation = written(tmp_path / "b", Taught(), tmp_path / "base")
    assert generation == {"eos_token_id": [7]}


def test_a_template_of_ours_is_published_with_the_model(tmp_path):
    written(tmp_path / "out", Taught(12, "{{ messages }}"))
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
