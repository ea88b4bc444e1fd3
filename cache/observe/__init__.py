"""What a manager shows of itself: explanations, events, metrics."""
