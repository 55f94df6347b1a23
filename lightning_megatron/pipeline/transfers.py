"""Do the sends and receives of a lowered schedule fit together?

Three questions, asked of plain numbers so that hundreds of thousands of transfers take a fraction of a second. Does
every computation find its input received, and every send its result computed? Do the n-th send and the n-th receive
between two ranks mean the same tensor? Can all ranks work their lists off when a send waits until its receive is
reached (rendezvous, as NCCL does within one communicator)? Lists that pass the last question also finish with
asynchronous sends, which only take waits away.
"""

from __future__ import annotations

from collections import Counter

from lightning_megatron.pipeline.dependencies import consumers
from lightning_megatron.pipeline.instructions import Instruction, Kind, Schedule

Found = tuple[str, tuple[tuple[int, int], ...]]
"""A message, and the (rank, position) of each instruction that it is about."""

_SENDS = {Kind.SEND_FORWARD: Kind.RECV_FORWARD, Kind.SEND_BACKWARD: Kind.RECV_BACKWARD}
_Key = tuple[Kind, int, int]


def find_transfer_fault(lowered: Schedule) -> Found | None:
    """First fault of the transfers of a schedule whose computations alone are in order.

    Args:
        lowered: Computations and transfers.

    Returns:
        The fault, or ``None``.
    """
    for rank in range(lowered.stages):
        found = _local_fault(lowered, rank)
        if found is not None:
            return found
    return _order_fault(lowered) or _rendezvous_fault(lowered)


def _local_fault(lowered: Schedule, rank: int) -> Found | None:
    """Each input received before it is used, each result computed before it is sent, both exactly once."""
    inputs, outputs = _expected(lowered, rank)
    seen: set[_Key] = set()
    for at, step in enumerate(lowered.instructions[rank]):
        key = (Kind.BACKWARD if step.kind is Kind.BACKWARD_INPUT else step.kind, step.micro_batch, step.chunk)
        if step.peer is None:
            received = inputs.get((key[0], step.chunk))
            if received is not None and (received[0], step.micro_batch, step.chunk) not in seen:
                name = Instruction(received[0], step.micro_batch, step.chunk, received[1])
                return f"stage {rank}, entry {at}: {step} needs {name} before it", ((rank, at),)
        else:
            message = _transfer_message(step, key, inputs, outputs, seen)
            if message:
                return f"stage {rank}, entry {at}: {message}", ((rank, at),)
        seen.add(key)
    return _unsent(lowered, rank, outputs, seen)


_Ends = dict[tuple[Kind, int], tuple[Kind, int]]


def _expected(lowered: Schedule, rank: int) -> tuple[_Ends, _Ends]:
    """By (computation, chunk): the receive that it needs and its peer; the send that it feeds and its peer."""
    inputs: _Ends = {}
    outputs: _Ends = {}
    for kind, send, receive, feeds in (
        (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_BACKWARD, Kind.BACKWARD),
        (Kind.BACKWARD, Kind.SEND_BACKWARD, Kind.RECV_FORWARD, Kind.FORWARD),
    ):
        for chunk, target in enumerate(consumers(lowered, rank, kind)):
            if target is not None and target[0] != rank:
                # The neighbour that takes this chunk's activation is the one that hands back its gradient.
                outputs[kind, chunk] = (send, target[0])
                inputs[feeds, chunk] = (receive, target[0])
    return inputs, outputs


def _transfer_message(step: Instruction, key: _Key, inputs: _Ends, outputs: _Ends, seen: set[_Key]) -> str | None:
    if key in seen:
        return f"{step} is done twice"
    if step.kind.is_send:
        computation = Kind.FORWARD if step.kind is Kind.SEND_FORWARD else Kind.BACKWARD
        expected = outputs.get((computation, step.chunk))
        if expected == (step.kind, step.peer) and (computation, step.micro_batch, step.chunk) not in seen:
            return f"{step} comes before the computation whose result it sends"
    else:
        computation = Kind.FORWARD if step.kind is Kind.RECV_FORWARD else Kind.BACKWARD
        expected = inputs.get((computation, step.chunk))
        if expected == (step.kind, step.peer) and (computation, step.micro_batch, step.chunk) in seen:
            return f"{step} comes after the computation that needs it"
    if expected is None:
        return f"{step} moves a tensor that no other stage needs or makes"
    if expected[1] != step.peer:
        return f"{step} should name peer {expected[1]}"
    return None


