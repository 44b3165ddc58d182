"""The side channel under 100,000 messages that are cut, bent, foreign or repeated: it answers whom it should."""

from __future__ import annotations

from typing import Any

from support.vllm_turns import WHOLE, SideChannel, bent, exchange, idle, question, retention, supported, turn

MESSAGES = 100_000


def case_no_message_ends_the_listener_or_tells_anything(lab: Any) -> None:
    import random

    import msgspec
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG

    if not supported():
        return
    from pd_connector.core import lease_message
    from pd_connector.core.lease_message import NewEnd
    from pd_connector.core.question import decode_answer
    from pd_wire import lease

    scheduler = lab.scheduler("decode", extra={"pd_retention": "Leased"})
    handle = turn(lab, scheduler)
    idle(lab, scheduler)
    retention(scheduler)._clock = lambda: 1000.0
    retention(scheduler)._leases.set_end(lease.parse(handle["pd_lease"]).token, 900.0, 3600)
    draw = random.Random(7)
    asked = question(handle).encode()
    prolonged = lease_message.encode([NewEnd(lease.parse(handle["pd_lease"]).token, 60), NewEnd("ab" * 16, 60)])
    hello = msgspec.msgpack.encode((GET_META_MSG, 0, 0))
    real = (asked, prolonged, hello)
    messages = [_foreign(draw) if draw.random() < 0.2 else bent(draw.choice(real), draw) for _ in range(MESSAGES)]
    messages = [message for message in messages if message != hello]
    for place in range(0, MESSAGES // 2, 5000):
        messages[place : place + 1] = [asked, prolonged]  # as somebody would send again who has read them
    expected = _Expected(scheduler, handle)
    wanted = [reply for reply in map(expected.reply, messages) if reply is not None]
    mark = lease_message.encode([NewEnd("cd" * 16, 1)] * 3)
    with SideChannel(scheduler) as channel:
        assert exchange(channel, messages, mark) == wanted
        assert [decode_answer(reply, WHOLE) for reply in exchange(channel, [asked], mark)] == [WHOLE]
        assert len(exchange(channel, [hello], mark)) == 1, "a new peer can shake hands"
    assert len(wanted) > MESSAGES // 20
    # Only who holds the handle learns anything: a reply is its own, or says that there is nothing.
    telling = [reply for message, reply in expected.seen if any(reply[6 if reply[:4] == b"PDM1" else 4 :])]
    assert telling
    assert all(expected.holds(message) for message, reply in expected.seen if reply in telling)


class _Expected:
    """What each message deserves, worked out apart from the listener."""

    def __init__(self, scheduler: Any, handle: dict[str, Any]) -> None:
        from pd_wire import lease

        self.engine = handle["remote_engine_id"].encode()
        self.epoch = bytes.fromhex(handle["pd_moment"].split("-")[0])
        self.token = bytes.fromhex(lease.parse(handle["pd_lease"]).token)
        self.count = int(handle["pd_moment"].split("-")[1], 16)
        self.blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        self.held = True
        self.seen: list[tuple[bytes, bytes]] = []

    def holds(self, message: bytes) -> bool:
        """Whether the message has in it what only a handle tells."""
        return (self.engine in message and self.epoch in message) or self.token in message

    def reply(self, message: bytes) -> bytes | None:
        answers = {b"PDQ1": self._answer, b"PDL1": self._ends}
        answer = answers.get(message[:4])
        reply = answer(message) if answer else None
        if reply is not None:
            self.seen.append((message, reply))
        return reply

    def _answer(self, message: bytes) -> bytes | None:
        import struct

        from pd_connector.core.question import Unreadable, decode

        try:
            asked = decode(message)
        except Unreadable:
            return None
        mine = asked.engine.encode() == self.engine and bytes.fromhex(asked.moment.epoch) == self.epoch
        good = 0
        # Nothing was handed to others, so every stamp is 0.
        while mine and good < len(asked.blocks) and asked.blocks[good] < self.blocks:
            good += 1
        return b"PDA1" + struct.pack("<I", good)

    def _ends(self, message: bytes) -> bytes | None:
        import struct

        from pd_connector.core.lease_message import decode
        from pd_connector.core.question import Unreadable

        try:
            batch = decode(message)
        except Unreadable:
            return None
        left, held = [], self.held
        for item in batch:
            mine = bytes.fromhex(item.token) == self.token and self.held
            left.append(item.seconds if mine else 0)
            self.held = self.held and not (mine and item.seconds == 0)
        return b"PDM1" + struct.pack(f"<H?{len(left)}H", len(left), held and not self.held, *left)


def _foreign(draw: Any) -> bytes:
    """A message that is well formed, and of somebody who has no handle of this engine."""
    from pd_connector.core import lease_message
    from pd_connector.core.lease_message import NewEnd
    from pd_connector.core.question import Question
    from pd_wire.moment import Moment

    if draw.random() < 0.5:
        blocks = [draw.randrange(500) for _ in range(draw.randrange(20))]
        return Question(f"engine-{draw.randrange(9)}", Moment(draw.randbytes(8).hex(), 3), blocks).encode()
    # Never three, which are the mark's.
    items = draw.choice((1, 2, 4, 40))
    return lease_message.encode([NewEnd(draw.randbytes(16).hex(), draw.randrange(3601)) for _ in range(items)])
