"""Compressed documents: of a text that is read once each KV head keeps the tokens it needs, and the rest is freed.

`reading` computes the text and lets a press choose, `presses` holds those that go by a name, `document` holds what was
kept and answers questions over it: the document's heads as sequences of their own, whose blocks no request changes,
and each request's own tokens behind them, merged by their log-sum-exps.
"""

from .document import CompressedDocument

__all__ = ["CompressedDocument"]
