"""Secrets in the configuration: workers and requests get them, files and messages never.

A secret written as an interpolation such as `${oc.env:KEY}` is shown as written, so a run's
config.yaml starts the same run again. A literal secret is shown as `***`, refused as a value.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import GetCoreSchemaHandler, SecretStr
from pydantic_core import core_schema

from mindspeed_rlxf.config.problems import Problem

MASK = "***"
SECRET_NAME = re.compile(
    r"(?:.*(?:token|secret|password|passwd|passphrase|api[_-]?key|credentials?)"
    r"|(?:.*[_.\-])?(?:key|pwd|pass|pat|auth|cookie))[_\-]?\d*",
    re.IGNORECASE,
)
INTERPOLATED = {"resource_pool": ("env",), "reward": ("url", "headers")}
"""Section -> keys below it with possible secrets in their values or entries."""


class Secret(SecretStr):
    """A string with a text to show in its place, possibly the string itself."""

    def __init__(self, value: str, shown: str = MASK) -> None:
        super().__init__(value)
        self._shown = shown

    @property
    def is_open(self) -> bool:
        """Whether the string is shown as it is."""
        return self._shown == self.get_secret_value()

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Any], handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        text = core_schema.no_info_after_validator_function(cls, core_schema.str_schema())
        return core_schema.union_schema(
            [core_schema.is_instance_schema(cls), text],
            custom_error_type="string_type",
            serialization=core_schema.plain_serializer_function_ser_schema(str, when_used="json"),
        )

    def _display(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        return repr(self._shown)


def url_secret(url: str) -> Secret:
    """Wrap a URL, hiding its user info and query."""
    return Secret(url, re.sub(r"\?.*", f"?{MASK}", re.sub(r"(?<=://)[^/?#]*@", f"{MASK}@", url)))


def variable_secret(name: str, value: Any) -> Any:
    """Wrap an environment variable; hide it if its name or URL says so.

    Numbers become strings. Other values are returned, as None if hidden; pydantic refuses them.
    """
    hidden = SECRET_NAME.fullmatch(name)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None if hidden and not isinstance(value, Secret) else value
    text = str(value)
    if hidden:
        return Secret(text)
    return url_secret(text) if "://" in text else Secret(text, text)


def find_masks(key: str, values: Mapping[str, Secret]) -> Iterator[Problem]:
    """Yield a problem for each value copied from a masked text."""
    for name, value in values.items():
        if MASK in value.get_secret_value():
            remedy = "give it again, by ${oc.env:NAME}"
            yield Problem(f"{key}.{name}".strip("."), "hides a secret", MASK, remedy)


def reveal(variables: Mapping[str, Secret]) -> dict[str, str]:
    """Return the variables' real values."""
    return {name: value.get_secret_value() for name, value in variables.items()}


def keep_interpolations(tree: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with interpolated INTERPOLATED values wrapped as `Secret`.

    Args:
        tree: The configuration with resolved interpolations.
        written: The same as the user wrote it.
    """
    wrapped = dict(tree)
    for section in tree:
        keys = INTERPOLATED.get(section.replace("-", "_"))
        if keys is not None:
            wrapped[section] = _wrap(tree[section], written[section], keys, hides=False)
    return wrapped


def _wrap(value: Any, written: Any, keys: tuple[str, ...], hides: bool) -> Any:
    # A container that is one interpolation has no text of its own for each entry.
    inner = "${,}" if isinstance(written, str) else None
    if isinstance(value, dict):
        entries = {}
        for name, entry in value.items():
            entries[name] = _wrap(entry, inner or written[name], keys, hides or name in keys)
        return entries
    if isinstance(value, list):
        return [_wrap(entry, inner or written[i], keys, hides) for i, entry in enumerate(value)]
    is_interpolated = isinstance(written, str) and "${" in written and isinstance(value, str)
    if not (hides and is_interpolated):
        return value
    return Secret(value, MASK if "," in written else written)  # a default may be the secret
