"""Read verl's YAML files, their interpolations, and the models that they name."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from mindspeed_rlxf.compat.verl.table import DEFAULTS, is_known
from mindspeed_rlxf.config.compose import explain
from mindspeed_rlxf.config.keys import Tree
from mindspeed_rlxf.config.problems import ConfigError, Problem


def is_verl(tree: Mapping[str, Any]) -> bool:
    """Return whether a tree has verl's sections, not ours or MindSpeed-LLM's."""
    nested = tree.get("actor_rollout_ref")
    known = {"actor", "rollout", "model"}
    return "trainer" in tree or (isinstance(nested, Mapping) and not known.isdisjoint(nested))


def read_verl(file: str | Path, overrides: Sequence[str] = ()) -> Tree:
    """Return the YAML file with overrides in Hydra's grammar; interpolations stay as they are.

    Raises:
        ConfigError: The file or an override cannot be read, or the file is no mapping.
    """
    if not Path(file).is_file():
        raise ConfigError(Problem(str(file), "no such file", remedy="correct the path", colon=True))
    try:
        tree: Any = OmegaConf.load(file)
        for each in OverridesParser.create().parse_overrides(list(overrides)):
            value = "???" if each.is_delete() else each.value()
            OmegaConf.update(tree, each.key_or_group, value, force_add=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError) as error:
        raise ConfigError(explain(error, str(file), ())) from error
    plain: Any = OmegaConf.to_container(tree)
    if not isinstance(plain, dict) or not is_verl(plain):
        rule = "must hold verl's sections, as trainer and actor_rollout_ref"
        raise ConfigError(Problem(str(file), rule, remedy="use --config-name for other files"))
    return {str(name): value for name, value in plain.items()}


def resolve_interpolations(theirs: Tree) -> Tree:
    """Return verl's tree with its interpolations resolved, also to keys that only verl's file has.

    Raises:
        ConfigError: An interpolation cannot be resolved.
    """
    config, absent = OmegaConf.create(theirs), list[str]()
    while True:
        try:
            plain: Any = OmegaConf.to_container(config, resolve=True)
            break
        except (OmegaConfBaseException, ValueError) as error:
            named = re.search(r"'([\w.]+)'", str(error))
            key = named[1] if named and isinstance(error, InterpolationKeyError) else ""
            if key in absent or not is_known(key):
                raise ConfigError(explain(error, "of verl", ())) from error
            OmegaConf.update(config, key, DEFAULTS.get(key), force_add=True)
            absent.append(key)
    for key in absent:
        *sections, name = key.split(".")
        section = plain
        for parent in sections:
            section = section[parent]
        del section[name]
    return dict(plain)


def find_model(path: Any) -> Any:
    """Return a model's folder: the path, or the folder of a name in this host's Hugging Face cache.

    A name that is not there is returned as it is.
    """
    if not isinstance(path, str) or Path(path).expanduser().exists():
        return path
    from huggingface_hub import try_to_load_from_cache

    with contextlib.suppress(ValueError):  # no name of a model
        if isinstance(found := try_to_load_from_cache(path, "config.json"), str):
            return str(Path(found).parent)
    return path
