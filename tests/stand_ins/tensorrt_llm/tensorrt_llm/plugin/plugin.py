"""PluginConfig ignores names that it does not know, without a word."""

from tensorrt_llm.contracted import classes_of

globals().update(classes_of(__name__, error=ValueError, takes_any=True))
