"""What stands in the place of a model's own method while continuous batching is enabled."""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .enable import ContinuousBatching

REPLACED = "init_continuous_batching"


class Initialize:
    """What stands in the place of one model's `init_continuous_batching`; a copy of the model has its class's.

    It does not keep the model alive, and dies with it.
    """

    def __init__(self, model: Any, handle: ContinuousBatching | None = None) -> None:
        self._model = weakref.ref(model)
        self.handle = handle
        functools.update_wrapper(self, type(model).init_continuous_batching, updated=())
        self.__signature__ = inspect.signature(type(model).init_continuous_batching.__get__(model))

    @property
    def __self__(self) -> Any:
        return self._model()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `GenerationMixin.init_continuous_batching`."""
        if self.handle is None:
            model: Any = self._model()
            return type(model).init_continuous_batching(model, *args, **kwargs)
        return self.handle.session(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Initialize:
        return Initialize(memo.get(id(self._model()), self._model()))

    def __reduce__(self) -> Any:
        return Initialize, (self._model(),)
