"""A server that ignores If-None-Match is found out, and publishing on it is safe all the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from mesh.conditional_writes import are_honoured
from mesh.engine_store import EngineStore
from tests import engines

FILES = {"tokenizer.json": b"{}"}


@pytest.fixture
def heedless(connect_store, monkeypatch):
    """Clients of the real server whose header gets lost, as on a server that does not know it."""

    def make():
        objects = connect_store()
        send = objects._http.urlopen

        def without_condition(method, url, **more):
            if "If-None-Match" in more.get("headers", {}):
                more["headers"] = {}
            return send(method, url, **more)

        monkeypatch.setattr(objects._http, "urlopen", without_condition)
        return objects

    return make


def test_server_that_honours_them_is_told_from_one_that_does_not(objects, heedless):
    assert are_honoured(objects)
    assert are_honoured(objects)
    assert not are_honoured(heedless())


def test_racing_publishers_are_safe_without_them(heedless, tmp_path):
    folder = engines.write(tmp_path, FILES)
    first = engines.manifest(FILES)
    second = engines.manifest(FILES, build_key=first.build_key, precision="other")
    with ThreadPoolExecutor(4) as pool:
        publishing = [
            pool.submit(EngineStore(heedless()).publish, manifest, folder)
            for manifest in (first, second, first, second)
        ]
        for each in publishing:
            each.result()

    store = EngineStore(heedless())
    assert {record.digest for record in store.engines("m")} == {first.digest, second.digest}
    assert store.find_build(first.build_key) in {first.digest, second.digest}
