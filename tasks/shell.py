"""Small shell tasks in Harbor's format, drawn from a fixed seed: each solved by one short command (two for `collect`).

    python tasks/shell.py OUT_DIR       460 tasks in a second; does nothing when OUT_DIR already holds exactly these

OUT_DIR/train/<kind>-NN     20 instances of every kind in TRAINED
OUT_DIR/heldout/<kind>-NN   6 new instances of those: no two tasks of a kind name the same files, words and numbers
OUT_DIR/newkinds/<kind>-NN  6 instances of the kinds in NEW, which are never trained on

A Kind is a row of templates over the slots of `draw_slots`: commands, phrasings, and the files kept, gone and new.
The verifier compares all of /app with kept + new (names, types, contents), so an untouched /app, a file too many or a
harmed bystander scores 0. Expected contents are computed here in Python, not by running the commands.
"""
import hashlib
import os
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

SEED, NUM_TRAIN, NUM_HELDOUT, NUM_NEW = 7, 20, 6, 6
NOUNS = ("apple river stone house garden bridge candle window forest market island planet rocket silver winter summer "
         "flower basket button camera castle circle coffee cotton dragon engine finger guitar hammer jacket kitten "
         "ladder magnet needle orange pencil rabbit salmon table violin").split()
COLOURS = "red blue green black white pink grey brown gold purple".split()
TOML = """version = "1.0"

[metadata]
author_name = "harness-rl"
category = "{kind}"
difficulty = "easy"
tags = ["shell"]

[verifier]
timeout_sec = 30.0

[agent]
timeout_sec = 60.0

[environment]
build_timeout_sec = 60.0
cpus = 1
memory_mb = 512
storage_mb = 1024
allow_internet = false
"""
TEST = """#!/bin/sh
# Reward 1 if /app is exactly what was asked for, with every other file as it was, else 0.
export LC_ALL=C
cd /app || exit 1
found() {{
  tar -cf - . | tar -tvf - |
    while read -r mode owner size day time name; do echo "${{mode%?????????}} $name"; done | sort
}}
names() {{ cat <<'END'
{names}
END
}}
contents() {{ sha256sum --status -c <<'END'
{sums}
END
}}
reward=0
[ "$(found)" = "$(names)" ] && contents{checks} && reward=1
mkdir -p /logs/verifier
echo $reward > /logs/verifier/reward.txt
"""


@dataclass
class Kind:
    commands: str                               # the solution, one command a line
    phrasings: tuple[str, ...]                  # of the instruction; all name the same slots
    kept: dict = field(default_factory=dict)    # path -> text, or a function: slots -> lines; there before and after
    gone: dict = field(default_factory=dict)    # there before only
    new: dict = field(default_factory=dict)     # there after only; None: an empty folder/, a link -> target, any text
    checks: tuple[str, ...] = ()                # shell conditions for what names, types and contents leave open


def draw_slots(draw: random.Random) -> dict:
    """a b c z: files; d to h: folders, stems; s t: scripts; x y: colours; A B: texts; N: numbers; R: rows of 3 columns.

    A is not sorted, has x in some lines, not in all, and one line twice; N is sorted neither by number nor as text."""
    nouns, (x, y, *colours) = draw.sample(NOUNS, 11), draw.sample(COLOURS, len(COLOURS))
    slots = {name: noun + draw.choice((".txt", ".md", ".csv", ".log")) for name, noun in zip("abcz", nouns)}
    slots |= dict(zip("defgh", nouns[4:]))
    slots |= {name: noun + draw.choice((".sh", ".py")) for name, noun in zip("st", nouns[9:])}
    lines = numbers = []
    while lines in (sorted(lines), sorted(lines)[::-1]):
        some = [f"{draw.choice(colours)} {noun}" for noun in draw.sample(NOUNS, draw.randint(2, 4))]
        lines = [*some, some[0], *(f"{x} {noun}" for noun in draw.sample(NOUNS, 2))]
        draw.shuffle(lines)
    while numbers in (sorted(numbers), sorted(numbers, key=int)) or sorted(numbers) == sorted(numbers, key=int):
        numbers = [str(draw.randrange(10 ** digits, 10 ** (digits + 1))) for digits in (0, 2, 1, 0, 2, 1)]
        draw.shuffle(numbers)
    rows = [f"{line.replace(' ', ',')},{draw.randint(1, 99)}" for line in lines]
    end, other = draw.sample((".log", ".tmp", ".bak", ".txt"), 2)
    return slots | {
        "x": x, "y": y, "n": draw.randint(2, 4), "column": draw.randint(1, 3), "line": f"{y} {draw.choice(NOUNS)}",
        "end": end, "other": other, "A": text(lines), "B": text(some), "N": text(numbers), "R": text(rows),
        "lines": lines, "numbers": numbers, "rows": rows}


