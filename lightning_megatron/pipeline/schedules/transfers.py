"""Checks that the sends and receives of a lowered schedule match.

There are two checks, both on plain integers, so that hundreds of thousands of transfers take a fraction of a second.
The n-th send and the n-th receive between two ranks must be of the same tensor. All ranks must be able to finish their
lists if a send waits until its receive is reached (rendezvous, as within one NCCL communicator). Lists that pass the
second check also finish with asynchronous sends, which only remove waits.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from lightning_megatron.pipeline.schedules.dependencies import consumers
from lightning_megatron.pipeline.schedules.instructions import Kind, Schedule
from lightning_megatron.pipeline.schedules.rules import Found


def find_transfer_fault(lowered: Schedule) -> Found | None:
    """First fault between ranks of a schedule whose lists are each valid (see ``find_disorder``).

    Args:
        lowered: A schedule with transfers.

    Returns:
        The fault, or ``None``.
    """
    return _order_fault(lowered) or _rendezvous_fault(lowered)


def _order_fault(lowered: Schedule) -> Found | None:
    """The n-th send from one rank to another must be the n-th receive there: NCCL has no tags."""
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    received: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, steps in enumerate(lowered.instructions):
        codes = _message_codes(lowered, rank)
        for step in steps:
            if step.peer is None:
                continue
            kind = step.kind
            if kind is Kind.SEND_FORWARD or kind is Kind.SEND_BACKWARD:
                sent[rank, step.peer].append(codes[kind][step.chunk] + step.micro_batch)
            else:
                received[step.peer, rank].append(codes[kind][step.chunk] + step.micro_batch)
    for source, peer in sorted(sent):
        if sent[source, peer] != received[source, peer]:
            return _describe_order(lowered, source, peer, sent[source, peer], received[source, peer])
    return None


def _message_codes(lowered: Schedule, rank: int) -> dict[Kind, list[int]]:
    """By kind and local chunk, a number that is equal on both sides of a message: its direction and receiving chunk."""
    span = lowered.micro_batches
    codes = {}
    for send, receive, computation in (
        (Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.FORWARD),
        (Kind.SEND_BACKWARD, Kind.RECV_BACKWARD, Kind.BACKWARD),
    ):
        base = 0 if computation is Kind.FORWARD else lowered.chunks * span
        targets = consumers(lowered, rank, computation)
        codes[send] = [base + (target[1] if target else 0) * span for target in targets]
        codes[receive] = [base + chunk * span for chunk in range(lowered.chunks)]
    return codes


def _describe_order(lowered: Schedule, source: int, peer: int, sent: list[int], received: list[int]) -> Found:
    # The lengths are equal: every list has each transfer that its computations need exactly once.
    number = next(n for n, (one, other) in enumerate(zip(sent, received, strict=True)) if one != other)
    here = _nth_transfer(lowered, source, peer, number, sends=True)
    there = _nth_transfer(lowered, peer, source, number, sends=False)
    first, second = lowered.instructions[source][here], lowered.instructions[peer][there]
    message = (
        f"message {number} from stage {source} to stage {peer} is sent as {first} but received as {second};"
        " both must list their messages in the same order"
    )
    return message, ((source, here), (peer, there))


def _nth_transfer(lowered: Schedule, rank: int, peer: int, number: int, sends: bool) -> int:
    steps = lowered.instructions[rank]
    return [at for at, step in enumerate(steps) if step.peer == peer and step.kind.is_send is sends][number]


def _rendezvous_fault(lowered: Schedule) -> Found | None:
    """The deadlock, if any, of the transfers when every send waits for its receive.

    Only peers matter, because the order of messages per pair has been checked. A send to rank 3 is coded as 3, a
    receive from it as ``~3``, so one comparison tells whether a send at the head of one list matches a receive at the
    head of another.
    """
    codes = [_peer_codes(lowered, rank) for rank in range(lowered.stages)]
    heads = [0] * lowered.stages
    queue = list(range(lowered.stages))
    while queue:
        rank = queue.pop()
        own = codes[rank]
        while heads[rank] < len(own):
            code = own[heads[rank]]
            peer, answer = (code, ~rank) if code >= 0 else (~code, rank)
            if heads[peer] == len(codes[peer]) or codes[peer][heads[peer]] != answer:
                break
            heads[rank] += 1
            heads[peer] += 1
            queue.append(peer)
    if all(head == len(own) for head, own in zip(heads, codes, strict=True)):
        return None
    return _describe_deadlock(lowered, codes, heads)


def _peer_codes(lowered: Schedule, rank: int) -> list[int]:
    forward, backward = Kind.SEND_FORWARD, Kind.SEND_BACKWARD
    return [
        step.peer if step.kind is forward or step.kind is backward else ~step.peer
        for step in lowered.instructions[rank]
        if step.peer is not None
    ]


def _describe_deadlock(lowered: Schedule, codes: list[list[int]], heads: list[int]) -> Found:
    marks = []
    for rank, steps in enumerate(lowered.instructions):
        if heads[rank] < len(codes[rank]):
            marks.append((rank, [at for at, step in enumerate(steps) if step.peer is not None][heads[rank]]))
    waits = ", ".join(f"stage {rank} in {lowered.instructions[rank][at]}" for rank, at in marks[:4])
    more = f" and {len(marks) - 4} more" if len(marks) > 4 else ""
    when = "if sends wait for their receives" if finishes_asynchronously(codes) else "even with asynchronous sends"
    return f"its transfers deadlock {when}: the ranks wait for each other, {waits}{more}", tuple(marks)


def finishes_asynchronously(codes: list[list[int]]) -> bool:
    """Whether all lists of transfers finish if sends never wait and receives wait for their messages.

    Args:
        codes: Per rank, ``peer`` for a send and ``~peer`` for a receive.
    """
    heads = [0] * len(codes)
    in_flight: Counter[tuple[int, int]] = Counter()
    queue = list(range(len(codes)))
    while queue:
        rank = queue.pop()
        own = codes[rank]
        while heads[rank] < len(own):
            code = own[heads[rank]]
            if code >= 0:
                in_flight[rank, code] += 1
                queue.append(code)
            elif in_flight[~code, rank]:
                in_flight[~code, rank] -= 1
            else:
                break
            heads[rank] += 1
    return all(head == len(own) for head, own in zip(heads, codes, strict=True))
