"""Insert and gather for the 584-byte record in plain torch, with one fault.

Which one, the tool says: `dsv4num verify --impl examples.my_kernels:my_`.

The functions have the engine's names with the prefix my_, and no argument that says which record it
is, so that they are taken for `v4`. What they must do is SPEC 3.1 and 4.2 to 5.2; what they must not
touch, 6.2.
"""

import torch

NOPE, DATA, SCALES, GROUP = 448, 576, 8, 64


def my_quantize_and_insert_k_cache(k, k_cache, slot_mapping, block_size):
    """Writes a record for each slot that is not negative and lies in the cache."""
    kept = (slot_mapping >= 0) & (slot_mapping < len(k_cache) * block_size)
    rows, slots = k[: len(slot_mapping)][kept], slot_mapping[kept].long()
    groups = rows[:, :NOPE].float().unflatten(1, (-1, GROUP))
    amax = torch.where(groups.isnan(), 0, groups).abs().amax(-1)

    scale = (amax / 448).clamp(min=1e-4)
    mantissa, exponent = scale.frexp()
    exponent -= (mantissa == 0.5).int()  # the power of two that is not below the scale
    exponent = torch.where(amax.isinf(), 128, exponent)

    inverse = torch.where(amax.isinf(), 0, (127 - exponent << 23).view(torch.float32))
    scaled = groups * inverse[..., None]
    codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(scaled.isnan(), 0x7F, codes).flatten(1).to(torch.uint8)

    memory, data, scales = places(k_cache, slots // block_size, slots % block_size, block_size)
    rope = rows[:, NOPE:].contiguous().view(torch.uint8)
    memory[data] = torch.cat([codes, rope], 1)
    memory[scales] = torch.nn.functional.pad((exponent + 127).to(torch.uint8), (0, 1))  # pad byte 0


def my_dequantize_and_gather_k_cache(
    out, k_cache, seq_lens, gather_lens, block_table, block_size, offset
):
    """Reads the last rows of each sequence; what lies outside any array is left alone."""
    for request, length in enumerate(seq_lens.tolist()):
        wanted = length if gather_lens is None else int(gather_lens[request])
        if length < 0 or wanted < 0:
            continue
        row = torch.arange(min(wanted, out.shape[1] - offset), device=out.device)
        position = length - wanted + row
        inside = (position >= 0) & (position < block_table.shape[1] * block_size)
        row, position = row[inside], position[inside]
        page = block_table[request, position // block_size].long()
        there = (page >= 0) & (page < len(k_cache))
        row, page, position = row[there], page[there], position[there]

        memory, data, scales = places(k_cache, page, position % block_size, block_size)
        record, scale_codes = memory[data], memory[scales][:, :-1].int()
        values = record[:, :NOPE].view(torch.float8_e4m3fn).float().unflatten(1, (-1, GROUP))
        bits = torch.where(scale_codes == 0, 1 << 22, scale_codes << 23)  # 0 is 2**-127
        scale = torch.where(scale_codes == 255, torch.nan, bits.view(torch.float32))
        values = (values * scale[..., None]).flatten(1)
        bits = values.to(torch.bfloat16).view(torch.int16).masked_fill(values.isnan(), 0x7FFF)
        rope = record[:, NOPE:].contiguous().view(torch.int16)
        out[request, offset + row] = torch.cat([bits, rope], 1).view(torch.bfloat16)


def places(k_cache, page, row, block_size):
    """The memory of a cache, and for each row where its data and its scales lie in it."""
    stride = k_cache.stride(0)
    memory = k_cache.as_strided(((len(k_cache) - 1) * stride + block_size * (DATA + SCALES),), (1,))
    start, column = (page * stride)[:, None], torch.arange(DATA, device=k_cache.device)
    data = start + row[:, None] * DATA + column
    scales = start + block_size * DATA + row[:, None] * SCALES + column[:SCALES]
    return memory, data, scales
