"""Compressed documents: a text is read once, each KV head keeps the tokens it needs, and the rest is freed.

`reading` computes the text and lets a press choose; `..presses` holds the presses that go by a name. `document` holds
the kept tokens and answers questions over them. A document's heads are sequences of their own, whose blocks no request
changes. A request's own tokens come behind them, and the two parts are merged by their log-sum-exps.
"""

from .document import CompressedDocument

__all__ = ["CompressedDocument"]
