"""The instructions that only sm_90 has: wgmma, mbarriers, TMA, and the tensor maps that it reads."""

from __future__ import annotations

import re

from .instructions import SIZES, TYPE_NUMBERS, Translation, Words, cp_async, operation, split, vector

# Fields of a tensor map, as machine/hopper.cpp reads it.
FIELDS = {
    "global_address": 0,
    "rank": 8,
    "box_dim": 12,
    "global_dim": 32,
    "global_stride": 56,
    "element_stride": 88,
    "elemtype": 108,
    "interleave_layout": 112,
    "swizzle_mode": 116,
    "fill_mode": 120,
}


@operation("wgmma")
def _wgmma(t: Translation, words: Words, operands: list[str]) -> None:
    if words[0] == "fence":
        t.emit("nop")
        return
    if words[0] in ("commit_group", "wait_group"):
        t.emit(f"wgmma.{words[0].removesuffix('_group')}", a=int(operands[0]) if operands else 0)
        return
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", words[3])
    d, a, _ = words.types
    keep, *flags = operands[3:]
    signs, turned = flags[:2], [int(flag) for flag in flags[2:]]
    if not shape or d != "f32" or a not in ("f16", "bf16", "tf32") or signs != ["1", "1"]:
        raise t.refuse()
    in_registers = operands[1].startswith("{")
    first = t.values(vector(operands[1]), "b32") if in_registers else [t.value(operands[1], "b64")]
    a_turned = 0 if in_registers or not turned else turned[0]
    b_turned = turned[-1] if turned else 0
    t.emit(
        "wgmma",
        [*t.values(vector(operands[0]), "f32"), *first, t.value(operands[2], "b64"), t.value(keep, "pred")],
        a=int(shape[1]) | int(shape[2]) * SIZES[a] << 16,
        b=TYPE_NUMBERS[a] | in_registers << 8 | a_turned << 9 | b_turned << 10,
    )


@operation("mbarrier")
def _mbarrier(t: Translation, words: Words, operands: list[str]) -> None:
    what = words[0]
    if what == "try_wait":
        if "parity" not in words:
            raise t.refuse()
        at, offset = t.address(operands[1])
        t.emit("mbarrier.try_wait", [t.value(operands[0], "pred"), at, t.value(operands[2], "b32")], b=offset)
        return
    arrives = what == "arrive"
    if arrives:
        operands = operands[1:]  # the first gets a state that is never read
    at, offset = t.address(operands[0])
    count = t.value(operands[1], "b32") if len(operands) > 1 else -1
    name = "mbarrier.expect_tx" if "expect_tx" in words else f"mbarrier.{what}"
    t.emit(name, [at, count], a=int(arrives), b=offset)


@operation("tensormap")
def _tensormap(t: Translation, words: Words, operands: list[str]) -> None:
    if words[0] == "cp_fenceproxy":
        (to, offset), (source, at) = (t.address(text, "b64") for text in operands[:2])
        t.emit("tensormap.copy", [to, source], a=at, b=offset)
        return
    kind, place = words.types[-1], FIELDS[words[2]]
    at, offset = t.address(operands[0], "b64")
    if len(operands) == 3:
        place += SIZES[kind] * int(operands[1], 0)
    t.emit("tensormap.replace", [at, t.value(operands[-1], kind)], a=place | SIZES[kind] << 16, b=offset)


@operation("cp")
def _cp(t: Translation, words: Words, operands: list[str]) -> None:
    if "bulk" in words and ("commit_group" in words or "wait_group" in words):
        t.emit("nop")  # of stores by TMA, which are refused below
    elif "tensor" in words and "2d" in words and "global" in words and len(operands) == 3:
        tensor_map, coordinates = split(operands[1].strip("[] "))
        places = [t.value(tensor_map, "b64"), *t.values(vector(coordinates), "b32")]
        t.emit("tma.load", [t.address(operands[0])[0], *places, t.address(operands[2])[0]])
    else:
        cp_async(t, words, operands)
