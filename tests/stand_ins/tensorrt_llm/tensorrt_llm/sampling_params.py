"""How tokens are chosen: dataclasses."""

from tensorrt_llm.contracted import classes_of

globals().update(classes_of(__name__))
