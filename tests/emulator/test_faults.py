"""Kernels are broken in one place, and the emulator's error names the fault and its place."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
import triton
import triton.language as tl

import pc
from emulator import kernels
from emulator.arguments import Arguments
from emulator.device import ARCH
from emulator.program import edited, program
from emulator.ptx import EmulationError

pytestmark = pytest.mark.quick


def test_memory_outside_of_every_argument():
    x, y, out = torch.randn(900), torch.randn(1000), torch.randn(1000)
    with pytest.raises(EmulationError, match=r"load of .* outside of every argument .*kernels\.py:\d+"):
        kernels.add[(4,)](x.clone(), y, out, 1000, 256)


def test_programs_that_write_one_place():
    x, y = torch.zeros(4, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    with pytest.raises(EmulationError, match="write different values"):
        kernels.clash[(4,)](x, y, 0)


def test_a_program_that_reads_what_another_writes():
    x, y = torch.zeros(4, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    with pytest.raises(EmulationError, match=r"which another read|which program \d wrote"):
        kernels.clash[(4,)](x, y, 1)


@pytest.mark.parametrize(
    ("values", "text"), [(0, None), (1, "warps . and . write diff"), (32, "lanes of warp . write")]
)
def test_lanes_and_warps_that_write_one_place(values, text):
    """Equal values are no fault. With `values` 1, warps write different values; with 32, lanes do."""
    x, out = torch.arange(128, dtype=torch.int32) * values // 32, torch.zeros(1, dtype=torch.int32)
    with pytest.raises(EmulationError, match=text) if text else contextlib.nullcontext():
        kernels.one_place[(1,)](x, out, 128)


@pytest.mark.parametrize(("m", "n"), [(4, 32), (8, 16)])
def test_lanes_that_share_a_sum_and_differ_in_its_last_bit(m, n):
    x, weights, out = torch.randn(m, n), torch.randn(m), torch.empty(n)
    kernels.weighted_sum[(1,)](x, weights, out, m, n, False, num_warps=1)
    assert torch.allclose(out, (x * weights[:, None]).sum(0), atol=1e-5)
    with pytest.raises(EmulationError, match=r"race: lanes of warp . write different values"):
        kernels.weighted_sum[(1,)](x, weights, out, m, n, True, num_warps=1)


def _product() -> None:
    a, b, c = torch.randn(64, 256).half(), torch.randn(256, 32).half(), torch.zeros(64, 32)
    kernels.product[(1,)](a, b, c, 64, 32, 256, 64, "ieee", tl.float32, num_warps=8, num_stages=2)
    assert (c.double() - a.double() @ b.double()).abs().max() < 1e-3, "wrong result"


BREAKS = {
    "a barrier": (r"bar\.sync\s+0;", "", "race|changed under"),
    "a wait": (r"cp\.async\.wait_group\s+\d", "cp.async.wait_group 9", "asynchronous copy"),
    "a bound": (r"ld\.global(.*)\[ (%rd\d+) \+ 0 \]", r"ld.global\1[ \2 + 4096 ]", "outside of every argument"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_barrier_a_wait_and_a_bound(what):
    old, new, text = BREAKS[what]
    run = _product if what != "a bound" else lambda: _add(2)
    run()
    with edited(lambda name, ptx: re.sub(old, new, ptx)), pytest.raises(EmulationError, match=text):
        run()


def _add(n: int) -> None:
    x, y, out = torch.randn(n), torch.randn(n), torch.full((n,), float("nan"))
    kernels.add[(triton.cdiv(n, 256),)](x, y, out, n, 256)
    assert torch.equal(out, x + y)


def _decode() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 64, generator=generator).bfloat16()
    cache = torch.randn(2, 24, 16, 2, 64, generator=generator).bfloat16()
    tables = torch.arange(24, dtype=torch.int32).view(2, 12)
    lens, starts = torch.tensor([190, 77], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    return pc.paged_attention(query, cache[0], cache[1], tables, lens, starts, 0.125)


def _prefill() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(70, 4, 64, generator=generator).bfloat16()
    cache = torch.randn(2, 28, 16, 2, 64, generator=generator).bfloat16()
    tables = torch.arange(28, dtype=torch.int32).view(1, 28)
    # So long that buffers of earlier tiles are written again: a barrier that guards them is not needed before. Whole
    # tiles: no product is one of zeros.
    lens, starts = torch.tensor([448], dtype=torch.int32), torch.tensor([0, 70], dtype=torch.int32)
    return pc.paged_attention(query, cache[0], cache[1], tables, lens, starts, 0.125)


def _noticed(run, old: str, new: str, name: str = "_attention_kernel", in_pairs: bool = False) -> list[bool]:
    """Return, for each place of `old` that ran, whether a result or an error shows that it became `new`.

    With in_pairs, also whether it shows if another place is broken too that does not show alone.
    """
    want, texts = run(), []

    def look(kernel: str, ptx: str) -> str:
        if kernel == name and ptx not in texts:
            texts.append(ptx)
        return ptx

    def tells(text: str, *matches: re.Match[str]) -> bool:
        broken = text
        for match in sorted(matches, key=lambda match: -match.start()):
            broken = broken[: match.start()] + match.expand(new) + broken[match.end() :]
        try:
            with edited(lambda kernel, ptx: broken if ptx == text else ptx):
                return not torch.equal(run(), want)
        except EmulationError:
            return True

    with edited(look):
        run()
    found = []
    for text in texts:
        kernel = program(name, text)
        ran = {i.statement.line for i, n in zip(kernel.code, kernel.counts()[0], strict=True) if n}
        places = [match for match in re.finditer(old, text) if text.count("\n", 0, match.start()) + 1 in ran]
        alone = [tells(text, match) for match in places]
        missed = [match for match, told in zip(places, alone, strict=True) if not told and in_pairs]
        for match, told in zip(places, alone, strict=True):
            found.append(told or any(tells(text, match, other) for other in missed if other is not match))
    return found


@pytest.mark.parametrize("run", [_decode, _prefill])
def test_the_attention_kernel_without_its_waits_barriers_or_with_an_operand_swapped(run):
    waits = _noticed(run, r"(cp\.async|wgmma)\.(wait_group(?:\.sync\.aligned)?)\s+\d+", r"\1.\2 7")
    assert waits
    assert any(waits)
    barriers = _noticed(run, r"bar\.sync\s+0;", "", in_pairs=True)
    assert sum(barriers) >= len(barriers) / 2 > 0, barriers
    # The first and the third of its registers hold other columns of the same rows; rows after the last may be equal.
    operand = r"(mma\.sync\S+\s+\{[^}]*\}, \{ )(%r\d+), (%r\d+), (%r\d+)"
    if ARCH == "sm_90" and run is _prefill:
        operand = r"(wgmma\.mma_async\S+\s+\{[^}]*\}, \{\s*)(%r\d+),\s*(%r\d+),\s*(%r\d+)"
    operands = _noticed(run, operand, r"\1\4, \3, \2")
    assert operands
    assert all(operands), operands


@pytest.mark.parametrize("count", [10.5, 3])
def test_arguments_other_than_compiled_for(count):
    class Source:
        class fn:  # noqa: N801
            __name__, arg_names = "kernel", ["pointer", "n", "BLOCK"]

        signature = {"pointer": "*fp32", "n": "i32", "BLOCK": "constexpr"}  # noqa: RUF012
        constants = {(2,): 64}  # noqa: RUF012
        attrs = {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}  # noqa: RUF012

    check = Arguments(Source).check
    x = torch.zeros(64)
    assert check([x, 32, 64]) == [("Q", x.data_ptr()), ("i", 32)]
    for values, text in (
        ([x, count, 64], "n is .* multiples of 16"),
        ([x[1:], 32, 64], "pointer is .* multiples of 16"),
        ([x.double(), 32, 64], "pointer is torch.float64, compiled for"),
        ([x, 32, 128], "BLOCK is 128, compiled for 64"),
    ):
        with pytest.raises(EmulationError, match=text):
            check(values)
