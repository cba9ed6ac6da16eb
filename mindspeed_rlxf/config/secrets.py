"""Secrets of the configuration: workers and requests get them, files and messages never.

Written with an interpolation such as `${oc.env:KEY}`, a secret is shown as it was written, so the
config.yaml of a run starts the same run again. A literal secret is shown as `***`, which is refused
as a value.
"""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import GetCoreSchemaHandler, SecretStr
from pydantic_core import core_schema

MASK = "***"
SECRET_NAME = re.compile(
    r"(?:.*(?:token|secret|password|passwd|passphrase|api[_-]?key|credentials?)"
    r"|(?:.*[_.\-])?(?:key|pwd|pass|pat|auth|cookie))[_\-]?\d*",
    re.IGNORECASE,
)
INTERPOLATED = {"resource_pool": ("env",), "reward": ("url", "headers")}
"""Section -> keys below it whose values, or whose entries' values, may be secrets."""


class Secret(SecretStr):
    """A string with the text to show in its place, which may be the string itself."""

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
    """Wrap a URL; its user info and query are not shown."""
    return Secret(url, re.sub(r"\?.*", f"?{MASK}", re.sub(r"(?<=://)[^/?#]*@", f"{MASK}@", url)))


def variable_secret(name: str, value: str) -> Secret:
    """Wrap an environment variable; it is hidden if its name says so, or as a URL with secrets."""
    if SECRET_NAME.fullmatch(name):
        return Secret(value)
    return url_secret(value) if "://" in value else Secret(value, value)


def reveal(variables: Mapping[str, Secret]) -> dict[str, str]:
    """Return the real values of variables."""
    return {name: value.get_secret_value() for name, value in variables.items()}


def keep_interpolations(tree: dict[str, Any], written: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with the values of INTERPOLATED that came from interpolations as `Secret`.

    tree, written: the configuration with interpolations resolved, and as the user wrote it
    """
    found = dict(tree)
    for section in tree:
        if keys := INTERPOLATED.get(section.replace("-", "_")):
            found[section] = _wrap(tree[section], written[section], keys, hides=False)
    return found


def _wrap(value: Any, written: Any, keys: tuple[str, ...], hides: bool) -> Any:
    # A container that is one interpolation has no text of its own for each entry.
    inner = "${,}" if isinstance(written, str) else None
    if isinstance(value, dict):
        return {
            name: _wrap(item, inner or written[name], keys, hides or name in keys)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [
            _wrap(item, inner or written[place], keys, hides) for place, item in enumerate(value)
        ]
    if not (hides and isinstance(written, str) and "${" in written):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return value
    return Secret(str(value), MASK if "," in written else written)  # a default may be the secret
