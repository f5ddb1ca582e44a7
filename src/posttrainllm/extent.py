"""Sizes that are not numbers yet: an integer times a product of dims, and the ends of a range of layers.

That is all a shape may be, so that binding needs no expression parser in any language. Read next: ``program.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from posttrainllm.errors import ProgramError


@dataclass(frozen=True, order=True)
class Extent:
    """One entry of a shape: ``times`` x the product of ``dims``; ``3*C`` is ``Extent(3, ("C",))``."""

    times: int
    dims: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> Extent:
        """Read ``3*C`` or ``B*T``; factors are whole numbers and names of dims."""
        times, dims = 1, []
        for factor in text.split("*"):
            if factor.isdigit():
                times *= int(factor)
            elif factor.isidentifier():
                dims.append(factor)
            else:
                raise ProgramError(f"{text!r} is not a whole number times a product of dims")
        return Extent(times, tuple(sorted(dims)))

    def bind(self, dims: Mapping[str, int]) -> int:
        """The number under these dims."""
        value = self.times
        for dim in self.dims:
            if dim not in dims:
                raise ProgramError(
                    f"{self} needs the dim {dim!r}; given are {', '.join(sorted(dims))}"
                )
            value *= dims[dim]
        return value

    def divided_by(self, other: Extent) -> Extent | None:
        """The extent x with other * x = self, or None when there is none."""
        rest = list(self.dims)
        for dim in other.dims:
            if dim not in rest:
                return None
            rest.remove(dim)
        return None if self.times % other.times else Extent(self.times // other.times, tuple(rest))

    def times_extent(self, other: Extent) -> Extent:
        """The product of two extents."""
        return Extent(self.times * other.times, tuple(sorted(self.dims + other.dims)))

    def __str__(self) -> str:
        factors = ([str(self.times)] if self.times != 1 or not self.dims else []) + list(self.dims)
        return "*".join(factors)


ONE = Extent(1)
Shape = tuple[Extent, ...]


def shape_text(shape: Shape) -> str:
    """(B*T, 3*C), as it stands in error messages and listings."""
    return f"({', '.join(map(str, shape))})"


@dataclass(frozen=True)
class Bound:
    """The end of a range of layers: an offset, counted from 0 or from L."""

    from_last: bool
    offset: int

    def bind(self, n_layer: int) -> int:
        """The layer's number when there are ``n_layer`` of them."""
        return self.offset + (n_layer if self.from_last else 0)

    def __str__(self) -> str:
        return (
            f"L{self.offset:+d}"
            if self.from_last and self.offset
            else "L"
            if self.from_last
            else str(self.offset)
        )


FIRST, LAST = Bound(False, 0), Bound(True, 0)
