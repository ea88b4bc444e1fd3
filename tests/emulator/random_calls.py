"""Calls of every operator drawn at random, compared with formulas: `python -m emulator.random_calls --seconds 300`.

Tensors lie in memory with other strides than they need, between bytes that nothing may read into a result or write.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable

from .device import ARCH  # first: cases import pc  # isort: skip
from .cases import fresh
from .launch import Session
from .random_attention import attention, merge, shared
from .random_rows import copy, join, move, rope, rotate, write

CALLS: dict[str, Callable[[random.Random], str]] = {
    "attention": attention,
    "shared prefix": shared,
    "merge": merge,
    "write": write,
    "rope": rope,
    "rotate": rotate,
    "rows": move,
    "copy": copy,
    "join": join,
}
WEIGHTS = {"attention": 8, "shared prefix": 2, "rows": 2}  # most kernels are attention's; of others 1


def call(seed: int, name: str | None = None) -> tuple[str, str]:
    """Return the operator's name and a description of the call.

    Raise AssertionError or EmulationError if it is wrong.
    """
    rand = random.Random(seed)
    drawn = rand.choices(list(CALLS), [WEIGHTS.get(operator, 1) for operator in CALLS])[0]
    with fresh(seed):
        return name or drawn, CALLS[name or drawn](rand)


def main() -> int:
    """Run calls until the time is over, and print those that are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the first call; each next one takes the next")
    parser.add_argument("--only", choices=CALLS, help="this operator alone")
    parser.add_argument("--count", type=int, default=sys.maxsize, help="so many calls at most")
    given = parser.parse_args()
    ran, wrong, end, seed = Counter[str](), 0, time.monotonic() + given.seconds, given.seed
    while time.monotonic() < end and seed < given.seed + given.count:
        try:
            name, _ = call(seed, given.only)
            ran[name] += 1
        except Exception as error:
            wrong += 1
            frame = traceback.extract_tb(error.__traceback__)[-1]
            about = str(error).strip().split("\n")[0]
            print(f"seed {seed}: {type(error).__name__} {about} ({frame.filename}:{frame.lineno})", flush=True)
        seed += 1
    launches = len(Session.launches)
    print(f"{ARCH}, seeds {given.seed} to {seed - 1}: {dict(ran)}, {launches} launches, {wrong} wrong", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
