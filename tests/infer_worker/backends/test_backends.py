"""The table of engine kinds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from infer_worker.backends import backend_class
from infer_worker.backends.fake import FakeBackend
from mesh.errors import UnsupportedError


def test_known_kind_gives_its_class():
    assert backend_class("fake") is FakeBackend


def test_unknown_kind_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="no engine kind 'abacus'; known are fake, openvino"):
        backend_class("abacus")


def test_asking_for_versions_loads_no_engine_library():
    program = (
        "import sys; from infer_worker.backends import backend_class;"
        "print(backend_class('openvino').versions());"
        "assert not {'openvino', 'openvino_genai', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
