"""Which messages bring weights to where they are used, and are none of the user's step.

A trial of a step looks whether the step itself gathers over its replicas, whose batches then are one. Where replicas
share weights, the messages of the layers pass in the same group.
"""

from __future__ import annotations

_depth = 0


class messages_of_weights:
    """Around the start of such messages; reentrant."""

    def __enter__(self) -> None:
        global _depth
        _depth += 1

    def __exit__(self, *_: object) -> None:
        global _depth
        _depth -= 1


def are_of_weights() -> bool:
    """Whether code runs inside :class:`messages_of_weights`."""
    return _depth > 0
