"""Contract: a layout changes where numbers live, not what they are; a resumed run goes on as if it had not stopped.

One rank trains a step and saves; every run here continues from that step with the same global batch (8 sequences), so
that weights, optimizer and data are the same to the bit and only the layout differs. test_parallel.py has the other
layouts, without the app around them.

Tolerance 1e-5 on a loss near 7: float32 resolves 5e-7 there, and sums taken in another order over 1,024 tokens and a
few layers wander by a few of those (the largest seen in five steps is 1.4e-6). Gradient norms: 1e-4 relative, 1.5e-5
seen.
"""

import shutil

import pytest

from integration.app import ROOT, fork_app, metrics

STEPS = 6
COMMON = (
    "untied.py:debug",
    "--device",
    "cpu",
    "--training.steps",
    str(STEPS),
    "--metrics.log_freq",
    "1",
    "--checkpoint.interval",
    "3",
    "--checkpoint.keep_latest_k",
    "0",
    "--training.global_batch_size",
    "8",
    "--training.seq_len",
    "128",
    "--validator.freq",
    "6",
)
ALONE = ("--training.local_batch_size", "8")  # one data-parallel rank takes the whole batch
LAYOUTS = {
    "cp2": (*ALONE, "--nproc", "2", "--parallelism.context_parallel_degree", "2"),  # shards parameters as FSDP does
    "pp2": (
        *ALONE,
        "--nproc",
        "2",
        "--parallelism.pipeline_parallel_degree",
        "2",
        "--parallelism.pipeline_parallel_microbatch_size",
        "4",
        "activation_checkpoint:full",
    ),
}
UNTIED = """\
from dataclasses import replace

import debug as base
from titan_recipes.models.spec import native


def debug() -> "Trainer.Config":
    config = base.debug()
    config.model_spec = native(replace(config.model_spec.model.qwen3, tie_word_embeddings=False), flavor="untied")
    return config
"""
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An unbroken run on one rank, with checkpoints at 1, 3 and 6."""
    folder = tmp_path_factory.mktemp("reference")
    write_recipe(folder)
    ended = fork_app(*COMMON, *ALONE, "--checkpoint.enable_first_step_checkpoint", "--dump_folder", "run", cwd=folder)
    assert ended.code == 0, ended.out
    return folder / "run"


def write_recipe(folder):
    """`debug` with untied weights, which a pipeline needs."""
    (folder / "untied.py").write_text(UNTIED)
    shutil.copy(ROOT / "recipes" / "debug.py", folder)
    shutil.copytree(ROOT / "recipes" / "debug_tokenizer", folder / "debug_tokenizer")


def resumed(reference, folder, step, *arguments):
    """A run that continues from the reference's checkpoint of `step`."""
    write_recipe(folder)
    run = folder / "run"
    (run / "checkpoint").mkdir(parents=True)
    shutil.copytree(reference / "checkpoint" / f"step-{step}", run / "checkpoint" / f"step-{step}")
    ended = fork_app(*COMMON, *arguments, "--resume", "--dump_folder", "run", cwd=folder)
    assert ended.code == 0, ended.out
    assert f"resumed from run/checkpoint/step-{step}" in ended.out
    return (
        ended,
        {r["step"]: r for r in metrics(run) if "loss" in r},
        [r for r in metrics(run) if "validation_loss" in r],
    )


