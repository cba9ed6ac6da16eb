"""Translate the number of a device on its host to its number within this process."""

import os


def list_visible(variable: str | None) -> list[str]:
    """Return the devices that an environment variable names, in order; [] = no restriction."""
    value = os.environ.get(variable, "") if variable else ""
    return [number.strip() for number in value.split(",") if number.strip()]


def index_within(assigned: str, variable: str | None, seen: int) -> int:
    """Return the index, among the devices that this process sees, of the device that Ray assigned.

    Args:
        assigned: The device's number on the host (on CUDA it may be a UUID).
        variable: Hides devices. Ray sets it to the assigned device; with
            RAY_EXPERIMENTAL_NOSET_... it stays as the node has it. Without it the number counts.
        seen: Number of devices that the process sees.

    Raises:
        ValueError: The process does not see the device.
    """
    numbers = list_visible(variable)
    if numbers and assigned not in numbers:
        raise ValueError(
            f"{variable}={','.join(numbers)} must name the device {assigned} that Ray assigned to "
            "this process; set it before `ray start` and not afterwards, or unset it"
        )
    return check_index(numbers.index(assigned) if numbers else int(assigned), variable, seen)


def check_index(index: int, variable: str | None, seen: int) -> int:
    """Return `index`. Raises ValueError unless it is below `seen`, the number of devices.

    variable: name of the variable that hides devices; the error shows its value
    """
    if index < seen:
        return index
    value = os.environ.get(variable, "not set") if variable else "not set"
    raise ValueError(
        f"device {index} must be one of the {seen} that this process sees ({variable}={value}); "
        f"start at most {seen} processes on this host, and give `ray start` no more devices than "
        "the host has"
    )