def text(lines) -> str:
    return "".join(f"{line}\n" for line in lines)


def derive(commands: str, lines_of, *phrasings: str, source="{A}") -> Kind:
    """The kinds that write lines_of(slots) to {b} and leave {a}, of which they are made, as it is."""
    return Kind(commands, phrasings, kept={"{a}": source}, new={"{b}": lines_of})


FILE = {"{a}": "{A}"}
KINDS = {
    "create": Kind("echo {line} > {a}", (
        "Create the file {a} with the line: {line}", "Write the line {line} to a new file {a}.",
        "Put the text {line} in {a}."),
        new={"{a}": "{line}\n"}),
    "touch": Kind("touch {a}", ("Create an empty file {a}.", "Make a new empty file called {a}."), new={"{a}": ""}),
    "mkdir": Kind("mkdir -p {d}/{e}/{f}", (
        "Create the directory {d}/{e}/{f}.", "Make the folder {d}/{e}/{f}, with its parents."),
        new={"{d}/{e}/{f}/": None}),
    "copy": Kind("cp {a} {b}", ("Copy {a} to {b}.", "Make a copy of {a} named {b}."), FILE, new={"{b}": "{A}"}),
    "copy_folder": Kind("cp -r {d} {e}", ("Copy the directory {d} to {e}.", "Make a copy of the folder {d} named {e}."),
                        {"{d}/{a}": "{A}", "{d}/{b}": "{B}"}, new={"{e}/{a}": "{A}", "{e}/{b}": "{B}"}),
    "rename": Kind("mv {a} {b}", ("Rename {a} to {b}.", "Change the name of {a} to {b}."),
                   gone=FILE, new={"{b}": "{A}"}),
    "move": Kind("mv {a} {d}", ("Move {a} into the directory {d}.", "Put {a} in the folder {d}."),
                 {"{d}/{b}": "{B}"}, FILE, {"{d}/{a}": "{A}"}),
    "collect": Kind("mkdir {d}\nmv {a} {d}", (
        "Create the directory {d} and move {a} into it.", "Make a new folder {d} and put {a} in it."),
        {"{b}": "{B}"}, FILE, {"{d}/{a}": "{A}"}),
    "delete": Kind("rm {a}", ("Delete the file {a}.", "Remove {a}.", "Delete {a} and keep all other files."),
                   {"{b}": "{B}"}, FILE),
    "delete_pattern": Kind("rm {d}/*{end}", (
        "Delete all {end} files in {d}.", "Remove every file ending in {end} from the directory {d}."),
        {"{d}/{e}{other}": "{A}", "{f}{end}": "{B}"}, {"{d}/{g}{end}": "{A}", "{d}/{h}{end}": "{B}"}),
    "replace": Kind("sed -i s/{x}/{y}/g {a}", ("Replace {x} with {y} in {a}.", "Change every word {x} to {y} in {a}."),
                    gone=FILE, new={"{a}": lambda s: [line.replace(s["x"], s["y"]) for line in s["lines"]]}),
    "append": Kind("echo {line} >> {a}", ("Append the line {line} to {a}.", "Add the line {line} at the end of {a}."),
                   gone=FILE, new={"{a}": "{A}{line}\n"}),
    "archive": Kind("tar -cf {e}.tar {d}", (
        "Pack the directory {d} into {e}.tar.", "Create the tar archive {e}.tar of the folder {d}."),
        {"{d}/{a}": "{A}"}, new={"{e}.tar": None},
        checks=('[ "$(tar -tf {e}.tar | sort)" = "$(printf "{d}/\\n{d}/{a}")" ]',
                '[ "$(tar -xOf {e}.tar {d}/{a} | sha256sum)" = "$(sha256sum < {d}/{a})" ]')),
    "chmod": Kind("chmod +x {s}", ("Make {s} executable.", "Give {s} the permission to execute."),
                  {"{s}": "echo {x}\n", "{t}": "echo {y}\n"}, checks=("[ -x {s} ]", "[ ! -x {t} ]")),
    "concat": Kind("cat {a} {b} > {c}", ("Join {a} and {b} into {c}.", "Write {a} followed by {b} to {c}."),
                   {"{a}": "{A}", "{b}": "{B}"}, new={"{c}": "{A}{B}"}),
    "cut": derive("cut -d, -f{column} {a} > {b}", lambda s: [row.split(",")[s["column"] - 1] for row in s["rows"]],
                  "Write column {column} of {a} to {b}. The separator is a comma.",
                  "Cut field {column} of the comma separated {a} into {b}.", source="{R}"),
    "grep": derive("grep {x} {a} > {b}", lambda s: [line for line in s["lines"] if s["x"] in line],
                   "Write the lines of {a} that contain {x} to {b}.", "Save all lines with {x} in {a} to {b}."),
    "grep_not": derive("grep -v {x} {a} > {b}", lambda s: [line for line in s["lines"] if s["x"] not in line],
                       "Write the lines of {a} that do not contain {x} to {b}.",
                       "Save all lines without {x} in {a} to {b}."),
    "head": derive("head -n {n} {a} > {b}", lambda s: s["lines"][:s["n"]],
                   "Write the first {n} lines of {a} to {b}.", "Save the top {n} lines of {a} in {b}."),
    "tail": derive("tail -n {n} {a} > {b}", lambda s: s["lines"][-s["n"]:],
                   "Write the last {n} lines of {a} to {b}.", "Save the bottom {n} lines of {a} in {b}."),
    "sort": derive("sort {a} > {b}", lambda s: sorted(s["lines"]),
                   "Sort the lines of {a} into {b}.", "Write the sorted lines of {a} to {b}."),
    "sort_reverse": derive("sort -r {a} > {b}", lambda s: sorted(s["lines"], reverse=True),
                           "Sort {a} in reverse order into {b}.",
                           "Sort the lines of {a} from z to a and save them in {b}."),
    "sort_numbers": derive("sort -n {a} > {b}", lambda s: sorted(s["numbers"], key=int),
                           "Sort the numbers in {a} into {b}.",
                           "Sort {a} by number, smallest first, and write it to {b}.", source="{N}"),
    "unique": derive("sort -u {a} > {b}", lambda s: sorted(set(s["lines"])),
                     "Sort {a} without duplicate lines into {b}.", "Write the unique lines of {a}, sorted, to {b}."),
    "count_lines": derive("wc -l < {a} > {b}", lambda s: [len(s["lines"])],
                          "Count the lines in {a} and write the number to {b}.",
                          "Save the number of lines of {a} in {b}."),
    "count_words": derive("wc -w < {a} > {b}", lambda s: [len(s["A"].split())],
                          "Count the words in {a} and write the number to {b}.",
                          "Save the number of words of {a} in {b}."),
    "symlink": Kind("ln -s {a} {d}", ("Create a symbolic link {d} to {a}.", "Make {d} a symlink that points to {a}."),
                    FILE, new={"{d} -> {a}": None}),
    "reverse": derive("tac {a} > {b}", lambda s: s["lines"][::-1],
                      "Write the lines of {a} to {b} from last to first.",
                      "Reverse the order of the lines of {a} into {b}."),
    "uppercase": derive("tr a-z A-Z < {a} > {b}", lambda s: [line.upper() for line in s["lines"]],
                        "Write {a} in upper case to {b}.", "Convert {a} to capital letters and save it in {b}."),
    "count_unique": derive("sort -u {a} | wc -l > {b}", lambda s: [len(set(s["lines"]))],
                           "Count the different lines in {a} and write the number to {b}.",
                           "Save the number of unique lines of {a} in {b}."),
}
NEW = {name: KINDS.pop(name) for name in ("append copy_folder collect delete_pattern head tail grep_not sort_numbers "
                                          "sort_reverse unique "
                                          "count_words cut symlink reverse uppercase count_unique").split()}
