"""Contract: a line of metrics that cannot be written is reported, and ends no run."""

import logging
from types import SimpleNamespace

from titan_recipes.train.metrics import RunMetrics, read_metrics


def test_a_metrics_file_that_cannot_be_written_warns_with_the_step(tmp_path, caplog):
    metrics = object.__new__(RunMetrics)
    metrics.logger = SimpleNamespace(log=lambda scalars, step: None)
    metrics.prints, metrics.file = True, tmp_path / "metrics.jsonl"
    metrics.file.mkdir()
    with caplog.at_level(logging.WARNING):
        metrics._write(7, {"step": 7, "loss": 1.0})
    assert "step 7: the metrics were not written" in caplog.text
    metrics.file.rmdir()
    metrics._write(8, {"step": 8, "loss": 1.0})
    assert read_metrics(metrics.file) == [{"step": 8, "loss": 1.0}]
