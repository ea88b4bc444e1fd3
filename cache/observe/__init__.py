"""Observation of a manager: explanations, events, metrics."""
