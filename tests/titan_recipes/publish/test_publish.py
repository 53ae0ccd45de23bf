"""Contract: a wrong export ends the run with an error, once all that the run left has been said."""

from types import SimpleNamespace

import pytest
import torch
from titan_recipes.errors import UserError
from titan_recipes.publish import publish as module


def published(tmp_path, monkeypatch, **found):
    result = {"transformers": "5", "missing": [], "unexpected": [], "max_difference": 0.0} | found
    names = SimpleNamespace(folder="checkpoint", save_tb_folder="tb", dtype="float32")
    trainer = SimpleNamespace(
        config=SimpleNamespace(dump_folder=str(tmp_path), checkpoint=names, metrics=names, training=names),
        checkpointer=SimpleNamespace(saved_step=3),
        metrics_processor=SimpleNamespace(validation_loss=None),
        tokenizer=None,
        hf_config={},
        published_dtype=torch.bfloat16,
    )
    said = []
    report = SimpleNamespace(side_state={"layers.0.moe.expert_bias_E": 0.5}, warnings=["one row is NaN"])
    for name, value in {
        "say": said.append,
        "export_step": lambda *args, **options: report,
        "read_metrics": lambda file: [],
        "draw_loss_curve": lambda records, file, references: file,
        "_reference_losses": lambda config, tokenizer: {},
        "_check_reload": lambda trainer, checkpoint, hf: result,
    }.items():
        monkeypatch.setattr(module, name, value)
    try:
        module.publish(trainer)
    except UserError as error:
        return str(error), "\n".join(said)
    return None, "\n".join(said)


@pytest.mark.parametrize("found", [{"missing": ["a"]}, {"unexpected": ["b"]}, {"max_difference": float("nan")}])
def test_a_wrong_export_is_an_error_after_all_was_said(tmp_path, monkeypatch, found):
    error, said = published(tmp_path, monkeypatch, **found)
    assert error is not None and "is a wrong export" in error and "step-3" in error
    assert "WRONG EXPORT" in said and "metrics " in said


def test_what_a_folder_cannot_hold_and_its_dtype_are_said(tmp_path, monkeypatch):
    error, said = published(tmp_path, monkeypatch)
    assert error is None
    assert "bfloat16, as the folder that training started from" in said
    assert "1 tensors of the checkpoint have no place there, such as layers.0.moe.expert_bias_E" in said
    assert "warning: one row is NaN" in said
