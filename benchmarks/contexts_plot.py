"""The figures of `contexts` as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contexts import Context


def plot(contexts: Sequence[Context], title: str) -> str:
    """An SVG of tokens a second over tokens of context, measured and modelled, both axes from zero."""
    width, height, left, bottom, top = 640, 360, 60, 50, 40
    most_x, most_y = max(each.num_tokens for each in contexts), max(max(each.tok_s, each.model_tok_s) for each in contexts)

    def x(tokens: float) -> float:
        return left + tokens / most_x * (width - left - 20)

    def y(tok_s: float) -> float:
        return height - bottom - tok_s / most_y * (height - bottom - top)

    lines: Mapping[str, tuple[str, list[float]]] = {
        "bandwidth model": ("#999999", [each.model_tok_s for each in contexts]),
        "measured": ("#1f77b4", [each.tok_s for each in contexts]),
    }
    parts = [text(width / 2, 20, title, "middle"), text(width / 2, height - 8, "tokens of context", "middle")]
    parts += [f'<path d="M{left} {top}V{height - bottom}H{width - 20}" fill="none" stroke="#333333"/>']
    parts += [text(x(each.num_tokens), height - bottom + 18, str(each.num_tokens), "middle") for each in contexts]
    parts += [text(left - 6, y(tick) + 4, f"{tick:.0f}", "end") for tick in (0, most_y / 2, most_y)]
    for at, (name, (color, values)) in enumerate(lines.items()):
        points = [(round(x(each.num_tokens), 1), round(y(value), 1)) for each, value in zip(contexts, values, strict=True)]
        parts.append(f'<polyline points="{" ".join(f"{px},{py}" for px, py in points)}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{px}" cy="{py}" r="3" fill="{color}"/>' for px, py in points]
        parts.append(text(width - 24, top + 16 * at, f"{name}, tok/s", "end", color))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
    )


def text(x: float, y: float, words: str, anchor: str, color: str = "#333333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{words}</text>'
