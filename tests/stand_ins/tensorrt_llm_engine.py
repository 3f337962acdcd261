"""An engine of kind tensorrt_llm for the stand-in library.

`python -m tests.stand_ins.tensorrt_llm_engine FOLDER` writes one as `enginemesh export` would.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mesh.capabilities import LOGPROBS, PENALTIES, PREFIX_CACHING, REPRODUCIBLE, SEED
from mesh.engine_copy import ENGINE_FOLDER, MANIFEST_FILE, SIGNATURES_FOLDER
from mesh.manifest import Manifest, TokenizerInfo
from mesh.target import Target
from tests import engines

VERSIONS = {"tensorrt": "10.14.1.48.post1", "tensorrt_llm": "1.2.1"}
TARGET = Target.from_name("h100-sxm-80gb")
VOCAB_SIZE = 256
EOS = 2
TOKENS_PER_BLOCK = 32


def tokenizer() -> bytes:
    """A token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made.to_str().encode()


def make_engine(folder: Path, *, ranks: int = 1, **fields) -> Manifest:
    """Writes an engine's files and returns its manifest; fields are the manifest's."""
    sizes = {"max_batch_size": 8, "max_seq_len": 512, "max_num_tokens": 128}
    sizes |= {name: fields[name] for name in sizes if name in fields}
    config = {
        "version": VERSIONS["tensorrt_llm"],
        "pretrained_config": {"vocab_size": VOCAB_SIZE, "mapping": {"world_size": ranks}},
        "build_config": {
            **sizes,
            "max_input_len": sizes["max_seq_len"] - 1,
            "plugin_config": {"tokens_per_block": TOKENS_PER_BLOCK},
        },
    }
    files = {"config.json": json.dumps(config).encode(), "tokenizer.json": tokenizer()}
    files |= {f"rank{rank}.engine": b"plan" for rank in range(ranks)}
    names = json.loads(fields.get("options", {}).get("lora", "[]"))
    files |= {f"lora/{number}/adapter_config.json": b"{}" for number in range(len(names))}
    defaults = {
        **sizes,
        "model": "standin",
        "kind": "tensorrt_llm",
        "precision": "fp8",
        "target": TARGET,
        "versions": VERSIONS,
        "capabilities": (LOGPROBS, PENALTIES, PREFIX_CACHING, REPRODUCIBLE, SEED),
        "tokenizer": TokenizerInfo(vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,)),
    }
    manifest = engines.manifest(files, **(defaults | fields))
    engines.write(folder, files)
    return manifest


def export_engine(folder: Path, **fields) -> Manifest:
    """As `enginemesh export` writes an engine."""
    (folder / SIGNATURES_FOLDER).mkdir(parents=True)
    manifest = make_engine(folder / ENGINE_FOLDER, **fields)
    (folder / MANIFEST_FILE).write_bytes(manifest.to_bytes())
    return manifest


if __name__ == "__main__":
    export_engine(Path(sys.argv[1]), max_batch_size=16)
