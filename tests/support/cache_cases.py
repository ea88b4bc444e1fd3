"""What tests of the cache share."""

from __future__ import annotations

import numpy as np


def drop(pool, ids):
    """Evicts blocks of a test's choice: they are free from now on, as if their policy had named them."""
    ids = np.asarray(ids, np.int32)
    pool.policy.removed(ids)
    policy_choice = pool.policy.victims
    pool.policy.victims = lambda count: ids
    try:
        victims, _ = pool.remove_victims(ids.size)
    finally:
        pool.policy.victims = policy_choice
    pool.pin(victims)
    pool.give_up(victims)
