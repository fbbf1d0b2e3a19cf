"""Draws a flow as a Mermaid diagram, or as a self-contained SVG picture."""

from __future__ import annotations

from html import escape

from chatlearn_core.flow import Graph, Node, added

_INPUT = "input"


def to_mermaid(graph: Graph) -> str:
    """Return a Mermaid flowchart, for documents."""
    lines = ["flowchart LR", f"    {_INPUT}([{_INPUT}])"]
    for node in graph.nodes:
        lines.append(f'    n{node.index}["{escape(node.call)}<br/>{added(node)}"]')
        lines.extend(f"    {_identifier(i)} --> n{node.index}" for i in node.inputs or (None,))
    return "\n".join(lines)


def to_svg(graph: Graph) -> str:
    """Return a self-contained SVG: levels from left to right, one box per call."""
    longest = max((len(text) for node in graph.nodes for text in (node.call, added(node))), default=0)
    box_width, box_height, gap_x, gap_y, margin = max(200, 8 * longest + 24), 56, 70, 24, 24
    columns: list[list[Node | None]] = [[None], *([list(level)[:] for level in graph.levels])]  # type: ignore[list-item]  # None is the input
    tallest = max(len(column) for column in columns)
    height = margin * 2 + tallest * box_height + (tallest - 1) * gap_y
    width = margin * 2 + len(columns) * box_width + (len(columns) - 1) * gap_x
    places: dict[int | None, tuple[float, float]] = {}
    for x, column in enumerate(columns):
        used = len(column) * box_height + (len(column) - 1) * gap_y
        for y, node in enumerate(column):
            left: float = margin + x * (box_width + gap_x)
            top = (height - used) / 2 + y * (box_height + gap_y)
            places[node.index if node else None] = (left, top)
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
                f'<path d="M{x1 + box_width:.0f} {y1 + box_height / 2:.0f} C{x1 + box_width + gap_x / 2:.0f} '
                f"{y1 + box_height / 2:.0f} {x2 - gap_x / 2:.0f} {y2 + box_height / 2:.0f} {x2:.0f} "
                f'{y2 + box_height / 2:.0f}" fill="none" stroke="#667" marker-end="url(#tip)"/>'
            )
    for column in columns:
        for item in column:
            left, top = places[item.index if item else None]
            title = item.call if item else _INPUT
            note = f"+ {added(item)}" if item else "examples of the step"
            parts.append(
                f'<rect x="{left:.0f}" y="{top:.0f}" width="{box_width}" height="{box_height}" rx="8" '
                f'fill="{_COLOURS.get(item.kind if item else _INPUT, _OTHER)}" stroke="#445"/>'
                f'<text x="{left + box_width / 2:.0f}" y="{top + 24:.0f}" text-anchor="middle" font-weight="600">'
                f"{escape(title)}</text>"
                f'<text x="{left + box_width / 2:.0f}" y="{top + 43:.0f}" text-anchor="middle" fill="#445">'
                f"{escape(note)}</text>"
            )
    return "".join([*parts, "</svg>"])


_COLOURS = {_INPUT: "#eef0f4", "generator": "#d9ecff", "reward": "#fff0cc", "trainer": "#dff3df"}
_OTHER = "#eadcf5"


def _identifier(index: int | None) -> str:
    return _INPUT if index is None else f"n{index}"
