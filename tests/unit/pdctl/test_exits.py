"""Which line of a log explains a death."""

import pytest

from pdctl.core.exits import SHOWN_LINES, Exit, cause_line, exit_report

PREFIX = "(EngineCore pid=12) ERROR 11-30 07:39:06 [core.py:1] "
VLLM_LOG = [
    f"{PREFIX}Traceback (most recent call last):",
    f'{PREFIX}  File "x.py", line 1, in f',
    f"{PREFIX}ValueError: No available memory for the cache blocks.",
    "(APIServer pid=11) Traceback (most recent call last):",
    "(APIServer pid=11) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
]


@pytest.mark.parametrize(
    ("tail", "cause"),
    [
        (VLLM_LOG, "ValueError: No available memory for the cache blocks."),
        (
            VLLM_LOG[3:],
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        ),
        (["pd-router: --handle-ttl must be below --engine-ttl"], "pd-router: --handle-ttl must be below --engine-ttl"),
        (
            ["usage: api_server [-h]", "api_server.py: error: unrecognized arguments: --x"],
            "api_server.py: error: unrec",
        ),
        (["INFO: all is well", "torch.OutOfMemoryError: CUDA out of memory."], "torch.OutOfMemoryError: CUDA out"),
        (["INFO: all is well", ""], None),
        ([], None),
    ],
)
def test_the_first_hand_reason_is_found(tail, cause):
    found = cause_line(tail)
    assert found == cause if cause is None else found is not None and found.startswith(cause)


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-9, "was ended by SIGKILL"),
        (-64, "was ended by signal 64"),
    ],
)
def test_an_exit_reads_as_a_sentence(returncode, words):
    assert str(Exit.from_returncode(returncode)) == words


def test_a_report_is_bounded_and_points_to_the_log():
    tail = [f"line {number}" for number in range(200)]
    lines = exit_report("decode-0", "exited with code 1", tail, "/logs/decode-0.log").splitlines()
    assert lines[0] == "decode-0 exited with code 1"
    assert lines[1] == "the last lines of its log (/logs/decode-0.log):"
    assert lines[2:] == [f"  line {number}" for number in range(200 - SHOWN_LINES, 200)]
    assert exit_report("x", "died", ["", " "], "/l").splitlines()[-1] == "it wrote nothing to its log (/l)"
