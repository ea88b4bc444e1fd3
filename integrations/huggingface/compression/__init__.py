"""Compressed documents: a text is computed once, each KV head keeps the tokens it needs, and the rest is freed.

- `document`: the class that users see, and the documents of a handle.
- `reading` computes a text and lets a press choose tokens. The presses are in `integrations/presses.py`, and their
  identities in `presses`.
- `kept`: the keys and values that are kept. Each head of a layer is a separate sequence.
- `layers`: the cache of a call over a document. It merges attention over the document and over the call's own tokens.
"""
