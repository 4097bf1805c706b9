"""The contrast of text on what is behind it, of a site's stylesheets: WCAG 2's ratio, from 1 to 21."""

import colorsys
import re
from pathlib import Path

SCHEMES = {"light": "[data-md-color-scheme=default]", "dark": "[data-md-color-scheme=slate]"}
INDIGO = "[data-md-color-primary=indigo]"  # the theme's own, where a site names none


def read_palette(folder: Path, scheme: str) -> dict[str, str]:
    """Returns the variables of the theme's stylesheets in a scheme (`light`, `dark`), later rules over earlier ones."""
    found: dict[str, str] = {}
    asked = {":root", SCHEMES[scheme], INDIGO, SCHEMES[scheme] + INDIGO}
    for sheet in sorted(folder.rglob("modern/*.css")):
        for selectors, body in re.findall(r"([^{}]*)\{([^{}]*)\}", sheet.read_text()):
            if asked & set(selectors.split(",")):
                found |= dict(re.findall(r"(--md-[\w-]+):([^;]+)", body))
    return found


def read_colour(name: str, palette: dict[str, str]) -> list[float]:
    """Returns red, green, blue and opacity, each from 0 to 1."""
    text = palette[name]
    while inner := re.search(r"var\((--[\w-]+)\)", text):
        text = text.replace(inner[0], palette[inner[1]])
    if text.startswith("#"):
        digits = text[1:] if len(text) > 5 else "".join(2 * digit for digit in text[1:])
        parts = [int(digits[at : at + 2], 16) / 255 for at in range(0, len(digits), 2)]
    else:
        hue, saturation, light, *opacity = map(float, re.findall(r"[\d.]+", text))
        parts = [*colorsys.hls_to_rgb(hue / 360, light / 100, saturation / 100), *opacity]
    return [*parts, 1.0][:4]


def lay_over(top: list[float], below: list[float]) -> list[float]:
    return [of * top[3] + under * (1 - top[3]) for of, under in zip(top[:3], below, strict=False)]


def luminance(colour: list[float]) -> float:
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour[:3]]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


def contrast(palette: dict[str, str], name: str, behind: str) -> float:
    """Returns the contrast of the colour `name` on `behind`, which lies on the page."""
    page = read_colour("--md-default-bg-color", palette)
    below = lay_over(read_colour(behind, palette), page)
    less, more = sorted(map(luminance, (lay_over(read_colour(name, palette), below), below)))
    return (more + 0.05) / (less + 0.05)
