"""Small artificial data sets in the published formats of GSM8K, MATH, HellaSwag and HH-RLHF."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SPLITS = ("train", "test")
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gil", "Hana")
ENDINGS = ("puts them in a basket.", "sings to the lamp.", "paints the lake.", "eats the door.")


def gsm8k_rows(count: int = 8) -> list[dict[str, Any]]:
    """Return sums of at most 9; the last answer is 1,000 with a thousands separator."""
    rows = []
    for i in range(count):
        left, right = 1 + i % 4, 1 + i % 3
        story = f"{NAMES[i % 8]} has {left} apples and finds {right}. How many are there?"
        rows.append((story, f"{left} + {right} = <<{left}+{right}={left + right}>>", left + right))
    rows[-1] = ("Eva has ten bags of 100 nuts. How many nuts?", "10 * 100 = 1000", "1,000")
    return [{"question": q, "answer": f"{s}\n#### {a}"} for q, s, a in rows]


def math_rows(count: int = 8) -> list[dict[str, Any]]:
    """Return differences; the last two answers are a fraction and a \\boxed without braces."""
    rows = [
        {
            "problem": f"Compute ${9 - i % 4} - {1 + i % 3}$.",
            "level": f"Level {1 + i % 5}",
            "type": "Prealgebra",
            "solution": f"We take away and get $\\boxed{{{8 - i % 4 - i % 3}}}$.",
        }
        for i in range(count)
    ]
    half = "Half of $\\frac{2}{3}$ is $\\boxed{1}\\cdot\\frac13 = \\boxed{\\frac{1}{3}}$."
    rows[-2] |= {"problem": "What is half of $\\frac{2}{3}$?", "solution": half}
    rows[-1] |= {"problem": "What is $2+5$?", "solution": "It is $\\boxed 7$."}
    return rows


def hellaswag_rows(count: int = 8) -> list[dict[str, Any]]:
    """Return scenes whose right ending is the first, second, third and fourth in turn."""
    rows = []
    for i in range(count):
        turned = ENDINGS[4 - i % 4 :] + ENDINGS[: 4 - i % 4]  # ENDINGS[0] is at index i % 4
        who = NAMES[i % 8]
        rows.append(
            {
                "ind": 10 + i,
                "activity_label": "Picking apples",
                "ctx_a": f"[header] In the garden [title] {who} climbs a ladder.",
                "ctx_b": "the apples are red and she",
                "ctx": f"[header] In the garden [title] {who} climbs a ladder. the apples are red",
                "split": "train",
                "split_type": "indomain",
                "label": i % 4,
                "endings": list(turned),
                "source_id": f"made~{i}",
            }
        )
    return rows


def hh_rows(count: int = 8) -> list[dict[str, Any]]:
    """Return short dialogues, the chosen response polite; every second one has an earlier turn."""
    rows = []
    for i in range(count):
        start = f"\n\nHuman: Hi, I am {NAMES[i % 8]}.\n\nAssistant: Hello!" if i % 2 else ""
        asked = f"{start}\n\nHuman: Can you count to {1 + i % 5}?\n\nAssistant:"
        rows.append({"chosen": f"{asked} Yes, gladly!", "rejected": f"{asked} No. Go away."})
    return rows


def write_gsm8k(folder: Path) -> Path:
    """Write a file for each split, as in the authors' repository; return the folder."""
    return _write_jsonl(folder, {f"{split}.jsonl": gsm8k_rows() for split in SPLITS})


def write_math(folder: Path) -> Path:
    """Write a file for each problem, as in the authors' archive; return the folder."""
    for split in SPLITS:
        for number, row in enumerate(math_rows()):
            file = folder / split / "prealgebra" / f"{number}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(row, indent=4), encoding="utf-8")
    return folder


def write_hellaswag(folder: Path) -> Path:
    """Write the three splits as in the authors' repository, the test split without labels."""
    unlabelled = [{k: v for k, v in row.items() if k != "label"} for row in hellaswag_rows()]
    files = {"train": hellaswag_rows(), "val": hellaswag_rows(4), "test": unlabelled}
    return _write_jsonl(folder, {f"hellaswag_{name}.jsonl": rows for name, rows in files.items()})


def write_hh(folder: Path) -> Path:
    """Write compressed files in a folder for each subset, as in the authors' repository."""
    for subset in ("harmless-base", "helpful-base"):
        (folder / subset).mkdir(parents=True)
        for split in SPLITS:
            text = "".join(json.dumps(row) + "\n" for row in hh_rows())
            (folder / subset / f"{split}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return folder


def _write_jsonl(folder: Path, files: dict[str, Iterable[dict[str, Any]]]) -> Path:
    """Write files, name -> rows, to a folder; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name).write_text(text, encoding="utf-8")
    return folder
