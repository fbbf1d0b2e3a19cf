"""Draws a flow as a Mermaid diagram, or as a self-contained SVG picture.

Calls are boxes and solid arrows show the way of the samples. Dashed boxes are roles that roles of the flow call in turn
(``uses``), such as a reward's judge; dashed arrows lead to them.
"""

from __future__ import annotations

from html import escape

from chatlearn_core.flow import Graph, Node, added

_INPUT = "input"
_HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 56, 70, 24, 24
"""Of the SVG: height of a box, gaps between boxes and margin, pixels."""
_LANE = 6
"""Distance between dashed lines that run side by side, pixels."""
_COLOURS = {_INPUT: "#eef0f4", "generator": "#d9ecff", "reward": "#fff0cc", "trainer": "#dff3df"}
_OTHER = "#eadcf5"


def to_mermaid(graph: Graph) -> str:
    """Return a Mermaid flowchart, for documents."""
    lines = ["flowchart LR", f"    {_INPUT}([{_INPUT}])"]
    for node in graph.nodes:
        lines.append(f'    n{node.index}["{escape(node.call)}<br/>{added(node)}"]')
        lines.extend(f"    {_identifier(i)} --> n{node.index}" for i in node.inputs or (None,))
    for role, kind in graph.used_roles.items():
        lines.append(f'    use_{role}(["{role}<br/>{kind}"])')
        lines.extend(f"    n{node.index} -. uses .-> use_{role}" for node in graph.nodes if role in node.uses)
    return "\n".join(lines)


def to_svg(graph: Graph) -> str:
    """Return a self-contained SVG: levels from left to right, one box per call, and below them one dashed box per role
    that these calls' roles use.
    """
    columns: list[list[Node | None]] = [[None], *([list(level)[:] for level in graph.levels])]  # type: ignore[list-item]  # None is the input
    texts = [text for node in graph.nodes for text in (node.call, added(node))]
    box_width = max(200, 8 * max(map(len, [*texts, *graph.used_roles]), default=0) + 24)
    tallest = max(len(column) for column in columns)
    calls_height = tallest * _HEIGHT + (tallest - 1) * _GAP_Y
    places: dict[int | None, tuple[float, float]] = {}
    for x, column in enumerate(columns):
        used = len(column) * _HEIGHT + (len(column) - 1) * _GAP_Y
        for y, node in enumerate(column):
            top = _MARGIN + (calls_height - used) / 2 + y * (_HEIGHT + _GAP_Y)
            places[node.index if node else None] = (_MARGIN + x * (box_width + _GAP_X), top)
    uses = [(node, role) for node in graph.nodes for role in node.uses]
    lanes_height = _GAP_Y + _LANE * len(uses)
    slots = _slots(graph, columns)
    used_top = _MARGIN + calls_height + lanes_height
    num_columns = max(len(columns), *(slot + 1 for slot in slots.values()), 0)
    width = _MARGIN * 2 + num_columns * box_width + (num_columns - 1) * _GAP_X
    height = _MARGIN * 2 + calls_height + (lanes_height + _HEIGHT if slots else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" '
        f'viewBox="0 0 {width} {height:.0f}" font-family="system-ui, sans-serif" font-size="13">',
        f"<title>flow {escape(graph.name)}</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#667"/></marker></defs>',
    ]
    for node in graph.nodes:
        x2, y2 = places[node.index]
        for source in node.inputs or (None,):
            x1, y1 = places[source]
            parts.append(
                f'<path d="M{x1 + box_width:.0f} {y1 + _HEIGHT / 2:.0f} C{x1 + box_width + _GAP_X / 2:.0f} '
                f"{y1 + _HEIGHT / 2:.0f} {x2 - _GAP_X / 2:.0f} {y2 + _HEIGHT / 2:.0f} {x2:.0f} "
                f'{y2 + _HEIGHT / 2:.0f}" fill="none" stroke="#667" marker-end="url(#tip)"/>'
            )
    left_of = {role: _MARGIN + slot * (box_width + _GAP_X) for role, slot in slots.items()}
    for number, (node, role) in enumerate(uses):  # around the boxes: through the gap on the left, and below the calls
        left, top = places[node.index]
        aside = left - _GAP_X / 4 - _LANE * (number % 6)
        lane = _MARGIN + calls_height + _GAP_Y / 2 + _LANE * number
        parts.append(
            f'<path d="M{left:.0f} {top + _HEIGHT * 0.8:.0f} H{aside:.0f} V{lane:.0f} '
            f'H{left_of[role] + box_width / 2 + _LANE * (number % 10):.0f} V{used_top:.0f}" fill="none" stroke="#667" '
            'stroke-dasharray="5 4" marker-end="url(#tip)"/>'
        )
    for column in columns:
        for item in column:
            title = item.call if item else _INPUT
            note = f"+ {added(item)}" if item else "examples of the step"
            kind = item.kind if item else _INPUT
            parts.append(_box(*places[item.index if item else None], box_width, title, note, kind))
    for role, kind in graph.used_roles.items():
        parts.append(_box(left_of[role], used_top, box_width, role, kind, kind, dashed=True))
    return "".join([*parts, "</svg>"])


def _slots(graph: Graph, columns: list[list[Node | None]]) -> dict[str, int]:
    """Column of each used role's box: that of the first call that uses it, or the next free one to its right."""
    slots: dict[str, int] = {}
    for x, column in enumerate(columns):
        for node in column:
            for role in node.uses if node else ():
                if role not in slots:
                    slots[role] = max(x, *(slot + 1 for slot in slots.values()), 0)
    return slots


def _box(left: float, top: float, width: float, title: str, note: str, kind: str, *, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{width}" height="{_HEIGHT}" rx="8" '
        f'fill="{_COLOURS.get(kind, _OTHER)}" stroke="#445"{dashes}/>'
        f'<text x="{left + width / 2:.0f}" y="{top + 24:.0f}" text-anchor="middle" font-weight="600">'
        f"{escape(title)}</text>"
        f'<text x="{left + width / 2:.0f}" y="{top + 43:.0f}" text-anchor="middle" fill="#445">'
        f"{escape(note)}</text>"
    )


def _identifier(index: int | None) -> str:
    return _INPUT if index is None else f"n{index}"
