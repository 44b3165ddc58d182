"""Whole turns on a decode engine's real scheduler, and its side channel, for cases about what becomes of their blocks.

Like the cases it imports no vLLM on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TURN = list(range(1000, 1100))
"""Tokens of the turn that D holds: 99 computed, 6 whole blocks of 16."""
WHOLE = 6


def supported() -> bool:
    """Whether this release can leave a finished turn's blocks in the pool."""
    from pd_connector import compat

    return compat.unpinned_obstacle() is None


def turn(
    lab: Any, scheduler: Any, tokens: Sequence[int] = TURN, name: str = "turn", more: Any = None, **router: Any
) -> Any:
    """One turn over `tokens`, of which the last is sampled; returns the handle. `more`: arguments of the request."""
    from support.vllm_lab import prefill_handle

    prompt = list(tokens[:-1])
    request = lab.request(name, prompt, prefill_handle(len(prompt), **router), max_tokens=1, **(more or {}))
    scheduler.add_request(request)
    lab.step(scheduler)
    _, outputs = lab.step(scheduler, received={name})
    for _ in range(3):
        answers = [one for output in outputs.values() for one in output.outputs if one.finish_reason is not None]
        if answers:
            return answers[0].kv_transfer_params
        _, outputs = lab.step(scheduler)
    raise AssertionError("the turn does not end")


def idle(lab: Any, scheduler: Any) -> None:
    """Steps without work."""
    for _ in range(3):
        lab.step(scheduler)


def pool_of(scheduler: Any) -> Any:
    """vLLM's block pool."""
    return scheduler.kv_cache_manager.block_pool


def is_free(scheduler: Any) -> bool:
    """Whether every block can be taken."""
    pool = pool_of(scheduler)
    return bool(pool.get_num_free_blocks() == pool.num_gpu_blocks - 1)


def retention(scheduler: Any) -> Any:
    """What our connector made of the option."""
    return scheduler.connector.connector_scheduler._retention


def question(handle: dict[str, Any]) -> Any:
    """The question which of a handle's whole blocks are intact."""
    from pd_connector.core.question import Question
    from pd_wire import moment

    return Question(
        handle["remote_engine_id"], moment.parse(handle["pd_moment"]), handle["remote_block_ids"][0][:WHOLE]
    )


def intact(scheduler: Any, handle: dict[str, Any]) -> int:
    """How many of a handle's whole blocks are intact, by the holder's own answer."""
    from pd_connector.core.question import decode_answer

    asked = question(handle)
    return decode_answer(retention(scheduler).answer(asked.encode()), len(asked.blocks))


class SideChannel:
    """A decode engine's side channel, open; yields what changes in its handles."""

    def __init__(self, scheduler: Any, port: int = 0) -> None:
        """`port`: 0 for any free one."""
        self.side = scheduler.connector.connector_scheduler
        self._port = port

    def __enter__(self) -> dict[str, Any]:
        import socket

        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

        with socket.socket() as free:
            free.bind(("127.0.0.1", self._port))
            self.side.side_channel_port = free.getsockname()[1]
        self.side.side_channel_host = "127.0.0.1"
        payload = {(0, 0): NixlHandshakePayload(compatibility_hash="x", agent_metadata_bytes=b"y")}
        self.side.set_xfer_handshake_metadata(payload)
        return {"remote_host": "127.0.0.1", "remote_port": self.side.side_channel_port}

    def __exit__(self, *_: object) -> None:
        self.side.shutdown()


def bent(message: bytes, draw: Any) -> bytes:
    """A message with something wrong with it."""
    kind = draw.randrange(5)
    if kind == 0:
        return bytes(draw.randbytes(draw.randrange(0, 200)))
    if kind == 1:
        return message[: draw.randrange(len(message))]
    if kind == 2:
        return message + bytes(draw.randbytes(draw.randrange(1, 20)))
    at = draw.randrange(len(message))
    changed = bytearray(message)
    changed[at] ^= 1 << draw.randrange(8)
    return bytes(changed) if kind == 3 else bytes(draw.randbytes(4)) + message[4:]


def exchange(channel: dict[str, Any], messages: Sequence[bytes], last: bytes, at_a_time: int = 500) -> list[bytes]:
    """Send everything over one connection, `last` after each portion; every reply but those, in order.

    `last` must be a message whose reply no other message gets.
    """
    import zmq

    replies: list[bytes] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://{channel['remote_host']}:{channel['remote_port']}")
        socket.send_multipart([b"", last])
        mark = socket.recv_multipart()[-1]
        for start in range(0, len(messages), at_a_time):
            for message in messages[start : start + at_a_time]:
                socket.send_multipart([b"", message])
            socket.send_multipart([b"mark", last])  # not for anybody: three frames with something in the second
            socket.send_multipart([b"", last])
            while (reply := socket.recv_multipart()[-1]) != mark:
                replies.append(reply)
    return replies
