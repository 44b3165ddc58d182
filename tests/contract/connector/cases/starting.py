"""What must hold for an engine to start: hooks, configuration keys, refusals, the streamed handle, the side channel."""

from __future__ import annotations

import ast
import dataclasses
import os
from pathlib import Path
from typing import Any


def case_the_hooks_are_as_expected(lab: Any) -> None:
    from pd_connector import compat

    version = compat.require_supported(lab.version)
    assert compat.OLDEST <= version <= compat.NEWEST
    assert compat.hook_faults(lab.scheduler_class(stock=True)) == []
    assert compat.state_faults(lab.side("prefill", stock=True)) == []


def case_vllm_reads_exactly_the_known_keys(lab: Any) -> None:
    import vllm.distributed.kv_transfer.kv_connector.v1.nixl as package

    from pd_wire import names

    folder = Path(str(package.__file__)).parent
    read = set()
    for file in folder.glob("*.py"):
        if file.name.startswith("push"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get_from_extra_config":
                read.add(ast.literal_eval(node.args[0]))
    ours = {names.RETENTION_OPTION, names.LEASE_SECONDS_OPTION, names.LEASE_SHARE_OPTION}
    assert read == names.EXTRA_CONFIG_KEYS - ours


def case_a_good_configuration_starts(lab: Any) -> None:
    connector = lab.connector(lab.config(role="prefill"))
    assert type(connector.connector_scheduler).__name__ == "PDPullScheduler"
    assert connector.connector_worker is None


def case_bad_configurations_are_refused(lab: Any) -> None:
    from pd_connector.core.startup import ConfigurationRefused

    for change, wanted in (
        ({"extra": {"bidirectional_kv_transfer": True}}, "did you mean bidirectional_kv_xfer"),
        ({"extra": {"push_registration_timeout": 3}}, "only pull is supported"),
        ({"extra": {"bidirectional_kv_xfer": "true"}}, "must be true or false"),
        ({"extra": {"decoder_kv_blocks_ttl": 3}}, "decoder_kv_blocks_ttl must be more than 5 seconds"),
        ({"engine_id": "decode-1"}, "engine_id 'decode-1' is fixed"),
    ):
        refusal = ""
        try:
            lab.connector(lab.config(role="decode", **change))
        except ConfigurationRefused as error:
            refusal = str(error)
        assert wanted in refusal, change


def case_an_unarmed_api_server_is_noticed(lab: Any) -> None:
    import multiprocessing

    from pd_connector import compat
    from pd_connector.core.startup import HandleInStream
    from pd_connector.shell import stream

    version = compat.parse_version(lab.version)
    native = compat.handle_in_stream(version)
    here = stream.observe(version, {}, started_elsewhere=False)
    assert here is (HandleInStream.NATIVE if native else HandleInStream.PATCHED)
    context = multiprocessing.get_context("spawn")
    assert context is not None
    real = multiprocessing.parent_process
    try:
        multiprocessing.parent_process = lambda: object()  # type: ignore[assignment,return-value]
        armed = {stream.ARMED_PIDS: f"1,{os.getppid()}"}
        seen = [stream.observe(version, environ, started_elsewhere=False) for environ in (armed, {})]
    finally:
        multiprocessing.parent_process = real
    below = [HandleInStream.PATCHED, HandleInStream.MISSING]
    assert seen == ([HandleInStream.NATIVE, HandleInStream.NOT_IN_MESSAGES] if native else below)


def case_the_self_test_finds_what_is_to_be_patched(lab: Any) -> None:
    from pd_connector import compat
    from pd_connector.core.startup import HandleInStream
    from pd_connector.shell.checks import check_stream

    version = compat.parse_version(lab.version)
    native = compat.handle_in_stream(version)
    found = check_stream(version)
    assert found.fault is None, found
    assert found.detail == (HandleInStream.NATIVE if native else HandleInStream.PATCHED)
    real = compat.STREAM_TARGETS
    try:
        moved = [dataclasses.replace(target, method="elsewhere") for target in real]
        compat.STREAM_TARGETS = tuple(moved)  # type: ignore[misc]
        assert str(check_stream(version).fault).count("elsewhere") == (1 if native else 3)
    finally:
        compat.STREAM_TARGETS = real  # type: ignore[misc]


def case_the_stream_generators_carry_the_handle(lab: Any) -> None:
    """By the API server's own source: the generators to be wrapped below 0.33, the field in the chunk from there on."""
    import vllm

    from pd_connector import compat

    root = Path(str(vllm.__file__)).parent.parent
    native = compat.handle_in_stream(compat.parse_version(lab.version))
    for target in compat.STREAM_TARGETS:
        if target.converts_chat:
            continue  # `streaming` runs it
        tree = ast.parse(root.joinpath(*target.module.split(".")).with_suffix(".py").read_text())
        chunks = [
            call
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and getattr(call.func, "id", "").endswith("CompletionStreamResponse")
        ]
        assert chunks, target
        sends = any(keyword.arg == "kv_transfer_params" for call in chunks for keyword in call.keywords)
        assert sends is native, target
        if native:
            continue
        (method,) = (
            item
            for owner in tree.body
            if isinstance(owner, ast.ClassDef) and owner.name == target.owner
            for item in owner.body
            if isinstance(item, ast.AsyncFunctionDef) and item.name == target.method
        )
        assert target.source in [argument.arg for argument in method.args.args]


def case_the_self_test_passes(lab: Any) -> None:
    from pd_connector.shell.bench import try_guards

    checks = list(try_guards())
    assert len(checks) == 7
    assert [check.fault for check in checks] == [None] * 7


def case_the_self_test_notices_a_missing_guard(lab: Any) -> None:
    from pd_connector.shell import bench
    from pd_connector.shell.scheduler import PDPullScheduler

    stock = lab.scheduler_class(stock=True)
    for hook, guard in (
        ("get_num_new_matched_tokens", "no second match (HL-07)"),
        ("update_connector_output", "abort with both completions (EL-03)"),
        ("on_new_request", "proven continuation is pulled"),
    ):
        ours = getattr(PDPullScheduler, hook)
        setattr(PDPullScheduler, hook, getattr(stock, hook))
        try:
            faults = {check.name: check.fault for check in bench.try_guards()}
        finally:
            setattr(PDPullScheduler, hook, ours)
        assert faults[guard], (hook, faults)


def case_a_bad_frame_does_not_end_the_listener(lab: Any) -> None:
    good = _shake_hands_after_bad_frames(lab.side("decode"))
    assert good == b"payload"


def case_a_taken_port_stops_the_engine(lab: Any) -> None:
    import socket
    import threading

    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

    threading.excepthook = lambda args: None
    side = lab.side("decode")
    side.side_channel_host = "127.0.0.1"
    payload = {(0, 0): NixlHandshakePayload(compatibility_hash="x", agent_metadata_bytes=b"y")}
    refusal = ""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        side.side_channel_port = taken.getsockname()[1]
        try:
            side.set_xfer_handshake_metadata(payload)
        except RuntimeError as error:
            refusal = str(error)
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in refusal


def case_an_idle_engine_rests_only_on_a_cpu(lab: Any) -> None:
    from pd_connector.shell import scheduler

    slept: list[float] = []
    real = scheduler.time
    scheduler.time = type("Clock", (), {"sleep": staticmethod(slept.append)})  # type: ignore[assignment]
    try:
        side = lab.side("decode")
        lab.metadata(side)
        assert slept == [scheduler.IDLE_PAUSE_CPU]
        # A step that carries a deadline to the worker must not wait.
        lab.decoder_handle(list(range(100)), side=side)
        slept.clear()
        lab.metadata(side)
        assert not slept
        side._idle_pause = 0.0
        lab.metadata(side)
        assert not slept
    finally:
        scheduler.time = real


def case_stock_listener_ends_on_a_bad_frame(lab: Any) -> None:
    assert _shake_hands_after_bad_frames(lab.scheduler_class(stock=True)) is None


def _shake_hands_after_bad_frames(scheduler: Any) -> bytes | None:
    import socket
    import threading

    import msgspec
    import zmq
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ready, stop = threading.Event(), threading.Event()
    # vLLM's own thread prints a traceback when it dies; the case looks at the answer instead.
    threading.excepthook = lambda args: None
    arguments = ({(0, 0): b"payload"}, ready, stop, "127.0.0.1", port)
    thread = threading.Thread(target=scheduler._nixl_handshake_listener, args=arguments, daemon=True)
    thread.start()
    assert ready.wait(10)
    pack = msgspec.msgpack.encode
    answer = None
    context = zmq.Context()
    try:
        for frame in (b"\xff\xff", pack((GET_META_MSG, 7, 9)), pack("x")):
            _ask(context, port, frame, 300)
        for _ in range(20):
            answer = _ask(context, port, pack((GET_META_MSG, 0, 0)), 500)
            if answer is not None or not thread.is_alive():
                break
    finally:
        stop.set()
        thread.join(10)
        context.destroy(linger=0)
    return answer


def _ask(context: Any, port: int, frame: bytes, patience_ms: int) -> bytes | None:
    import zmq

    with context.socket(zmq.REQ) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.RCVTIMEO, patience_ms)
        peer.connect(f"tcp://127.0.0.1:{port}")
        peer.send(frame)
        try:
            payload: bytes = peer.recv_multipart()[0]
        except zmq.Again:
            return None
        return payload
