"""Draw the pictures of the manual: python docs/draw.py (concepts, restart, night, and the three ways of design.md).

What they show is real. ``restart`` is the middle of what ``make demo`` printed on some day (pictures/restart.txt). To
take it from another day, type NO_COLOR=1 make demo > FILE and python docs/draw.py FILE. ``night`` is made of the
messages in alerts.md, and the ways of the tables in design.md; the tests compare both with the program.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parent
SANS, MONO = "Helvetica, Arial, sans-serif", "Menlo, Consolas, 'DejaVu Sans Mono', monospace"
INK, GREY, PAPER, LINE = "#1f2328", "#59636e", "#ffffff", "#d1d9e0"
TERMINAL = {"FAULT": "#ff7b72", "RESTART": "#7ee787", "you type": "#79c0ff", "": "#e6edf3"}
# Each message of the night: its name in alerts.md, its hour and its colour.
NIGHT = (
    ("firing", "02:10", "#cf222e"),
    ("repeat", "06:10", "#bc4c00"),
    ("escalated", "08:10", "#82071e"),
    ("resolved", "08:40", "#1a7f37"),
)
# The fills of the picture of the concepts: a box lies within the one of the fill before.
RUN, JOB, OVER, ALIVE = "#ffffff", "#ddf4ff", "#eaeef2", "#dafbe1"
WAYS = {
    "config-launch": "From the settings to the queue",
    "queue-alert": "From the queue to a message",
    "beat-restart": "From a beat to a restart",
}


def text(
    x: float, y: float, words: str, colour: str = GREY, *, size: int = 12, font: str = SANS, more: str = ""
) -> str:
    style = f'font-family="{font}" font-size="{size}" fill="{colour}" {more}'
    return f'<text x="{x:g}" y="{y:g}" {style} xml:space="preserve">{escape(words)}</text>'


def title(x: float, y: float, words: str, colour: str = INK, *, size: int = 13, font: str = SANS) -> str:
    return text(x, y, words, colour, size=size, font=font, more='font-weight="bold"')


def box(x: float, y: float, width: float, height: float, *, fill: str = PAPER, line: str = LINE) -> str:
    shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"'
    return f'<rect {shape} fill="{fill}" stroke="{line}"/>'


def dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="5" fill="{colour}"/>'


def picture(width: float, height: float, name: str, shapes: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">'
    back = box(0.5, 0.5, width - 1, height - 1, fill="#f6f8fa")
    return "\n".join([head, f"<title>{escape(name)}</title>", back, *shapes, "</svg>\n"])


def restart() -> str:
    """A terminal: the lines of the demo around the fault."""
    lines = (DOCS / "pictures" / "restart.txt").read_text("utf-8").splitlines()
    height = len(lines) * 18 + 38
    shapes = [box(0.5, 0.5, 899, height - 1, fill="#0d1117", line="#0d1117")]
    shapes += [dot(20 + 16 * n, 16, colour) for n, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))]
    for number, line in enumerate(lines):
        colour = next(colour for word, colour in TERMINAL.items() if word in line)
        shapes.append(text(14, 46 + number * 18, line, colour, font=MONO))
    return picture(900, height, "make demo: a rank is killed and the run restarts in place", shapes)


def record(demo: Path) -> None:
    """Keep the lines of a demo around the fault, from the last save before it to the status after it."""
    lines = demo.read_text("utf-8").splitlines()
    fault = next(n for n, line in enumerate(lines) if "FAULT" in line)
    first = max(n for n, line in enumerate(lines[:fault]) if "saved step" in line)
    asked = next(n for n, line in enumerate(lines) if n > fault and "ftsupervise status" in line and "you type" in line)
    last = next(n for n, line in enumerate(lines) if n > asked and "directory" in line)
    shown = (
        r"saved step|FAULT|ended: |starting again|attempt \d+ of|resumed from|RESTART|you type|^ {17}\w+: |^ {19}\w+ "
    )
    kept = [re.sub(r"\S+/bin/python", "python", line) for line in lines[first:last] if re.search(shown, line)]
    kept = [
        cut(line, 112) for line in kept if not re.search(r"^ *[\d.]+s +(mail|slack)|^ {17}(attempt|job|look)\b", line)
    ]
    (DOCS / "pictures" / "restart.txt").write_text("\n".join(kept) + "\n", "utf-8")


def message(name: str) -> list[str]:
    """The lines of one message in alerts.md."""
    found = re.search(rf"^```text same={name}\n(.*?)^```", (DOCS / "alerts.md").read_text("utf-8"), re.M | re.S)
    assert found, f"alerts.md has no block same={name}"
    return found[1].splitlines()


def night() -> str:
    """The mails of the night on the left, at their hours; the posts in Slack on the right, the later ones in the thread."""
    shapes = [
        title(96, 30, "by mail, one thread", GREY, size=14),
        title(610, 30, "in Slack, one post and its thread", GREY, size=14),
    ]
    y = 44.0
    for name, hour, colour in NIGHT:
        mail = message(f"mail-{name}")
        post = [re.sub(r"[*`]|^_|_$|:\w+: ?", "", line) for line in message(f"slack-{name}")[1:]]
        left = [line for line in mail[4:] if re.match(r"(since|note|means|do|was|It is over)\b", line)]
        right = [line for line in post[1:] if not re.match(r"(Look|Acknowledge|Silence)", line)]
        height = 44 + 18 * max(len(left), len(right))
        shapes += [title(14, y + 25, hour, size=16), dot(78, y + 19, colour)]
        shapes += card(96, y, 500, height, colour)
        shapes.append(title(110, y + 24, mail[2].removeprefix("Subject: ")))
        shapes += [text(110, y + 44 + 18 * n, cut(line), font=MONO) for n, line in enumerate(left)]
        x = 610 if name == "firing" else 626
        shapes += card(x, y, 1064 - x, height, colour)
        shapes.append(title(x + 14, y + 24, post[0], colour))
        shapes += [text(x + 14, y + 44 + 18 * n, cut(line)) for n, line in enumerate(right)]
        y += height + 12
    shapes.append(text(610, y + 10, "At 08:40 the first post is edited too: it says RESOLVED."))
    return picture(1080, y + 24, "The messages of one night, by mail and in Slack", shapes)


def card(x: float, y: float, width: float, height: float, colour: str) -> list[str]:
    edge = f'<rect x="{x:g}" y="{y:g}" width="4" height="{height:g}" fill="{colour}"/>'
    return [box(x, y, width, height), edge]


def cut(words: str, length: int = 68) -> str:
    return words if len(words) <= length else words[:length].rpartition(" ")[0] + " …"


def forms(heading: str) -> list[tuple[str, str, str]]:
    """(form, module, what it is) of each row below a heading of design.md."""
    part = (DOCS / "design.md").read_text("utf-8").partition(f"### {heading}\n")[2].partition("\n#")[0]
    return re.findall(r"^\| (?!form|---)(.+?) \| (.+?) \| (.+?) \|$", part.replace("`", ""), re.M)


def way(heading: str) -> str:
    """The forms of one way from top to bottom, an arrow from each to the next."""
    shapes = [tip()]
    rows = forms(heading)
    for number, (form, module, meaning) in enumerate(rows):
        y = 12 + number * 62
        shapes += [box(12, y, 736, 44), title(26, y + 19, form, font=MONO), text(26, y + 36, meaning)]
        shapes.append(text(734, y + 19, module, size=11, font=MONO, more='text-anchor="end"'))
        if number:
            line = f'd="M380,{y - 18} V{y - 1}" stroke="{GREY}" stroke-width="1.5" marker-end="url(#tip)"'
            shapes.append(f"<path {line}/>")
    return picture(760, len(rows) * 62 + 6, heading, shapes)


def arrow(way: str) -> str:
    return f'<path d="{way}" fill="none" stroke="{GREY}" stroke-width="1.5" marker-end="url(#tip)"/>'


def tip() -> str:
    shape = f'<path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/>'
    size = 'markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto"'
    return f'<defs><marker id="tip" {size}>{shape}</marker></defs>'


def concepts() -> str:
    """One run: its chain of members, an attempt that has failed and one that trains, and the directory that they share."""
    shapes = [
        tip(),
        box(12, 12, 876, 514, fill=RUN),
        title(26, 36, "run: one training, from its launch to its last step"),
    ]
    shapes += [title(26, 66, "chain", GREY), text(76, 66, "jobs in Slurm's queue, of which one runs at a time")]
    shapes += [box(26, 78, 150, 200, fill=OVER), title(38, 100, "member 88_1"), text(38, 118, "over: its time limit")]
    shapes += [box(38, 134, 126, 52), title(50, 155, "attempt 1"), text(50, 173, "to step 4,360")]
    shapes += [box(196, 78, 540, 200, fill=JOB), title(208, 100, "member 88_2"), text(318, 100, "runs now, on 2 nodes")]
    shapes += [box(208, 134, 126, 132, fill=OVER), title(220, 155, "attempt 2"), text(220, 173, "over: a rank died")]
    shapes.append(text(220, 191, "at step 5,021"))
    shapes += [box(354, 114, 370, 152, fill=ALIVE), title(366, 135, "attempt 3"), text(452, 135, "trains")]
    shapes.append(text(712, 135, "supervisor: starts, watches, ends it", size=11, more='text-anchor="end"'))
    for number, x in enumerate((366, 549)):
        shapes += [box(x, 146, 163, 110), title(x + 10, 166, f"node-{number}", size=12)]
        shapes.append(text(x + 153, 166, "agent", INK, more='text-anchor="end"'))
        for rank in (0, 1):
            shapes += [
                box(x + 10 + 73 * rank, 174, 68, 42, fill=ALIVE),
                text(x + 16 + 73 * rank, 192, f"rank {2 * number + rank}", INK),
            ]
            shapes.append(text(x + 16 + 73 * rank, 208, "guard", size=11))
        shapes += [box(x + 10, 222, 143, 26, fill="#fff8c5"), text(x + 18, 239, "snapshot: in memory", INK, size=11)]
    shapes += [box(756, 78, 120, 200, fill=OVER), title(768, 100, "88_3 … 88_10"), text(768, 118, "wait their turn")]
    shapes += [arrow("M176,160 H194"), arrow("M334,200 H352"), arrow("M736,160 H754")]
    shapes += [arrow("M280,278 V318"), arrow("M539,278 V318")]
    shapes += [text(288, 302, "how each attempt ended"), text(547, 302, "beats, checkpoints")]
    shapes += [box(26, 320, 850, 150, fill=OVER), title(38, 342, "run directory: files that you read with ls and cat")]
    kept = (
        ("ledger", "attempts/0001 …", "every attempt: its", "start, end and cause"),
        ("beats", "beats/rank-0 …", "each rank: its step", "and phase just now"),
        ("switches", "switches/save-switch", "a person's wish:", "save, or stop"),
        ("brake", "state/brake", "failed too often:", "the chain is held"),
        ("checkpoints", "checkpoints/step-…", "fence: only the newest", "attempt may add one"),
    )
    for number, (name, path, *words) in enumerate(kept):
        x = 38 + 166 * number
        shapes += [box(x, 354, 158, 104), title(x + 10, 376, name), text(x + 10, 394, path, size=11, font=MONO)]
        shapes += [text(x + 10, 418 + 18 * n, line) for n, line in enumerate(words)]
    shapes += [
        box(26, 486, 850, 28),
        title(38, 505, "watch"),
        text(94, 505, "outside of the jobs: reads the directory and the queue, and tells people by mail or chat"),
    ]
    return picture(900, 538, "A run, its chain of members, its attempts, and the run directory that they share", shapes)


def drawn() -> dict[str, str]:
    """Name of a picture -> its SVG."""
    ways = {name: way(heading) for name, heading in WAYS.items()}
    return {"concepts": concepts(), "restart": restart(), "night": night(), **ways}


def write() -> None:
    for name, svg in drawn().items():
        (DOCS / "pictures" / f"{name}.svg").write_text(svg, "utf-8")


if __name__ == "__main__":
    for demo in sys.argv[1:]:
        record(Path(demo))
    write()
