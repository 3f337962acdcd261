"""A stand-in for TensorRT-LLM 1.2.1: its signatures and quirks as the mesh's contract has them, no GPU.

Answers are made up: each token follows from all ids before it, so that a sequence goes on alike elsewhere.
Environment variables say what it does beside:

    TENSORRT_LLM_STAND_IN_STEP_MS   milliseconds of a step (2)
    TENSORRT_LLM_STAND_IN_ABORT     a file; once it exists, the first process to find it removes it and aborts
"""

__version__ = "1.2.1"
