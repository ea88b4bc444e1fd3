"""Methods of one model that handles replace: `generate` and `init_continuous_batching`."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

STATE = "__getstate__"
"""The method of an object that copies and pickles it. While a method of a model is replaced, the model has its own."""


class ReplacedMethod:
    """A replacement for one method of one model. It holds no strong reference to the model.

    Other attributes, such as `__func__` and `__closure__`, are those of the method that it replaces. As a bound method
    does, it pickles and copies as the method of the pickled or copied model.
    """

    def __init__(self, model: Any, name: str, serve: Callable[..., Any]) -> None:
        self._model, self._name = weakref.ref(model), name
        self._serve = serve
        original = getattr(type(model), name)
        functools.update_wrapper(self, original, updated=())
        self.__signature__ = inspect.signature(original.__get__(model))

    @property
    def __self__(self) -> Any:
        return self._model()

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__["_model"]()
        return getattr(getattr(type(model), self._name).__get__(model), name)

    def __reduce__(self) -> Any:
        return getattr, (self._model(), self._name)

    @property
    def handle(self) -> Any:
        """The handle whose method runs the calls."""
        return getattr(self._serve, "__self__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See the method of `GenerationMixin`."""
        return self._serve(*args, **kwargs)


def check_not_replaced(model: Any, name: str, feature: str) -> None:
    """Raise ValueError if a model's method is already replaced."""
    there = vars(model).get(name)
    if isinstance(there, ReplacedMethod) and not getattr(there.handle, "disabled", False):
        raise ValueError(
            f"model: {feature} is already enabled; call disable() on its handle, model.{name}.handle, first"
        )
    if there is not None and not isinstance(there, ReplacedMethod):
        raise ValueError(f"model: its {name} was already replaced on this instance; undo that first")


def replace_method(model: Any, name: str, serve: Callable[..., Any]) -> None:
    """Replace a method of one model. Copies of the model, shallow and pickled ones too, have the class's own method."""
    vars(model)[name] = ReplacedMethod(model, name, serve)
    vars(model)[STATE] = functools.partial(_state, weakref.ref(model))


def restore_method(model: Any, name: str) -> None:
    """Remove the replacement of a method."""
    del vars(model)[name]
    if not any(isinstance(value, ReplacedMethod) for value in vars(model).values()):
        vars(model).pop(STATE, None)


def _state(reference: weakref.ref[Any]) -> dict[str, Any]:
    """Return the attributes of a model that its copies get."""
    model = reference()
    own = getattr(type(model), STATE, vars)  # before Python 3.11 only some classes have one
    return {n: v for n, v in own(model).items() if n != STATE and not isinstance(v, ReplacedMethod)}
