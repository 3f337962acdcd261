"""Log files of children stay small."""

from __future__ import annotations

import subprocess
import sys

from cli import child_logs


def test_pump_bounds_file(tmp_path, monkeypatch):
    monkeypatch.setattr(child_logs, "LIMIT_BYTES", 1000)
    ended = []
    program = "for i in range(2000): print('line', i)\nprint('end')"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    child_logs.pump("child", process.stdout, tmp_path, lambda name, line: ended.append(line == "end"))
    process.wait()
    while not any(ended):
        pass
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert sum(sizes) <= 2100


def test_tail_gives_last_lines_and_nothing_of_a_missing_file(tmp_path):
    path = tmp_path / "child.log"
    assert child_logs.tail(path, 2) == []
    path.write_text("a\nb\nc\n")
    assert child_logs.tail(path, 2) == ["b", "c"]
