"""Contract of dcp_write.py: the metadata is what torch itself would write."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_metadata_is_what_torch_itself_would_write(tmp_path: Path) -> None:
    tensors = {"norm.weight": torch.arange(4.0), "flags": torch.ones(2, 3, dtype=torch.bool)}
    dcp.save(tensors, checkpoint_id=tmp_path / "torch", no_dist=True)
    theirs = pickle.loads((tmp_path / "torch" / ".metadata").read_bytes())
    from hf_ckpt_adapter.formats.dcp_write import SavedChunk, metadata_bytes
    from hf_ckpt_adapter.formats.tensors import TensorInfo

    infos = {n: TensorInfo(t.dtype, tuple(t.shape)) for n, t in tensors.items()}
    places = {key.fqn: value for key, value in theirs.storage_data.items()}
    chunks = {
        n: [SavedChunk(0, t.shape[0], places[n].relative_path, places[n].offset, places[n].length)]
        for n, t in tensors.items()
    }
    ours = pickle.loads(metadata_bytes(infos, chunks, {}))
    assert type(ours) is type(theirs)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data and ours.version == theirs.version
