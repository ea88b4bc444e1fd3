"""Compressed documents: a text is read once, each KV head keeps the tokens it needs, and the rest is freed.

- `document`: what users see, and the documents of a handle.
- `reading` computes the text and lets a press choose. `..presses` has the presses by name, `presses` their identities.
- `kept`: what is kept. The heads of a document are sequences of their own, whose blocks no request changes.
- `layers`: the cache of a call. Its own tokens come behind the document, and the two are merged by their log-sum-exps.
"""
