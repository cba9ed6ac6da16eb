"""Translate a device's host-wide number to its number within this process."""

import os


def list_visible(variable: str | None) -> list[str]:
    """Return the devices named by an environment variable, in order; [] = no restriction."""
    value = os.environ.get(variable, "") if variable else ""
    return [number.strip() for number in value.split(",") if number.strip()]


def index_within(assigned: str, variable: str | None, seen: int) -> int:
    """Return the visible-device index for the device assigned by Ray.

    Args:
        assigned: Host-wide device number (on CUDA possibly a UUID).
        variable: Hides devices. Ray sets it to the assigned device; with
            RAY_EXPERIMENTAL_NOSET_... it keeps the node's value. If unset, `assigned` is the index.
        seen: Number of visible devices.

    Raises:
        ValueError: The device is not visible.
    """
    numbers = list_visible(variable)
    if numbers and assigned not in numbers:
        raise ValueError(
            f"{variable}={','.join(numbers)} must name the device {assigned} that Ray assigned to "
            "this process; set it before `ray start` and not afterwards, or unset it"
        )
    return check_index(numbers.index(assigned) if numbers else int(assigned), variable, seen)


def check_index(index: int, variable: str | None, seen: int) -> int:
    """Return `index`, or raise ValueError unless it is below `seen`, the number of visible devices.

    The error shows `variable`, which hides devices.
    """
    if index < seen:
        return index
    value = os.environ.get(variable, "not set") if variable else "not set"
    raise ValueError(
        f"device {index} must be one of the {seen} that this process sees ({variable}={value}); "
        f"start at most {seen} processes on this host, and give `ray start` no more devices than "
        "the host has"
    )
