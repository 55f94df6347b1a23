"""Marks messages that bring weights to where they are used, and are not part of the user's step.

A trial of a step looks whether the step itself gathers over its replicas, whose batches then are one. Where replicas
share weights, the messages of the layers pass in the same group.
"""

from __future__ import annotations

from lightning_megatron.mesh.nested import Nested

messages_of_weights = Nested()
"""Around the start of such messages."""
