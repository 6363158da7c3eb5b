"""meander.policy, with calls that wait: push_policy(client, ...) of a client of meander.sync."""

from __future__ import annotations

from .. import policy as aio
from ..policy import NoPolicy, PolicyRefused
from .client import waiting

__all__ = [
    "NoPolicy", "PolicyRefused", "policy", "policy_history", "push_policy", "push_weights", "put_blob",
    "rollback_policy", "taken",
]  # fmt: skip

policy = waiting(aio.policy)
policy_history = waiting(aio.policy_history)
put_blob = waiting(aio.put_blob)
push_policy = waiting(aio.push_policy)
push_weights = waiting(aio.push_weights)
rollback_policy = waiting(aio.rollback_policy)
taken = waiting(aio.taken)
