"""Example calls of fused_moe."""

import torch

GPT_OSS = (1.702, 7.0, 1.0)


def small():
    """One small fp32 call with real values, for test_every_op.py."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 8), (3, 2), (4, 12, 8), (4, 8, 6), (4, 12), (4, 8)]
    x, expert_weights, *weights = (torch.randn(shape, generator=generator) for shape in shapes)
    expert_ids = torch.tensor([[3, 0], [0, 1], [1, 3]])  # nothing for expert 2
    return x, expert_ids, expert_weights, *weights, 1.702, 1.0, 1.0


def calls():
    """Calls that together launch the kernels' variants, on a slice of real models' widths, for test_triton_targets.py."""
    for dtype, bias, options in [
        (torch.bfloat16, True, GPT_OSS),
        (torch.bfloat16, False, ()),
        (torch.float32, True, GPT_OSS),
    ]:
        x, gate_up_weight, down_weight, gate_up_bias, down_bias = (
            torch.zeros(shape, dtype=dtype, requires_grad=True)
            for shape in [(4, 2880), (32, 256, 2880), (32, 2880, 128), (32, 256), (32, 2880)]
        )
        expert_ids, expert_weights = torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, 4, dtype=dtype, requires_grad=True)
        biases = (gate_up_bias, down_bias) if bias else (None, None)
        yield x, expert_ids, expert_weights, gate_up_weight, down_weight, *biases, *options
        frozen = [t.detach() for t in (gate_up_weight, down_weight)]
        yield x, expert_ids, expert_weights, *frozen, *(b if b is None else b.detach() for b in biases), *options
        yield x.detach(), expert_ids, expert_weights.detach(), frozen[0], down_weight, *biases, *options
