"""Where the stand-ins lie: folders for PYTHONPATH."""

from pathlib import Path

TENSORRT_LLM = Path(__file__).parent / "tensorrt_llm"
GPU = Path(__file__).parent / "gpu"
TRTLLM_BUILD = Path(__file__).parent / "trtllm-build"
