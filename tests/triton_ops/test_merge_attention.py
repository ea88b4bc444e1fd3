"""pc.merge_attention: two halves of the keys make the whole."""

from __future__ import annotations

import math

import pytest
import torch
from refusals import check_refused

import pc

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _part(tokens, heads, dim, dtype, device, dead=()):
    out, lse = torch.randn(tokens, heads, dim, device=device).to(dtype), torch.randn(tokens, heads, device=device) * 5
    lse[list(dead)] = -math.inf
    out[list(dead)] = float("nan")
    return out, lse


@pytest.mark.parametrize("head_dim", [16, 80, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numerics(dtype, head_dim, device):
    out_a, lse_a = _part(9, 5, head_dim, dtype, device, dead=(1, 3))
    out_b, lse_b = _part(9, 5, head_dim, dtype, device, dead=(2, 3))
    out, lse = pc.merge_attention(out_a, lse_a, out_b, lse_b)
    exact_lse = torch.logaddexp(lse_a.double(), lse_b.double())
    shift = exact_lse.masked_fill(exact_lse == -math.inf, 0.0)
    exact = sum(
        torch.nan_to_num(part.double()) * (part_lse.double() - shift).exp()[..., None]
        for part, part_lse in ((out_a, lse_a), (out_b, lse_b))
    )
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps * exact.abs().max()
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf)
    assert torch.allclose(lse.double(), exact_lse, atol=1e-5)
    assert not out[3].any()


@pytest.mark.parametrize("lse", [math.inf, math.nan])
def test_an_lse_without_a_weight_gives_nan(lse, device):
    out, known = torch.ones(1, 2, 16, device=device), torch.zeros(1, 2, device=device)
    for parts in ((out, known + lse, out, known), (out, known, out, known + lse)):
        assert all(found.isnan().all() for found in pc.merge_attention(*parts))


def test_strides(device):
    out, lse = _part(6, 4, 64, torch.float32, device)
    expected = pc.merge_attention(out, lse, out * 2, lse + 1)
    head_major = out.transpose(0, 1).contiguous().transpose(0, 1)
    found = pc.merge_attention(head_major, lse.t().contiguous().t(), out * 2, lse + 1)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[0].is_contiguous()


def test_empty(device):
    out, lse = _part(0, 4, 64, torch.float32, device)
    assert pc.merge_attention(out, lse, out, lse)[0].shape == (0, 4, 64)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("out_a", lambda x: x.double(), "out_a: got float64"),
        ("lse_a", lambda x: x[:3], "lse_a: got shape"),
        ("lse_a", lambda x: x.half(), "lse_a: got float16"),
        ("out_b", lambda x: x[:, :1], "out_b: got shape"),
        ("lse_b", lambda x: x[..., None], "lse_b: got shape"),
    ],
)
def test_bad_arguments(name, change, message):
    parts = (*_part(6, 4, 64, torch.float32, "cpu"), *_part(6, 4, 64, torch.float32, "cpu"))
    given = dict(zip(("out_a", "lse_a", "out_b", "lse_b"), parts, strict=True))
    check_refused(pc.merge_attention, given, {name: change}, message)
