"""Do the sends and receives of a lowered schedule fit together?

Two questions, asked of plain numbers so that hundreds of thousands of transfers take a fraction of a second. Do the
n-th send and the n-th receive between two ranks mean the same tensor? Can all ranks work their lists off when a send
waits until its receive is reached (rendezvous, as NCCL does within one communicator)? Lists that pass the second
question also finish with asynchronous sends, which only take waits away.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from lightning_megatron.pipeline.schedules.dependencies import consumers
from lightning_megatron.pipeline.schedules.instructions import Kind, Schedule
from lightning_megatron.pipeline.schedules.rules import Found


def find_transfer_fault(lowered: Schedule) -> Found | None:
    """First fault between ranks of a schedule whose lists are each in order (see ``find_disorder``).

    Args:
        lowered: Computations and transfers.

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
    """By kind and local chunk, a number that both sides of a message share: direction, and the chunk that receives."""
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
    # Equal lengths: every list holds each transfer that its computations need, once.
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
    """Whether the ranks can work off their transfers when every send waits for its receive.

    Only peers matter here, since the order of messages per pair is known to agree. A send to rank 3 is 3, a receive
    from it ``~3``, so that a send at the head of one list meets a receive at the head of another by one comparison.
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
    """Whether lists of transfers finish when sends never wait and receives wait for their message.

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
