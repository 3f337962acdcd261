"""Arguments of LLM: pydantic models that refuse unknown names."""

from tensorrt_llm.contracted import classes_of

globals().update(classes_of(__name__, error=ValueError))
