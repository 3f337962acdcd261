"""What `from tensorrt_llm.llmapi import` finds."""

from tensorrt_llm.executor.result import CompletionOutput, RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]
