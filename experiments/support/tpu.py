"""The table of `tpu_study.py`, from its rows alone."""

from experiments.support.recorded import Row

MIB = 2**20
# What a program is to be compared with, and what of ours is added to it.
BESIDE = {"monitors": "forward", "symptoms": "base"} | dict.fromkeys(
    ("msign", "staggered", "polar"), "base"
)
TARGET_SECONDS, TARGET_CODE, TARGET_MEMORY = 20.0, 30 * MIB, 0.05


def tables(rows: list[Row]) -> str:
    """Markdown: each program, and what the monitors and MSign add to what would run anyway."""
    lines = [
        "| model | topology | program | compile, CPU seconds | code, MiB | temporary memory, MiB "
        "| sent by a device, MiB | adds: seconds, MiB of code |",
        "|---" * 8 + "|",
    ]
    by = {(row["model"], row["topology"], row["part"]): row for row in rows}
    for (model, topology, part), row in by.items():
        sent = sum(kind["bytes"] for kind in row["collectives"].values())
        base = by.get((model, topology, BESIDE.get(part, "")))
        cells = [
            model,
            topology,
            part,
            f"{row['seconds']:.1f}",
            f"{row['code_bytes'] / MIB:.1f}",
            f"{row['temp_bytes'] / MIB:,.0f}",
            f"{sent / MIB:,.0f}",
            "" if base is None else added(row, base),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def added(row: Row, base: Row) -> str:
    """What a program takes beyond its base, and whether that is within the targets."""
    seconds = row["seconds"] - base["seconds"]
    code = row["code_bytes"] - base["code_bytes"]
    met = seconds <= TARGET_SECONDS and code <= TARGET_CODE
    return f"{seconds:.1f}, {code / MIB:.1f} ({'met' if met else 'not met'})"
