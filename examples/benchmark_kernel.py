"""Compare a kernel of your own with ours in the benchmark harness, which checks it first and then alternates.

Run in a checkout: python examples/benchmark_kernel.py
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools

import torch
import torch.nn.functional as F  # noqa: N812

from pc.bench import load_benchmarks

load_benchmarks()  # the checkout's benchmarks/, from any folder
registry, runner = (importlib.import_module(f"benchmarks.harness.{name}") for name in ("registry", "runner"))


def prepare(call):
    """Return a function that computes one call. Replace this kernel by your own.

    Only the returned function is timed. Work that a step does once for all layers belongs outside of it. This example
    gathers the keys and values of each sequence and calls PyTorch's attention.
    """
    lens, starts = call.seq_lens.tolist(), call.query_start_loc.tolist()
    if any(end - begin != 1 for begin, end in itertools.pairwise(starts)):
        raise registry.UnsupportedError("one query a sequence only")
    size = call.key_cache.shape[1]
    tables = [table[: -(-length // size)].long() for table, length in zip(call.block_tables, lens, strict=True)]

    def run():
        rows = []
        for query, table, length in zip(call.query, tables, lens, strict=True):
            keys, values = (cache[table].flatten(0, 1)[:length] for cache in (call.key_cache, call.value_cache))
            group = query.shape[0] // keys.shape[1]
            k, v = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (keys, values))
            rows.append(F.scaled_dot_product_attention(query[:, None], k, v, scale=call.scale)[:, 0])
        return torch.stack(rows)

    return run


def main() -> None:
    """Measure one decode with our operator and the kernel above, and print the rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    (benchmark,) = registry.discover(["paged_attention"])
    mine = registry.Provider("mine", prepare, version=lambda: "0")
    ours = next(provider for provider in benchmark.providers if provider.name == registry.OURS)
    benchmark = dataclasses.replace(benchmark, providers=(ours, mine))
    case = next(case for case in benchmark.of(device, quick=True, pattern="decode"))
    for row in runner.run_case(benchmark, case, seconds=2.0):
        time = f"{float(row['p50_us']):.0f} us" if row.get("p50_us") else row["note"]
        print(f"{case.name}, {row['mode']}: {row['provider']:>5} {time}, largest error {row.get('error', '-')}")


if __name__ == "__main__":
    main()