def _unsent(lowered: Schedule, rank: int, outputs: _Ends, seen: set[_Key]) -> Found | None:
    for kind, micro_batch, chunk in sorted(seen):
        send = outputs.get((kind, chunk))
        if send is not None and (send[0], micro_batch, chunk) not in seen:
            missing = Instruction(send[0], micro_batch, chunk, send[1])
            return f"stage {rank} never does {missing}", ((rank, len(lowered.instructions[rank])),)
    return None


def _order_fault(lowered: Schedule) -> Found | None:
    """The n-th send from one rank to another must be the n-th receive there: NCCL has no tags."""
    sent: dict[tuple[int, int], list[tuple[Kind, int, int, int]]] = {}
    received: dict[tuple[int, int], list[tuple[Kind, int, int, int]]] = {}
    for rank, steps in enumerate(lowered.instructions):
        onward, back = consumers(lowered, rank, Kind.FORWARD), consumers(lowered, rank, Kind.BACKWARD)
        for at, step in enumerate(steps):
            if step.peer is None:
                continue
            receive = _SENDS.get(step.kind)
            if receive is None:
                received.setdefault((step.peer, rank), []).append((step.kind, step.micro_batch, step.chunk, at))
                continue
            target = (onward if step.kind is Kind.SEND_FORWARD else back)[step.chunk]
            chunk = target[1] if target is not None else step.chunk
            sent.setdefault((rank, step.peer), []).append((receive, step.micro_batch, chunk, at))
    for (source, peer), sends in sorted(sent.items()):
        # Equal lengths: every send has been found to be needed, and every need to be received, once.
        for number, (send, receive_) in enumerate(zip(sends, received.get((source, peer), []), strict=False)):
            if send[:3] != receive_[:3]:
                first = lowered.instructions[source][send[3]]
                other = lowered.instructions[peer][receive_[3]]
                return (
                    f"message {number} from stage {source} to stage {peer} is sent as {first} but received as {other};"
                    " both must list their messages in the same order",
                    ((source, send[3]), (peer, receive_[3])),
                )
    return None


def _rendezvous_fault(lowered: Schedule) -> Found | None:
    """Whether the ranks can work off their transfers when every send waits for its receive.

    Only peers matter here: the order of messages per pair is known to agree. A send to rank 3 is 3, a receive from
    it ``~3``, so that a send at the head of one list meets a receive at the head of another by one comparison.
    """
    places = [[at for at, step in enumerate(steps) if step.peer is not None] for steps in lowered.instructions]
    codes = [[_code(steps[at]) for at in own] for steps, own in zip(lowered.instructions, places, strict=True)]
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
    stuck = [rank for rank in range(lowered.stages) if heads[rank] < len(codes[rank])]
    if not stuck:
        return None
    marks = tuple((rank, places[rank][heads[rank]]) for rank in stuck)
    waits = ", ".join(f"stage {rank} in {lowered.instructions[rank][at]}" for rank, at in marks[:4])
    more = f" and {len(marks) - 4} more" if len(marks) > 4 else ""
    when = "if sends wait for their receives" if finishes_asynchronously(codes) else "even with asynchronous sends"
    return f"its transfers deadlock {when}: the ranks wait for each other, {waits}{more}", marks


def _code(step: Instruction) -> int:
    assert step.peer is not None
    return step.peer if step.kind.is_send else ~step.peer


def finishes_asynchronously(codes: list[list[int]]) -> bool:
    """Whether lists of transfers finish when sends never wait and receives wait for their message."""
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