TRAINED = KINDS


def listing(paths):
    """What the verifier's `found` prints: every entry with the letter of its type, folders with a slash at the end."""
    entries = {"d ./"}
    for path in paths:
        parents = path.split("/")[:-1]
        entries |= {f"d ./{'/'.join(parents[:depth + 1])}/" for depth in range(len(parents))}
        if not path.endswith("/"):
            entries.add(f"{'l' if ' -> ' in path else '-'} ./{path}")
    return sorted(entries)


def render(name: str, kind: Kind, slots: dict, instruction: str) -> dict[str, str | None]:
    """The files of one task folder: relative path -> text."""
    def fill(files):
        return {path.format(**slots): text(body(slots)) if callable(body) else body and body.format(**slots)
                for path, body in files.items()}
    kept, gone, new = fill({**kind.kept, "{z}": "{B}"}), fill(kind.gone), fill(kind.new)     # z: a bystander, always
    after = {**kept, **new}
    sums = [f"{hashlib.sha256(body.encode()).hexdigest()}  {path}" for path, body in after.items() if body is not None]
    checks = "".join(f" && {check.format(**slots)}" for check in kind.checks)
    return {"instruction.md": instruction + "\n", "task.toml": TOML.format(kind=name),
            "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\nCOPY files/ /app/\n",
            **{f"environment/files/{path}": body for path, body in {**kept, **gone}.items()},
            "tests/test.sh": TEST.format(names="\n".join(listing(after)), sums="\n".join(sums), checks=checks),
            "solution/solve.sh": f"#!/bin/bash\n{kind.commands.format(**slots)}\n"}


