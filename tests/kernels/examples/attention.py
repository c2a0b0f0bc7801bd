"""Example calls of attention."""

import torch


def small():
    """One small fp32 call with real values, for test_every_op.py."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, heads, 8, generator=generator).transpose(1, 2) for heads in (4, 2, 2))
    last_key = torch.arange(3, dtype=torch.int32)[None]
    key_mask = torch.tensor([[True, True, True], [False, True, True]])
    return q, k, v, last_key - 1, last_key, key_mask, torch.randn(4, generator=generator), 0.4, 3.0


def calls():
    """Calls that together launch the kernels' variants, in the sizes of real models, for test_triton_targets.py."""
    for heads, key_value_heads, head_dim, dtype, has_sinks, softcap, has_mask in [
        (64, 8, 64, torch.bfloat16, True, None, False),  # GPT-OSS
        (16, 8, 256, torch.bfloat16, False, 50.0, False),  # Gemma 2
        (32, 8, 128, torch.bfloat16, False, None, True),  # Llama
        (4, 4, 24, torch.float16, False, None, False),
        (8, 2, 256, torch.float32, True, 50.0, True),
    ]:
        q, k, v = (
            torch.zeros(2, 32, count, head_dim, dtype=dtype, requires_grad=True).transpose(1, 2)
            for count in (heads, key_value_heads, key_value_heads)
        )
        last_key = torch.arange(32, dtype=torch.int32)[None]
        sinks = torch.zeros(heads, dtype=dtype, requires_grad=True) if has_sinks else None
        mask = torch.ones(2, 32, dtype=torch.bool) if has_mask else None
        yield q, k, v, last_key - 7, last_key, mask, sinks, head_dim**-0.5, softcap
    q = torch.zeros(2, 32, 1, 128, dtype=torch.bfloat16)  # a decoding step
    cache = torch.zeros(2, 8, 100, 128, dtype=torch.bfloat16)
    yield q, cache, cache, last_key[:, :1], last_key[:, -1:], None, None, 0.1
