"""Contract of torch_zip.py: what is written is what torch.load reads, and what torch.save wrote is found."""

import io

import pytest
import torch
from hf_ckpt_adapter.formats.tensors import DTYPES, buffer
from hf_ckpt_adapter.formats.torch_zip import tensor_zip

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_saved_chunk_is_what_torch_load_expects(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    data, tensor = buffer(dtype, shape)
    data[:] = bytes(i % 2 for i in range(len(data)))
    file = io.BytesIO()
    with tensor_zip(file, dtype, shape) as (write, written):
        write(data[:5])
        write(data[5:])
    assert written() == len(file.getvalue())
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert loaded.dtype == dtype and tuple(loaded.shape) == shape and loaded.stride() == tensor.stride()
    if shape:
        assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))
