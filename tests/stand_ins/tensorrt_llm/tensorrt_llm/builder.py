"""What builds engines. The mesh builds by the command line, so mostly the arguments are here."""

import json
from pathlib import Path

from tensorrt_llm.contracted import classes_of

_classes = classes_of(__name__)
globals().update(_classes)


class EngineConfig(_classes["EngineConfig"]):
    """config.json of an engine."""

    @classmethod
    def from_json_file(cls, config_file: str):
        config = json.loads(Path(config_file).read_text())
        return cls(config["pretrained_config"], config["build_config"], config["version"])
