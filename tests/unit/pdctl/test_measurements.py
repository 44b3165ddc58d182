"""From turns to figures: medians, faults and the rule that a missing figure is never a zero."""

from dataclasses import replace

import pytest

from pdctl.core.charts import prefill_bars, ttft_lines
from pdctl.core.measurements import Leg, TurnRecord, find_faults, summarise
from pdctl.core.table import format_seconds, format_table

TURNS, CONVERSATIONS, REPLY = 3, 3, 64


def good_records() -> list[TurnRecord]:
    records = []
    for leg in Leg:
        for conversation in range(1, CONVERSATIONS + 1):
            for turn in range(1, TURNS + 1):
                pulled = 1000 * turn if leg is Leg.ON and turn > 1 else 0
                prefill = 100.0 * turn * conversation if not pulled else 40.0 * conversation
                records.append(
                    TurnRecord(
                        leg=leg,
                        conversation=conversation,
                        turn=turn,
                        request_id=f"{leg}-{conversation}-{turn}",
                        prompt_tokens=2000 * turn,
                        reply_tokens=REPLY,
                        ttft_ms=prefill + 50,
                        prefill_ms=prefill,
                        pulled_tokens=pulled,
                        reported_tokens=pulled or None,
                        transfer_ms=10.0 if pulled else 0.0,
                        ending="length",
                    )
                )
    return records


def faults_of(records: list[TurnRecord]) -> list[str]:
    return find_faults(records, CONVERSATIONS, TURNS, REPLY)


def changed(leg: Leg, turn: int, **changes) -> list[TurnRecord]:
    return [
        replace(record, **changes) if (record.leg, record.conversation, record.turn) == (leg, 2, turn) else record
        for record in good_records()
    ]


def test_good_records_have_no_faults():
    assert faults_of(good_records()) == []


@pytest.mark.parametrize(
    ("records", "fault"),
    [
        (changed(Leg.ON, 2, pulled_tokens=0, reported_tokens=None, transfer_ms=0.0), "P pulled nothing from D"),
        (changed(Leg.ON, 2, pulled_tokens=None), "no pulled tokens from P's metrics"),
        (changed(Leg.OFF, 2, prefill_ms=None), "no prefill duration from the router"),
        (changed(Leg.OFF, 2, ttft_ms=None), "no TTFT from the client"),
        (changed(Leg.ON, 3, transfer_ms=0.0), "P pulled tokens, but its transfer time didn't move"),
        (changed(Leg.ON, 3, transfer_ms=None), "no transfer time from P's metrics"),
        (changed(Leg.OFF, 3, pulled_tokens=128), "P pulled 128 tokens although there was nothing to reuse"),
        (changed(Leg.ON, 1, pulled_tokens=128), "P pulled 128 tokens although there was nothing to reuse"),
        (changed(Leg.ON, 2, reported_tokens=1), "P's connector reported 1 pulled tokens, P's counter says 2000"),
        (changed(Leg.ON, 2, ending=None), "the reply ended with None after 64 of 64 tokens"),
        (changed(Leg.OFF, 2, reply_tokens=3), "the reply ended with length after 3 of 64 tokens"),
    ],
)
def test_each_way_to_be_wrong_is_named_with_its_turn(records, fault):
    (found,) = faults_of(records)
    assert found.endswith(fault)
    assert "conversation 2, turn" in found


def test_missing_turns_and_unequal_lengths_are_faults():
    assert faults_of(good_records()[:-2]) == ["reuse ON: 2 of 9 turns are missing"]
    assert faults_of([]) == ["reuse OFF: 9 of 9 turns are missing", "reuse ON: 9 of 9 turns are missing"]
    assert faults_of(changed(Leg.ON, 2, prompt_tokens=4001)) == [
        "turn 2: prompts of 4000, 4001 tokens can't be compared"
    ]


def test_speed_is_never_a_fault():
    slow = [replace(record, prefill_ms=9999.0, ttft_ms=9999.0) for record in good_records() if record.leg is Leg.ON]
    assert faults_of([*(record for record in good_records() if record.leg is Leg.OFF), *slow]) == []


def test_rows_are_medians_over_conversations_and_keep_turn_1_apart():
    rows = summarise(good_records())
    assert [row.turn for row in rows] == [1, 2, 3]
    last = rows[-1]
    assert last.prompt_tokens == 6000
    # Conversations take 300, 600 and 900 ms OFF; 40, 80 and 120 ms ON.
    assert last.off.prefill_ms == 600
    assert last.on.prefill_ms == 80
    assert last.prefill_ratio == 7.5
    assert last.on.ttft_span == (90, 170)
    assert last.on.pulled_tokens == 3000
    assert last.on.compute_ms == 70


def test_a_median_over_a_gap_is_refused():
    with pytest.raises(ValueError, match="missing"):
        summarise(changed(Leg.ON, 2, prefill_ms=None))


def test_the_table_holds_every_figure_in_line():
    lines = format_table(summarise(good_records())).splitlines()
    assert lines[-1].split() == ["3", "6,000", "650", "130", "5.0x", "600", "80", "7.5x", "3,000", "10.0"]
    assert lines[3].endswith("cold: nothing to reuse yet")
    assert len({len(line) for line in lines[-2:]}) == 1
    titles, columns = lines[0], lines[1]
    assert titles.index("TTFT ms") >= columns.index("OFF")
    assert titles.index("prefill ms") > columns.index("ratio")
    assert columns.split() == ["turn", "tokens", "OFF", "ON", "ratio", "OFF", "ON", "ratio", "tokens", "ms"]


def test_stages_add_up():
    lines = format_seconds([("start", 60.0), ("a longer name", 1.25)]).splitlines()
    assert lines == ["start             60.0 s", "a longer name      1.2 s", "total             61.2 s"]


def test_pictures_show_the_same_figures():
    rows = summarise(good_records())
    off, on = ttft_lines(rows)
    assert (off.label, on.label) == ("reuse OFF", "reuse ON")
    assert off.prompt_tokens == on.prompt_tokens == (2000, 4000, 6000)
    assert on.middle[-1] == 130
    assert (on.low[-1], on.high[-1]) == (90, 170)
    bars = prefill_bars(rows)
    assert [bar.off for bar in bars] == [200, 400, 600]
    assert bars[-1].on_compute == 70
    assert bars[-1].on_transfer == 10
    assert bars[-1].on == 80
    assert [bar.tick for bar in bars] == list(off.ticks) == ["2,000\nturn 1 (cold)", "4,000\nturn 2", "6,000\nturn 3"]
