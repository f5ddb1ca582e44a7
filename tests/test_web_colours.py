"""The colours of the site's tokens: text and curves stand out from what is behind them, and curves from one another."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from web import WEB

TOKENS = (WEB / "src/styles/tokens.css").read_text(encoding="utf-8")
SCHEMES = ("light", "dark")
TEXT_CONTRAST = 4.5  # WCAG 2.2, 1.4.3
DRAWN_CONTRAST = 3.0  # 1.4.11
APART = 12.0  # hundredths of OKLab, where two is what an eye just notices

# Machado, Oliveira, Fernandes 2009: what eyes without one kind of cone see, on linear sRGB
SIGHTS = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
# Ottosson 2020: OKLab, where distances are those that are seen
LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def token(name: str, scheme: str) -> np.ndarray:
    """A colour of tokens.css as linear sRGB, (3,)."""
    pair = re.search(rf"--{name}: light-dark\(#([0-9a-f]{{6}}), #([0-9a-f]{{6}})\)", TOKENS)
    assert pair, f"tokens.css says --{name} not as light-dark(#rrggbb, #rrggbb)"
    srgb = np.array(list(bytes.fromhex(pair[1 + SCHEMES.index(scheme)]))) / 255
    linear: np.ndarray = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    return linear


def contrast(a: np.ndarray, b: np.ndarray) -> float:
    """WCAG's ratio of two colours, 1 to 21."""
    low, high = sorted(float(colour @ [0.2126, 0.7152, 0.0722]) for colour in (a, b))
    return (high + 0.05) / (low + 0.05)


def seen(colour: np.ndarray, sight: str) -> np.ndarray:
    """Where a colour lies in OKLab for those who see so."""
    place: np.ndarray = LAB @ np.cbrt(LMS @ np.clip(SIGHTS[sight] @ colour, 0, 1))
    return place


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_can_be_read(scheme: str) -> None:
    grounds = ("paper", "card", "sunken", "accent-soft", "warn-soft", "bad-soft")
    pairs = [("accent-ink", "accent"), ("warn", "card"), ("bad", "card"), ("accent", "card")]
    pairs += [(ink, ground) for ink in ("ink", "soft") for ground in grounds]
    found = {pair: contrast(token(pair[0], scheme), token(pair[1], scheme)) for pair in pairs}
    assert min(found.values()) >= TEXT_CONTRAST, found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_curves_stand_out_from_the_card_and_from_one_another_for_all_eyes(scheme: str) -> None:
    curves = [token(f"curve-{k}", scheme) for k in range(1, 6)]
    assert min(contrast(curve, token("card", scheme)) for curve in curves) >= DRAWN_CONTRAST
    for sight in SIGHTS:
        places = [seen(curve, sight) for curve in curves]
        for (i, a), (j, b) in itertools.combinations(enumerate(places, 1), 2):
            apart = 100 * float(np.linalg.norm(a - b))
            assert apart >= APART, f"{scheme}, {sight}: curves {i} and {j} are {apart:.1f} apart"
