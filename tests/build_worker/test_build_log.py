"""The log of a build: whole lines, without secrets, within its limit."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from build_worker.build_log import BuildLog
from build_worker.log_keeper import LogKeeper
from mesh.build_logs import BuildLogs
from mesh.settings import BuildWorkerSettings


def lines(log):
    return log.to_bytes().decode().splitlines()


def test_what_a_tool_says_is_kept_by_line_whatever_the_pieces():
    log = BuildLog(4096)
    for piece in (b"one\ntw", b"o\nthr", b"ee"):
        log.write(piece)
    log.end_line()

    assert lines(log) == ["one", "two", "three"]


def test_own_lines_have_the_time_and_end_a_tools_line():
    log = BuildLog(4096)
    log.write(b"half a line")
    log.say("stage\nconvert")

    first, second = lines(log)
    assert first == "half a line"
    moment, word, rest = second[:19], second[20:25], second[26:]
    age = datetime.now(timezone.utc) - datetime.fromisoformat(moment).replace(tzinfo=timezone.utc)
    assert timedelta(seconds=-1) < age < timedelta(seconds=60)
    assert (word, rest) == ("stage", "convert")


def test_bar_counts_as_it_was_drawn_last():
    log = BuildLog(4096)
    log.write(b"\r 10 %\r 20 %")
    log.write(b"\r100 %\ndone\r\n")

    assert lines(log) == ["100 %", "done"]


def test_beginning_and_end_are_kept():
    log = BuildLog(4096)
    for number in range(10_000):
        log.write(b"line %d\n" % number)

    kept = lines(log)
    assert (kept[0], kept[-1]) == ("line 0", "line 9999")
    assert len(log.to_bytes()) < 4096 + 100
    (gap,) = [line for line in kept if line.startswith("...")]
    left_out = int(gap.split()[1])
    whole = sum(len(b"line %d\n" % number) for number in range(10_000))
    assert len(log.to_bytes()) - len(gap) - 1 + left_out == whole
    assert all(line.startswith(("line ", "...")) for line in kept)


def test_endless_line_is_cut():
    log = BuildLog(1 << 20)
    log.write(b"x" * 100_000)
    log.end_line()

    assert len(log.to_bytes()) <= 100_000
    assert max(map(len, lines(log))) <= 8192


def test_secrets_and_bad_bytes_do_not_get_in():
    log = BuildLog(4096, ["topsecret", ""])
    log.write(b"key=topsecret \xff\n")
    log.say("topsecret")

    assert b"topsecret" not in log.to_bytes()
    assert lines(log)[0] == "key=*** \N{REPLACEMENT CHARACTER}"


@pytest.fixture
def keeper(store):
    return LogKeeper(store.objects, "b1", BuildWorkerSettings())


async def test_next_attempt_goes_on_with_the_log(keeper, store):
    keeper.log.say("first")
    await keeper.store()
    heir = LogKeeper(store.objects, "b1", BuildWorkerSettings())
    await heir.go_on()
    heir.log.say("second")
    await heir.store(engine="abc")

    logs = BuildLogs(store.objects)
    assert [line.split()[-1] for line in logs.read("operations/b1").splitlines()] == ["first", "second"]
    assert logs.read("engines/abc") == logs.read("operations/b1")


async def test_old_logs_of_builds_go_and_those_of_engines_stay(keeper, store):
    keeper.log.say("text")
    await keeper.store(engine="abc")
    logs = BuildLogs(store.objects)

    assert logs.delete_older(timedelta(hours=1)) == 0
    assert logs.delete_older(timedelta(seconds=-60)) == 1
    assert [entry.key for entry in store.objects.list("logs/")] == ["logs/engines/abc.log"]


async def test_log_holds_what_the_tools_said_of_a_good_and_a_bad_build(worker, queue, create, store):
    good = await queue.wait(await create())
    bad = await queue.wait(await create(source="absent"))

    logs = BuildLogs(store.objects)
    text = logs.read(good.name)
    for words in ("attempt 1 on workers/b1", "build key ", "stage convert", "fake convert", "stage publish"):
        assert words in text
    failed = logs.read(bad.name)
    assert "no engine: spec.source: 'absent' is not in a folder" in failed
    (engine,) = store.engines("m")
    assert logs.read(f"engines/{engine.digest}") == text
