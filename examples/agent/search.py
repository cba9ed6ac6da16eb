"""A tool that searches for lines of text files."""

from pathlib import Path


def search(word: str, limit: int = 3, *, folder: str) -> list[str]:
    """Search for lines with a word.

    Args:
        word: What to search for.
        limit: How many lines to return.
        folder: Where the text files are.
    """
    lines = [line for file in sorted(Path(folder).glob("*.txt")) for line in file.open()]
    return [line.strip() for line in lines if word in line][:limit]