def test_a_resumed_run_has_the_losses_of_the_unbroken_one_and_reads_no_initial_weights(reference, tmp_path):
    """Case 084: a run's own checkpoint wins over initial weights, and the start says so."""
    unbroken = {r["step"]: (r["loss"], r["grad_norm"]) for r in metrics(reference) if "loss" in r}
    initial = ("--checkpoint.initial_load_path", str(reference / "hf"), "--checkpoint.initial_load_in_hf")
    ended, records, _ = resumed(reference, tmp_path, 3, *ALONE, *initial)
    assert f"{reference / 'hf'} was not read, since the run has a checkpoint" in ended.out
    assert {s: (r["loss"], r["grad_norm"]) for s, r in records.items()} == {s: unbroken[s] for s in (4, 5, 6)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_single_process_losses(reference, tmp_path, layout):
    unbroken = {r["step"]: r for r in metrics(reference) if "loss" in r}
    ended, records, validation = resumed(reference, tmp_path, 1, *LAYOUTS[layout])
    assert sorted(records) == list(range(2, STEPS + 1))
    for step, record in records.items():
        assert record["loss"] == pytest.approx(unbroken[step]["loss"], abs=TOLERANCE), f"step {step}"
        assert record["grad_norm"] == pytest.approx(unbroken[step]["grad_norm"], rel=1e-4), f"step {step}"
        assert record["n_tokens_seen"] == unbroken[step]["n_tokens_seen"]
    expected = [r["validation_loss"] for r in metrics(reference) if "validation_loss" in r][-1]
    assert validation[-1]["validation_loss"] == pytest.approx(expected, abs=TOLERANCE)  # every held-out token, once
    assert "0 missing keys, 0 unexpected" in ended.out


def test_every_save_has_the_same_clean_keys(reference):
    from torch.distributed.checkpoint import FileSystemReader

    keys = [
        set(FileSystemReader(reference / "checkpoint" / f"step-{step}").read_metadata().state_dict_metadata)
        for step in (1, 3, 6)  # first step, interval, last
    ]
    assert keys[0] == keys[1] == keys[2]
    assert not [key for key in keys[0] if "_orig_mod" in key or "_checkpoint_wrapped" in key]


def test_a_recipe_that_does_not_fit_the_checkpoint_is_refused_by_name(reference, tmp_path):
    write_recipe(tmp_path)
    shutil.copytree(reference, tmp_path / "run")
    (tmp_path / "wider.py").write_text(
        "import untied as base\n\n\ndef debug() -> 'Trainer.Config':\n"
        "    config = base.debug()\n    model = config.model_spec.model\n    model.layers = model.layers[:3]\n"
        "    for layer in model.layers:\n"
        "        layer.feed_forward.w1.out_features = layer.feed_forward.w3.out_features = 256\n"
        "        layer.feed_forward.w2.in_features = 256\n    return config\n"
    )
    ended = fork_app("wider.py:debug", "--device", "cpu", "--resume", "--dump_folder", "run", cwd=tmp_path)
    assert ended.code == 1
    assert "does not fit this recipe" in ended.out and "Traceback" not in ended.out
    assert "unexpected: layers.3." in ended.out
    assert "layers.0.feed_forward.w1.weight: (512, 192) in the checkpoint, (256, 192) here" in ended.out


def test_training_starts_from_a_read_only_hugging_face_folder_and_says_so(reference, tmp_path):
    write_recipe(tmp_path)
    hf = tmp_path / "hf"
    shutil.copytree(reference / "hf", hf)
    before = {file.name: file.stat().st_mtime_ns for file in hf.iterdir()}
    hf.chmod(0o555)
    try:
        ended = fork_app(
            *COMMON,
            *ALONE,
            "--checkpoint.initial_load_path",
            str(hf),
            "--checkpoint.initial_load_in_hf",
            "--training.steps",
            "1",
            "--lr_scheduler.warmup_steps",
            "0",
            "--dump_folder",
            "run",
            cwd=tmp_path,
        )
    finally:
        hf.chmod(0o755)
    assert ended.code == 0, ended.out
    assert f"weights: loaded from {hf}" in ended.out
    trained, fresh = [r["loss"] for r in metrics(reference) if "loss" in r][-1], metrics(reference)[0]["loss"]
    assert ended.losses[1] < (trained + fresh) / 2  # these weights, not random ones
    assert before == {file.name: file.stat().st_mtime_ns for file in hf.iterdir()}
