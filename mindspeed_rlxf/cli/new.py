"""`new`: write a first configuration for a Hugging Face folder.

Exit codes: 0 = written; 2 = user mistake, one `error:` line per problem.
"""

from collections.abc import Sequence
from pathlib import Path

import yaml

from mindspeed_rlxf.cli.command_line import Parser, command, number, option, program_name
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.starter import STAGES, first_yaml

GSM8K = "dataset/gsm8k/train.parquet"
OPTIONS = (
    option("name", metavar="NAME", help="name of the configuration; writes NAME.yaml here"),
    option("--stage", choices=[*STAGES], default="grpo", help="what to train by (grpo)"),
    option("--model", required=True, help="Hugging Face folder"),
    option("--train-files", default=GSM8K, help=f"parquet or jsonl file of prompts ({GSM8K})"),
    option("--reward-model", help="folder of a sequence classifier; default: rules score"),
    option("--devices", type=number(1), default=8, help="devices of the host (8)"),
    option("--seq-length", type=number(2), default=1024, help="prompt and response, tokens (1024)"),
)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Write NAME.yaml into the current folder and print the next command; return the exit code.

    Nothing is written if the file exists, or the configuration would be refused.
    """
    parser = Parser(
        OPTIONS, prog=program_name("new"), description="A first configuration for a model."
    )
    arguments = parser.parse_args(argv)
    name = arguments.name.removesuffix(".yaml")
    file = Path(f"{name}.yaml")
    if file.exists():
        remedy = "choose another name, or remove it"
        raise UserError(Problem("NAME", "must not exist", str(file), remedy))
    text = first_yaml(
        arguments.stage,
        arguments.model,
        arguments.train_files,
        arguments.devices,
        arguments.seq_length,
        arguments.reward_model,
    )
    resolve({**yaml.safe_load(text), "dry_run": True}, name)
    file.write_text(text, encoding="utf-8")
    run = f"mindspeed-rlxf train --config-dir {file.parent} --config-name {name}"
    print(f"wrote {file}; its plan: {run} dry_run=true")
    return 0
