import pytest
import torch
from checks import EPSILON, check_op

from liger_models import ops
from liger_models.kernels.embedding import embedding


@pytest.mark.parametrize("padding_idx", [None, 0, 3, -1])
@pytest.mark.parametrize(("shape", "hidden"), [((2, 9), 8), ((5,), 3), ((0, 4), 8), ((), 300)])
def test_matches_fp64(device, shape, hidden, padding_idx):
    indices = torch.randint(0, 7, shape)
    # fp32 sums of at most 18 terms
    tolerance = 18 * EPSILON[torch.float32]
    check_op("embedding", indices, torch.randn(7, hidden), padding_idx, backend="triton", tolerance=tolerance, device=device)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_index_dtypes_and_layouts(device, index_dtype):
    indices = torch.randint(0, 7, (6, 4), dtype=index_dtype).T[::2]
    check_op("embedding", indices, torch.randn(7, 8), backend="triton", tolerance=1e-6, device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_duplicates_are_summed_in_fp32(device, dtype):
    # 300 gradients of 1 and 1 of 1/4 for one row: a sum in bf16 stays at 256, one in fp16 drops the quarter.
    indices = torch.cat((torch.full((300,), 2), torch.tensor([2, 0]))).to(device)
    weight = torch.zeros(3, 4, dtype=dtype, device=device, requires_grad=True)
    dy = torch.ones(302, 4, dtype=dtype, device=device)
    dy[300] = 0.25
    with ops.use_backend("triton"):
        ops.embedding(indices, weight).backward(dy)
    assert torch.equal(weight.grad.cpu(), torch.tensor([1.0, 0.0, 300.25])[:, None].expand(3, 4).to(dtype))


def test_padding_row_is_read_but_not_trained(device):
    weight = torch.randn(4, 3, device=device, requires_grad=True)
    with ops.use_backend("triton"):
        output = ops.embedding(torch.tensor([1, 2, 1], device=device), weight, 1)
    output.sum().backward()
    assert torch.equal(output[0], weight[1])
    assert torch.equal(weight.grad.cpu(), torch.tensor([0.0, 0.0, 1.0, 0.0])[:, None].expand(4, 3))


def test_reference_equals_stock():
    weight, indices = torch.randn(5, 4), torch.tensor([[0, 4], [2, 2]])
    stock = torch.nn.Embedding(5, 4, padding_idx=2)
    stock.weight = torch.nn.Parameter(weight.clone())
    ours = weight.clone().requires_grad_()
    output = embedding(indices, ours, 2)
    assert torch.equal(output, stock(indices))
    output.cos().sum().backward()
    stock(indices).cos().sum().backward()
    assert torch.equal(ours.grad, stock.weight.grad)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_index_out_of_range_is_an_error(device, backend):
    if device != "cpu":
        pytest.skip("an assertion on the device ends the process's use of it")
    with ops.use_backend(backend), pytest.raises(IndexError):
        ops.embedding(torch.tensor([5]), torch.randn(5, 4))
