"""Numbers that remember how they were made, so that each figure of a table can be shown with its formula.

T, D = Quantity(4096, "T"), Quantity(5120, "D")
str(2 * T * D), (2 * T * D).value            # '2*T*D', 41943040
"""

from typing import Union

__all__ = ["ZERO", "Quantity"]

Number = Union["Quantity", int, float]


class Quantity:
    """A value with the text of its formula. The text is put together only when it is asked for."""

    __slots__ = ("_left", "_operator", "_right", "value")

    def __init__(self, value: float, left: object, operator: str = "", right: object = None) -> None:
        self.value = value
        self._left, self._operator, self._right = left, operator, right

    def __mul__(self, other: Number) -> "Quantity":
        if isinstance(other, Quantity):
            return Quantity(self.value * other.value, self, "*", other)
        return self if other == 1 else Quantity(self.value * other, self, "*", other)

    def __rmul__(self, other: float) -> "Quantity":
        return self if other == 1 else Quantity(other * self.value, other, "*", self)

    def __add__(self, other: Number) -> "Quantity":
        if value_of(other) == 0:
            return self
        return Quantity(self.value + value_of(other), self, "+", other) if self.value else _as_quantity(other)

    def __radd__(self, other: float) -> "Quantity":
        return self if other == 0 else Quantity(other + self.value, other, "+", self)

    def __truediv__(self, other: Number) -> "Quantity":
        """Divide and round up: what the first of so many ranks gets."""
        by = value_of(other)
        return self if by == 1 else Quantity(-(-self.value // by), self, "/", other)

    def __str__(self) -> str:
        if not self._operator:
            return str(self._left)
        inner = self._operator in "*/"
        left, right = _text(self._left, inner), _text(self._right, inner)
        if inner and self._operator == "/" and isinstance(self._right, Quantity) and self._right._operator:
            right = f"({str(self._right).strip('()')})"
        return f"{left} + {right}" if self._operator == "+" else f"{left}{self._operator}{right}"

    def __repr__(self) -> str:
        return f"{self} = {self.value:,.0f}"


def value_of(number: Number) -> float:
    """The plain number."""
    return number.value if isinstance(number, Quantity) else number


def _as_quantity(number: Number) -> Quantity:
    return number if isinstance(number, Quantity) else Quantity(number, number)


def _text(operand: object, inside_product: bool) -> str:
    text = str(operand)
    return f"({text})" if inside_product and isinstance(operand, Quantity) and operand._operator == "+" else text


ZERO = Quantity(0, "0")
