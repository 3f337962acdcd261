"""Half-made engines leave nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys

from build_worker.work_folder import remove_abandoned, work_folder

HOLDER = """
import sys
from pathlib import Path
from build_worker.work_folder import work_folder
with work_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("made")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_folder_is_removed_at_the_end(tmp_path):
    with work_folder(tmp_path / "builds") as folder:
        (folder / "file").write_text("x")

    assert list((tmp_path / "builds").iterdir()) == []


def test_folder_of_a_living_worker_stays_and_that_of_a_killed_one_goes(tmp_path):
    root = tmp_path / "builds"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline().startswith(str(root))
    assert remove_abandoned(root) == 0
    holder.send_signal(signal.SIGKILL)
    holder.communicate()

    with work_folder(root) as mine:
        assert remove_abandoned(root) == 1
        assert list(root.iterdir()) == [mine]


def test_nothing_to_remove_before_the_first_build(tmp_path):
    assert remove_abandoned(tmp_path / "absent") == 0
