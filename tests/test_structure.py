"""The shape of the code: who may import whom, and what a gateway never loads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import build_worker.backends
import infer_worker.backends
from mesh.engine_import import NEEDED_FILES
from mesh.kinds import KINDS

ROOT = Path(__file__).parent.parent
SERVICES = ("gateway", "build_worker", "infer_worker")
HEAVY = ("torch", "openvino", "openvino_genai", "tensorrt_llm", "vllm", "nncf", "transformers")


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("package", SERVICES)
def test_no_service_imports_another(package):
    others = {*SERVICES, "cli", "tests"} - {package}
    for path in files(package):
        assert not imported(path) & others, path


def test_mesh_imports_no_service():
    for path in files("mesh"):
        assert not imported(path) & {*SERVICES, "cli", "tests"}, path


def test_every_kind_is_built_run_and_imported():
    assert build_worker.backends._BUILDERS.keys() == KINDS.keys()
    assert infer_worker.backends._BACKENDS.keys() == KINDS.keys()
    assert NEEDED_FILES.keys() == KINDS.keys()


@pytest.mark.parametrize(("library", "owner"), [("redis", "mesh/bus"), ("minio", "mesh/object_store.py")])
def test_one_module_owns_each_outside_thing(library, owner):
    for package in (*SERVICES, "mesh"):
        for path in files(package):
            if not path.relative_to(ROOT).as_posix().startswith(owner):
                tree = ast.parse(path.read_text())
                at_run_time = {
                    name.split(".")[0]
                    for node in tree.body
                    for name in (
                        [alias.name for alias in node.names]
                        if isinstance(node, ast.Import)
                        else [node.module or ""]
                        if isinstance(node, ast.ImportFrom)
                        else []
                    )
                }
                assert library not in at_run_time, path


def test_a_gateway_loads_no_engine_library():
    code = f"import sys, gateway.main; print([m for m in {HEAVY!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("version", ["6.33.5", "7.36.2"])
def test_generated_code_loads_under_protobuf(version, tmp_path):
    uv = Path(sys.executable).with_name("uv")
    subprocess.run(
        [
            uv,
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            tmp_path,
            f"protobuf=={version}",
            "googleapis-common-protos",
        ],
        check=True,
    )
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "enginemesh").rglob("*_pb2.py"))
    ]
    code = f"""
import importlib, google.protobuf
assert google.protobuf.__version__ == {version!r}, google.protobuf.__version__
for name in {modules!r}:
    importlib.import_module(name)
from enginemesh.v1 import inference_pb2
message = inference_pb2.GenerateRequest(model="m", sampling={{"max_tokens": 3}})
assert inference_pb2.GenerateRequest.FromString(message.SerializeToString()) == message
"""
    # The folder goes first on the path, before this environment's own protobuf.
    subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, check=True
    )
