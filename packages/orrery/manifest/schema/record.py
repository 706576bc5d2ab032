"""Field types for all roles."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

MAX_INT = 2**53  # Jsonnet's numbers are exact up to here
MAX_COUNT = 2**16  # ranks, devices, layers, heads, experts
MAX_STEPS = 10**9
MAX_S = 365 * 86_400  # clocks and sockets overflow after some years
MAX_SIZE = 2**24

PositiveInt = Annotated[int, Field(gt=0, le=MAX_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_INT)]
Count = Annotated[int, Field(gt=0, le=MAX_COUNT)]
Steps = Annotated[int, Field(gt=0, le=MAX_STEPS)]
Size = Annotated[int, Field(gt=0, le=MAX_SIZE)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Bound = PositiveFloat | None
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]  # of a moving average
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
DType = Literal["float32", "bfloat16"]


class Record(BaseModel):
    """An object of the manifest: frozen, strict and closed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
