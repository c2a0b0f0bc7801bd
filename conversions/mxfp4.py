"""MXFP4: blocks of 32 four-bit numbers that share a power of two, exactly as in the OCP Microscaling formats.

A number is one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 or its negative (E2M1: a sign bit, two exponent bits, one mantissa bit), two to a
byte, the earlier one in the low four bits. A block's scale is a byte `e` that stands for 2**(e - 127); 255 stands for NaN.

Source: Open Compute Project 2023, Microscaling Formats (MX) specification 1.0, sections 5.3.3 and 5.4; the layout of tensors is
that of GPT-OSS's checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: How many numbers share a scale.
BLOCK = 32

# The integer as wide as two numbers.
_PAIR = {torch.bfloat16: torch.int32, torch.float32: torch.int64}
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# 6 * 2**(e - 127) is past the largest finite number from here on (in bfloat16 and float32).
_OVERFLOWING_SCALE = 253


@dataclass(frozen=True)
class Origin:
    """What the quantised form of a weight has beyond its values, so that an unchanged weight gets its own bits back.

    A block's scale does not follow from its numbers (1 with the scale 2 is 2 with the scale 1), and numbers that overflowed do
    not say what they were. It takes 1/64 of the weight in bfloat16, and lies in host memory.

    Attributes:
        scales: [experts, rows, blocks], uint8.
        overflowing: [n], flat indices of the blocks whose numbers may have overflowed.
        overflowing_codes: [n, 16], uint8: these blocks.
    """

    scales: Tensor
    overflowing: Tensor
    overflowing_codes: Tensor

    @classmethod
    def of(cls, blocks: Tensor, scales: Tensor) -> Origin:
        """The origin of what `dequantise(blocks, scales, ...)` gives."""
        overflowing = (scales.reshape(-1) >= _OVERFLOWING_SCALE).nonzero().squeeze(1)
        codes = blocks.reshape(-1, BLOCK // 2)[overflowing]
        return cls(*(tensor.to("cpu", copy=True) for tensor in (scales, overflowing, codes)))


def dequantise(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of quantised experts.

    Args:
        blocks: [experts, rows, blocks, 16], uint8.
        scales: [experts, rows, blocks], uint8.
        dtype: of the result. bfloat16 and float32 hold every number exactly, but for those past their largest: infinity.

    Returns:
        [experts, rows, blocks * 32] on the device of `blocks`.
    """
    experts, rows, count, _ = blocks.shape
    compute = dtype if dtype in _PAIR else torch.float32
    pairs = _pairs(compute, blocks.device)
    result = torch.empty(experts, rows, count * BLOCK, dtype=dtype, device=blocks.device)
    for expert in range(experts):  # one at a time: the intermediate tensors are larger than the blocks
        numbers = pairs[blocks[expert].to(torch.int32)].view(compute)
        result[expert] = (numbers * _power_of_two(scales[expert]).to(compute).unsqueeze(-1)).flatten(-2)
    return result


