"""Compressed prompts in vLLM's engine with its model runner V2, run as a program: `... MODEL SEED`.

vLLM for CPUs uses runner V2 if Triton has a backend for CPUs. Here vLLM's kernels run in Triton's interpreter, and a
made-up entry replaces the backend. The program prints how many answers were compared, and how many saw a compressed
prompt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace


def main() -> None:
    """Run random traffic and compare every answer with dense attention."""
    import pc  # noqa: F401, before the interpreter is on: it is for vLLM's kernels

    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(compiler=None, driver=SimpleNamespace(is_active=lambda: True))
    import vllm_engine

    vllm_engine.prepare()
    import test_engine
    from vllm_dense import DenseReference

    options = test_engine.OPTIONS | {"num_gpu_blocks_override": 110}
    with vllm_engine.engine(sys.argv[1], **options) as (llm, _):
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        assert hasattr(runner, "update_requests")
        asked = test_engine.disturbed(llm, int(sys.argv[2]), rounds=24)
        asked.core.execute_dummy_batch()
        print(len(asked.answers), asked.compare(DenseReference(sys.argv[1])))


if __name__ == "__main__":
    folder = Path(__file__).resolve().parent
    tests = folder.parent
    sys.path[:0] = map(str, (folder, tests / "integrations" / "vllm" / "compression", tests.parent))
    main()
