"""Record or compare the resolved values of every shipped and older configuration.

    python -m tests.golden.resolved_configs          writes tests/golden/resolved/NAME.json

One JSON object per configuration. Keys of a role include its architecture and optimizer.
"""

import copy
import json
import os
from pathlib import Path
from typing import Any

from mindspeed_rlxf.config.compose import builtin_config_dir, compose, config_names
from mindspeed_rlxf.config.schema import RunConfig
from tests import older_yaml

FOLDER = Path(__file__).with_name("resolved")
SHIPPED = config_names([builtin_config_dir()])
OLDER = [f"older_{name}" for name in older_yaml.EVERY]
VOCAB_SIZE = 32000
"""Of the model whose YAML has none: the older toolkit takes it from the tokenizer's folder."""


def tree_of(name: str) -> dict[str, Any]:
    """Return the composed tree of a shipped configuration, or of `older_NAME`."""
    if name in SHIPPED:
        return compose(name, ["device.kind=cpu", "runtime.address=head:6379"])
    tree = older_yaml.EVERY[name.removeprefix("older_")]()
    wanted = tree.pop("defaults")[0]["model"]
    tree["model"] = {model: copy.deepcopy(older_yaml.models()[model]) for model in wanted}
    for model in tree["model"].values():
        if not {"vocab_size", "padded_vocab_size"} & model.keys():
            model["vocab_size"] = VOCAB_SIZE
    tree |= {"device": {"kind": "cpu"}, "runtime": {"address": "head:6379"}}
    return tree


def values_of(config: RunConfig) -> dict[str, Any]:
    """Return the values of a configuration, with architecture and optimizer keys in their role.

    The working directory in paths is written as `<cwd>`.
    """
    values = config.model_dump(mode="json")
    for section in values.values():
        if isinstance(section, dict):
            section |= section.pop("architecture", None) or {}
            section |= section.pop("optimizer", None) or {}
    text = json.dumps(values, indent=1, sort_keys=True)
    result: dict[str, Any] = json.loads(text.replace(os.getcwd(), "<cwd>"))
    return result


def main() -> None:
    from mindspeed_rlxf.compat.mindspeed_llm.translate import translate
    from mindspeed_rlxf.config.load import resolve

    FOLDER.mkdir(exist_ok=True)
    for name in [*SHIPPED, *OLDER]:
        values = values_of(resolve(translate(tree_of(name)), name))
        text = json.dumps(values, indent=1, sort_keys=True)
        (FOLDER / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
