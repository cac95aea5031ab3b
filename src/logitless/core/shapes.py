"""Shapes and trees in annotations, which jaxtyping gives to a type checker; the package runs without jaxtyping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool as Bool
    from jaxtyping import Float as Float
    from jaxtyping import Int as Int
    from jaxtyping import PyTree as PyTree
    from jaxtyping import UInt8 as UInt8
else:

    class _Shaped:
        def __class_getitem__(cls, shape: object) -> Any:
            return cls

    Bool = Float = Int = UInt8 = PyTree = _Shaped
