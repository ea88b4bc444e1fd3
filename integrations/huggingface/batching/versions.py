"""Which transformers is served: a range of versions, and the private interfaces of its loop as they were there.

Continuous batching has no public seam below its manager, so a version in range is not enough: what is overridden or
called has to be there with exactly the parameters it had.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from ..support import UnsupportedError

OLDEST, NEWEST = (5, 19), (5, 23)
PACKAGE = "transformers.generation.continuous_batching."

INTERFACES = {
    "continuous_api:ContinuousMixin.init_continuous_batching": (
        "self generation_config continuous_batching_config workload_hints"
    ),
    "continuous_api:ContinuousBatchingManager.__init__": (
        "self model generation_config continuous_batching_config workload_hints"
    ),
    "continuous_api:ContinuousBatchingManager.switch_to_cb_friendly_attn": "self model auto_switch_to_flash",
    "continuous_api:ContinuousBatchingManager.start": "self",
    "continuous_api:ContinuousBatchingManager._create_batch_processor": "self",
    "continuous_api:ContinuousBatchProcessor.__init__": (
        "self cache config generation_config continuous_batching_config logit_processor input_queue cancel_queue "
        "output_router background_thread_status model_device model_dtype scheduler distributed_helper"
    ),
    "continuous_api:ContinuousBatchProcessor.prepare_next_batch": "self",
    "continuous_api:ContinuousBatchProcessor._generation_step": "self model",
    "continuous_api:ContinuousBatchProcessor._handle_request_error": "self error state",
    "continuous_api:OutputRouter.fail_and_deliver": "self state error",
    "initialization:update_cb_config_after_cache_creation": "cb_config num_blocks max_batch_tokens",
    "input_outputs:ContinuousBatchingIOs.get_model_kwargs": "self use_padding",
    "input_outputs:ContinuousBatchingIOs.retrieve_device_outputs": "self",
    "model_runner:ModelRunner.compute_batch": "self model batch_data",
    "offloading_manager:OffloadingManager.offload_requests": "self",
    "requests:RequestState.current_len": "self",
    "requests:RequestState.create_equivalent_initial_request": "self",
    "scheduler:Scheduler.__init__": "self cache safety_margin max_requests_per_batch",
    "scheduler:Scheduler.add_waiting_request": "self state",
    "scheduler:Scheduler.finish_request": "self request_id",
}

UNUSED = frozenset({"update", "fill_block_table", "get_cache_for_block_table", "get_block_table_key"})
"""Methods of transformers' cache by which attention reads it; here attention reads blocks."""


def check_version(cache: type) -> None:
    """Makes sure that transformers is in range and its loop has the interfaces that are built on.

    Args:
        cache: What stands in for transformers' `PagedAttentionCache`; it has to have every method of it.

    Raises:
        UnsupportedError: It has not; says what was found and what is needed.
    """
    import transformers

    supported = f"transformers {_text(OLDEST)} to {_text(NEWEST)}"
    version = str(transformers.__version__)
    if not OLDEST <= _series(version) <= NEWEST:
        raise UnsupportedError(f"continuous batching needs {supported}, got {version}")
    where = f"by continuous batching over blocks, written for {supported}, in {version}"
    for name, parameters in INTERFACES.items():
        _check(name, parameters.split(), where)
    theirs = _find("cache:PagedAttentionCache", where)
    for name, method in inspect.getmembers(theirs, inspect.isfunction):
        if not name.startswith("_") and name not in UNUSED:
            ours, takes = getattr(cache, name, None), list(inspect.signature(method).parameters)
            if ours is None or list(inspect.signature(ours).parameters) != takes:
                raise UnsupportedError(f"PagedAttentionCache.{name}({', '.join(takes)}) is not known {where}")


def _text(series: tuple[int, int]) -> str:
    return ".".join(map(str, series))


def _series(version: str) -> tuple[int, int]:
    """Major and minor number; a version without them is out of every range."""
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return (0, 0)
    return int(parts[0]), int(parts[1])


def _find(name: str, where: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(PACKAGE + module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"{PACKAGE}{name} is not there, needed {where}") from error
    return found


def _check(name: str, parameters: list[str], where: str) -> None:
    found = list(inspect.signature(_find(name, where)).parameters)
    if found != parameters:
        raise UnsupportedError(f"{PACKAGE}{name} takes ({', '.join(found)}), not what is needed {where}")