def tasks():
    """Yields (split/kind-NN, its files) for all tasks, always the same ones in the same order."""
    for name, kind in (TRAINED | NEW).items():
        draw, seen = random.Random(f"{SEED} {name}"), set()
        splits = {"newkinds": NUM_NEW} if name in NEW else {"train": NUM_TRAIN, "heldout": NUM_HELDOUT}
        for split, number in ((split, number) for split, count in splits.items() for number in range(count)):
            while (named := kind.phrasings[0].format(**(slots := draw_slots(draw)))) in seen:
                pass
            seen.add(named)                     # stands for all that the task names: every phrasing has the same slots
            instruction = draw.choice(kind.phrasings).format(**slots)
            yield f"{split}/{name}-{number:02d}", render(name, kind, slots, instruction)


def generate(out_dir) -> Path:
    """Writes all tasks under out_dir, complete or not at all;
    leaves it alone if it holds these tasks, refuses a folder of something else."""
    out, everything = Path(out_dir), {f"{name}/{path}": body for name, files in tasks() for path, body in files.items()}
    digest, stamp = hashlib.sha256(repr(sorted(everything.items())).encode()).hexdigest(), out / ".digest"
    if stamp.exists() and stamp.read_text() == digest:
        return out
    if out.exists() and any(out.iterdir()) and not stamp.exists():
        raise ValueError(f"{out} is not empty and was not made by this command; name another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
        new, old = Path(temporary) / "new", Path(temporary) / "old"
        for folder in sorted({os.path.dirname(path) for path in everything}):
            os.makedirs(new / folder, exist_ok=True)
        for path, body in everything.items():
            (new / path).write_text(body)
            if path.endswith(("tests/test.sh", "solution/solve.sh")):
                (new / path).chmod(0o755)
        (new / ".digest").write_text(digest)
        if out.exists():
            os.rename(out, old)
        os.rename(new, out)
    return out


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tasks/shell.py OUT_DIR")
    try:
        print(generate(sys.argv[1]))
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
