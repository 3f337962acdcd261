"""What builds engines. The mesh builds by the command line, so only the arguments are here."""

from tensorrt_llm.contracted import classes_of

globals().update(classes_of(__name__))
