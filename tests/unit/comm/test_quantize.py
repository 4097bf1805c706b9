"""Block quantisation: half a step, any length, and nothing that is not finite disappears."""

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantized import assert_alike_but_for_ties, round_trip, steps_in

import shardbook.comm.quantize as quantization
from shardbook.comm.quantize import BLOCK as block
from shardbook.comm.quantize import LARGEST, TINY, buffer_bytes, dequantize, quantize

every = pytest.mark.parametrize("bits", [8, 4])


def there_and_back(rows, bits, dtype=torch.float32):
    buffer = quantize(rows, bits)
    assert buffer.dtype == torch.uint8 and buffer.shape == (len(rows), buffer_bytes(rows.shape[1], bits))
    out = torch.empty(rows.shape, dtype=dtype)
    dequantize(buffer[None], out, bits)
    return out


def steps_of(rows, bits):
    """Each element's step, [r, n]: written as a loop over blocks."""
    step = torch.zeros_like(rows, dtype=torch.float64)
    for start in range(0, rows.shape[1], block):
        part = rows[:, start : start + block].double()
        step[:, start : start + block] = part.abs().amax(1, keepdim=True) / LARGEST[bits]
    return step


@given(
    st.integers(1, 3),
    st.integers(1, 600),
    st.sampled_from([8, 4]),
    st.integers(0, 2**31),
    st.floats(-30, 30),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_within_half_a_step(count, numel, bits, seed, magnitude, dtype):
    dice = torch.Generator().manual_seed(seed)
    rows = (torch.randn(count, numel, generator=dice) * 10.0**magnitude * torch.rand(count, 1, generator=dice)).to(
        dtype
    )
    error = (there_and_back(rows, bits).double() - rows.double()).abs()
    # half a step; the quotient and the product each round once in fp32, relative to at most LARGEST steps. The step was
    # rounded too, twice, which moves its half by 2**-24: a quotient rounds by half of what it is allowed here at most
    assert (error <= steps_of(rows, bits) * (0.5 + 2 * LARGEST[bits] * 2.0**-24) + TINY).all()


@every
def test_the_largest_and_zero_are_exact_and_signs_alike(bits):
    rows = torch.zeros(1, 2 * block + 5)
    rows[0, 3], rows[0, block] = 12.7, -0.07
    again = there_and_back(rows, bits)
    assert torch.allclose(again, rows, rtol=2**-22, atol=0) and not again[0, 2 * block :].any()
    dice = torch.randn(4, 777, generator=torch.Generator().manual_seed(0))
    assert torch.equal(there_and_back(-dice, bits), -there_and_back(dice, bits))


@every
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_visible_and_in_its_block(bits, bad):
    rows = torch.ones(2, 3 * block)
    rows[0, block + 1] = bad
    again = there_and_back(rows, bits)
    assert again[0, block : 2 * block].isnan().all()
    again[0, block : 2 * block] = 1
    assert torch.allclose(again, torch.ones(2, 3 * block))


@every
def test_below_normal_numbers(bits):
    rows = torch.full((1, block), 1e-40)
    assert not there_and_back(rows, bits).any()
    rows = torch.full((1, block), 2 * TINY)
    assert torch.allclose(there_and_back(rows, bits), rows, rtol=1e-5, atol=0)
    largest = torch.full((1, block), torch.finfo(torch.float32).max / 2)
    assert there_and_back(largest, bits).isfinite().all()


@every
@pytest.mark.parametrize("numel", [1, 63, 64, 65, 129, 1000])
def test_bytes_and_rows_apart(bits, numel):
    """A row's buffer depends on that row only, so slices can travel to different ranks."""
    assert buffer_bytes(numel, bits) == -(-numel // block) * (block * bits // 8 + 4)
    rows = torch.randn(3, numel, generator=torch.Generator().manual_seed(1))
    together = quantize(rows, bits)
    assert all(torch.equal(together[i : i + 1], quantize(rows[i : i + 1], bits)) for i in range(3))


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_added_up_in_order_in_fp32(bits, dtype):
    """And rounded once, to what is asked for."""
    rows = torch.randn(5, 2, 700, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 3, 5)[:, None, None]
    out = torch.empty(2, 700, dtype=dtype)
    dequantize(quantize(rows, bits), out, bits)
    total = torch.zeros(2, 700)
    for part in rows:
        total = total + there_and_back(part, bits)
    assert torch.equal(out, total.to(dtype))


def test_rows_may_be_views_with_gaps():
    rows = torch.randn(3, 2, 1111, generator=torch.Generator().manual_seed(4)).transpose(0, 1)
    assert torch.equal(quantize(rows, 8), quantize(rows.contiguous(), 8))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.slow
def test_compiled_as_on_cuda_it_is_the_same_to_the_bit(bits, monkeypatch):
    """Each graph whole; for lengths that fill their blocks or do not, and of a single block. With two widths of their
    own at most, the others share graphs in which a width is a symbol."""
    monkeypatch.setattr("shardbook.comm.compile_on_cuda.WIDTHS", 2)
    wanted = {}
    for numel in (1000, 1024, 100, 128):
        rows = torch.randn(2, 3, numel, generator=torch.Generator().manual_seed(5))
        buffer, out = quantize(rows, bits), torch.empty(3, numel, dtype=torch.bfloat16)
        dequantize(buffer, out, bits)
        wanted[rows] = buffer, out
    monkeypatch.setattr("shardbook.comm.compile_on_cuda.has_triton", lambda: True)
    fused = quantization.fused
    monkeypatch.setattr(
        quantization, "fused", lambda function, device_type, *more, **how: fused(function, "cuda", *more, **how)
    )
    for rows, (buffer, out) in wanted.items():
        again = torch.empty_like(out)
        dequantize(quantize(rows, bits), again, bits)
        assert torch.equal(quantize(rows, bits), buffer) and torch.equal(again, out)


def test_bf16_out():
    rows = torch.randn(1, 500, generator=torch.Generator().manual_seed(2))
    exact, rounded = there_and_back(rows, 8), there_and_back(rows, 8, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16 and torch.equal(rounded, exact.bfloat16())


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_to_the_bit_what_a_loop_over_blocks_computes(bits, dtype):
    """The scale is a product with 1 / LARGEST: divided instead, its last bit would be another in many blocks."""
    rows = torch.randn(2, 3000, generator=torch.Generator().manual_seed(6)).to(dtype)
    wanted = torch.stack([round_trip(row, bits, block) for row in rows])
    assert torch.equal(there_and_back(rows, bits), wanted)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_two_devices_may_differ_in(bits):
    """The referee of the GPU test: a tie rounded the other way passes, any other step and a scale's last bit do not."""
    rows = torch.randn(3, 2, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    sent = quantize(rows, bits)
    steps, scale = steps_in(sent, 5000, bits, 128)
    back = torch.empty(3, 2, 5000)
    dequantize(sent[None], back, bits)
    assert torch.equal(steps * scale, back)
    tie = (rows.double() / scale.double()).abs()
    ties = (tie - tie.floor() - 0.5).abs() <= 2**-22 * tie
    assert 1e-3 < ties.float().mean() < 1e-2  # in bf16 they are not rare

    def changed(where):
        """The buffer with the step of one element on its other side: towards zero where it went away from it."""
        at = tuple(int(i) for i in where)
        row, (number, place) = sent.clone(), divmod(at[-1], 128)
        quotient, step = (rows[at].double() / scale[at].double()).item(), steps[at].item()
        other = step - 1 if step > quotient else step + 1
        half, high = (place % 64, place >= 64) if bits == 4 else (place, False)
        byte = (*at[:-1], number * 128 * bits // 8 + half)
        if bits == 8:
            row[byte] = other % 256
        else:
            row[byte] = (row[byte] & (15 if high else 240)) | ((other + 8) << 4 if high else other + 8)
        return row

    assert_alike_but_for_ties(sent, changed(ties.nonzero()[0]), rows, bits, 128)
    plain = (~ties & (steps.abs() < 3) & (steps != 0)).nonzero()[0]
    with pytest.raises(AssertionError, match="beside ties"):
        assert_alike_but_for_ties(sent, changed(plain), rows, bits, 128)
    scaled = sent.clone()
    scaled[0, 0, -4] ^= 1
    with pytest.raises(AssertionError, match="scales differ"):
        assert_alike_but_for_ties(sent, scaled, rows, bits, 128)