def quantise(weight: Tensor, origin: Origin | None = None) -> tuple[Tensor, Tensor]:
    """The blocks and scales nearest to experts' weights; those that they came from where a block is unchanged.

    A new block's scale is the smallest power of two with which its largest number is at most 6, as in GPT-OSS's own
    checkpoints; numbers are rounded to the nearest, and to the even code from the middle.

    Args:
        weight: [experts, rows, columns], floating point, columns a multiple of 32.
        origin: of these weights, if they were quantised before.

    Returns:
        Blocks [experts, rows, columns / 32, 16] and scales [experts, rows, columns / 32], uint8, on the device of `weight`.

    Raises:
        ValueError: columns is no multiple of 32, or a changed block has a number that is not finite.
    """
    experts, rows, columns = weight.shape
    if columns % BLOCK:
        raise ValueError(f"its rows have {columns} numbers, which is no multiple of {BLOCK}")
    blocks = torch.empty(experts, rows, columns // BLOCK, BLOCK // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(experts, rows, columns // BLOCK, dtype=torch.uint8, device=weight.device)
    for expert in range(experts):
        numbers = weight[expert].unflatten(-1, (-1, BLOCK))
        first = expert * rows * (columns // BLOCK)
        blocks[expert], scales[expert] = _quantise_expert(numbers, None if origin is None else _slice(origin, expert, first))
    return blocks, scales


def _slice(origin: Origin, expert: int, first: int) -> Origin:
    """The origin of one expert, whose blocks begin with number `first`."""
    scales = origin.scales[expert]
    inside = (origin.overflowing >= first) & (origin.overflowing < first + scales.numel())
    return Origin(scales, origin.overflowing[inside] - first, origin.overflowing_codes[inside])


def _quantise_expert(numbers: Tensor, origin: Origin | None) -> tuple[Tensor, Tensor]:
    """Codes [rows, blocks, 16] and scales [rows, blocks] of [rows, blocks, 32] numbers."""
    if origin is None:
        return _quantise_anew(numbers)
    scales = origin.scales.to(numbers.device)
    codes = _codes(numbers, scales)
    codes.view(-1, BLOCK // 2)[origin.overflowing.to(numbers.device)] = origin.overflowing_codes.to(numbers.device)
    changed = ~_same_bits(dequantise(codes[None], scales[None], numbers.dtype)[0].view_as(numbers), numbers)
    if changed.any():
        scales = scales.clone()
        codes[changed], scales[changed] = _quantise_anew(numbers[changed])
    return codes, scales


def _quantise_anew(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., 16] and the smallest scales [...] of [..., 32] numbers."""
    infinite = ~numbers.isfinite().all(-1)
    if infinite.any():
        raise ValueError(f"{int(infinite.sum())} of its blocks have numbers that are not finite")
    scales = _smallest_scales(numbers)
    return _codes(numbers, scales), scales


def _smallest_scales(numbers: Tensor) -> Tensor:
    """The exponents of the smallest powers of two that are at least a sixth of a block's largest magnitude; 0 for zeros."""
    sixth = numbers.abs().amax(-1).float() / _MAGNITUDES[-1]
    return ((sixth.view(torch.int32) + 0x7FFFFF) >> 23).clamp(0, 254).to(torch.uint8)


def _codes(numbers: Tensor, scales: Tensor) -> Tensor:
    """[..., 32] numbers over their scales [...], rounded to E2M1, two to a byte: [..., 16]."""
    size = (numbers.float() * _power_of_two(254 - scales.to(torch.int32)).unsqueeze(-1)).abs_()
    # The gaps between codes are 0.5 below 2, 1 below 4 and 2 from there. round() takes the even neighbour, as the codes do.
    codes = torch.where(size < 2, (2 * size).round_(), torch.where(size < 4, size.round() + 2, (0.5 * size).round_() + 4))
    codes = codes.clamp_(max=7).to(torch.uint8) | (torch.signbit(numbers).to(torch.uint8) << 3)
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _same_bits(one: Tensor, other: Tensor) -> Tensor:
    """Whether the last dimension is equal bit by bit: -0.0 is not 0.0."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return (one.contiguous().view(bits) == other.contiguous().view(bits)).all(-1)


def _power_of_two(exponents: Tensor) -> Tensor:
    """2**(e - 127) in fp32 by its bits: a power function would be a rounding off, and 2**-127 is subnormal."""
    exponents = exponents.to(torch.int32)
    bits = torch.where(exponents == 0, 0x00400000, exponents << 23)
    return torch.where(exponents == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """For each byte the two numbers in it, side by side in one integer: [256]. Looking up whole pairs halves the work."""
    values = torch.tensor([sign * magnitude for sign in (1.0, -1.0) for magnitude in _MAGNITUDES], dtype=dtype, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=-1).view(_PAIR[dtype]).squeeze(-1)
