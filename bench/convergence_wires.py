"""The wires that `sidestream bench convergence` trains with, by name.

What the default ones are there to show: each narrower wire beside the exact one, what each means
against the noise of four bits does, and `mxfp4-naive`, rounded to the nearest without any of them.
`fp32-nudged` is exact too, but starts next to where others start: a gap that is no larger than its
own may be chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..sharding import MessageWire, MixedPrecisionPolicy, Wire

BASELINE = "fp32"


@dataclass(frozen=True, slots=True)
class WirePair:
    """How gradients and weights travel, by the names of `MixedPrecisionPolicy`; `options` are those
    of the gradients' `MessageWire` that are not the usual ones.

    nudged: initial weights are rounded to bfloat16, once. limit_percent: the most that the final
    validation loss is to be above the baseline's; None where nothing is promised.
    """

    gradients: str
    weights: str
    options: Mapping[str, Any] = field(default_factory=dict)
    nudged: bool = False
    limit_percent: float | None = None

    def policy(self) -> MixedPrecisionPolicy:
        """The policy that sends so; all else is FP32."""
        wire = MessageWire(self.gradients, **self.options) if self.options else self.gradients
        return MixedPrecisionPolicy(grad_wire=wire, param_wire=self.weights)

    def described(self) -> dict[str, str]:
        """All that a run depends on, as words: how both travel, with what is usual spelt out."""
        wire = self.policy().grad_wire
        assert isinstance(wire, Wire), "a policy makes a wire of its name"
        weights = f"{self.weights}, nudged" if self.nudged else self.weights
        return {"gradients": wire.name, "weights": weights}


WIRES: Mapping[str, WirePair] = {
    BASELINE: WirePair("fp32", "fp32"),
    "fp32-nudged": WirePair("fp32", "fp32", nudged=True),
    "bf16": WirePair("bf16", "bf16", limit_percent=0.3),
    "mxfp8": WirePair("mxfp8", "mxfp8", limit_percent=0.3),
    "nvfp4": WirePair("nvfp4", "mxfp8", limit_percent=1.0),
    "nvfp4+hadamard": WirePair("nvfp4", "mxfp8", {"hadamard": True}),
    "nvfp4+feedback": WirePair("nvfp4", "mxfp8", {"error_feedback": torch.float32}),
    "mxfp4": WirePair("mxfp4", "mxfp8"),
    "mxfp4-naive": WirePair("mxfp4", "mxfp8", {"rounding": "nearest"}),
    "fp8": WirePair("fp8", "fp8"),
    "fp8_1x128": WirePair("fp8_1x128", "mxfp8"),
    "nvfp4-weights": WirePair("nvfp4", "nvfp4"),
}
DEFAULT_WIRES = (
    BASELINE, "fp32-nudged", "bf16", "mxfp8",
    "nvfp4", "nvfp4+hadamard", "nvfp4+feedback", "mxfp4", "mxfp4-naive",
)  # fmt: skip
