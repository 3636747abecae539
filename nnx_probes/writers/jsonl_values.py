"""Values as strict JSON and back, bit for bit for float32.

| value | JSON |
|---|---|
| bool, int, str, None, finite float | as it is |
| NaN, ±inf | ``"nan"``, ``"inf"``, ``"-inf"`` |
| one of these three texts | ``{"str": "nan"}`` |
| tuple, list | list |
| array, NumPy number | ``{"dtype": "float32", "data": [...]}``, and ``"shape"`` unless it has one dimension |
| array of 64 numbers or more | ``"packed"`` in place of ``"data"`` (below) |
| mapping | ``{"map": {...}}`` |
| anything else | ``{"repr": "..."}`` |

Packed is base64 of zlib of the numbers' little-endian bytes: the first byte of each number, then the second of each, and so on.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nnx_probes.host.alert import Alert
from nnx_probes.host.record import Leaves

__all__ = ["alert_row", "decode", "dump", "encode", "leaves_id", "leaves_row"]

_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


_PACK = 64
"""Numbers in an array from which on it is packed: 20 times faster than digits, and a third of their size."""
_LONGEST = 1 << 28


def dump(row: Mapping[str, Any]) -> bytes:
    """Returns one line, newline included; ASCII, so a cut in the middle of it breaks no character."""
    return json.dumps(row, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def encode(value: Any) -> Any:
    """Returns `value` in the form of the table above; never raises."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _encode_float(float(value))
    if isinstance(value, str):
        return {"str": str(value)} if value in _NONFINITE else str(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return _encode_array(np.asarray(value))
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {"map": {str(name): encode(item) for name, item in value.items()}}
    try:
        return {"repr": repr(value)}
    except Exception as error:
        return {"repr": f"<{type(value).__name__} whose repr raised {type(error).__name__}>"}


def decode(value: Any) -> Any:
    """Returns what `encode` was given; lists come back as tuples, a repr as str.

    Raises:
      ValueError, TypeError, KeyError, zlib.error: not something `encode` makes.
    """
    if isinstance(value, str):
        return _NONFINITE.get(value, value)
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if isinstance(value, dict):
        if "dtype" in value:
            return _decode_array(value)
        if "map" in value:
            return {name: decode(item) for name, item in value["map"].items()}
        return value["str"] if "str" in value else value["repr"]
    return value


def _encode_float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _encode_array(array: np.ndarray) -> dict[str, Any]:
    if array.size >= _PACK and array.dtype.kind in "fiub" and array.dtype.itemsize <= 8:
        return _with_shape({"dtype": array.dtype.name, "packed": _pack(array)}, array)
    if array.dtype.kind == "f" and array.dtype.itemsize <= 8:
        data = [_encode_float(value) for value in _shortest(array.ravel()).tolist()]
    elif array.dtype.kind in "iub":
        data = array.ravel().tolist()
    elif array.dtype.kind == "U":
        return {"dtype": "str", "data": array.ravel().tolist(), "shape": list(array.shape)}
    elif array.dtype.kind not in "fV" or array.dtype.names is not None:
        return {"repr": repr(array)}
    else:
        # ml_dtypes (bfloat16, float8, int4): float32 holds each of their values.
        try:
            return _encode_array(array.astype(np.float32 if array.dtype.kind != "f" else np.float64))
        except (TypeError, ValueError):
            return {"repr": repr(array)}
    return _with_shape({"dtype": array.dtype.name, "data": data}, array)


def _with_shape(row: dict[str, Any], array: np.ndarray) -> dict[str, Any]:
    return row if array.ndim == 1 else {**row, "shape": list(array.shape)}


def _pack(array: np.ndarray) -> str:
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    columns = little.reshape(-1).view(np.uint8).reshape(array.size, -1).T  # exponents, being alike, next to each other
    return base64.b64encode(zlib.compress(columns.tobytes(), 1)).decode("ascii")


def _unpack(text: str, dtype: np.dtype) -> np.ndarray:
    raw = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _LONGEST)
    columns = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, -1)
    return columns.T.copy().view(dtype.newbyteorder("<")).reshape(-1).astype(dtype)


def _shortest(array: np.ndarray) -> np.ndarray:
    """Returns float64 whose shortest decimal is that of `array`'s own type: 0.1, not 0.10000000149."""
    if array.dtype == np.float64:
        return array
    with np.errstate(over="ignore", invalid="ignore"):  # a signalling NaN
        exact = array.astype(np.float64)
        short = array.astype(str).astype(np.float64)
        # The decimal is rounded to float64 and then to float32. Where two roundings miss, keep all digits.
        wrong = short.astype(array.dtype) != array
    return np.where(wrong, exact, short)


def _decode_array(value: Mapping[str, Any]) -> Any:
    dtype = np.dtype(value["dtype"])
    if dtype.kind not in "fiubU":
        raise ValueError(f"dtype {dtype} is not one that is written")
    if "packed" in value:
        return _unpack(value["packed"], dtype).reshape(value.get("shape", (-1,)))[()]
    items = [float(item) for item in value["data"]] if dtype.kind == "f" else value["data"]
    array = np.array(items, dtype=dtype).reshape(value.get("shape", (-1,)))
    return array[()]  # no dimension: a NumPy number


def alert_row(alert: Alert) -> dict[str, Any]:
    """Returns all fields of an alert as JSON values."""
    causes = [
        {
            "slug": cause.slug,
            "title": cause.title,
            "why": cause.why,
            "fix": cause.fix,
            "check": cause.check,
            "score": encode(cause.score),
        }
        for cause in alert.causes
    ]
    return {
        "step": int(alert.step),
        "rule": alert.rule,
        "level": alert.level.name,
        "title": alert.title,
        "message": alert.message,
        "paths": list(alert.paths),
        "causes": causes,
        "values": {str(name): encode(value) for name, value in alert.values.items()},
    }


def leaves_row(leaves: Leaves) -> dict[str, Any]:
    """Returns the table of leaves as JSON values."""
    return {
        "group": leaves.group,
        "paths": list(leaves.paths),
        "kinds": list(leaves.kinds),
        "shapes": [[int(size) for size in shape] for shape in leaves.shapes],
        "dtypes": [str(dtype) for dtype in leaves.dtypes],
        "trained": [bool(trained) for trained in leaves.trained],
    }


def leaves_id(row: Mapping[str, Any]) -> str:
    """Returns the name of a table: a hash of its content, the same in every run."""
    return hashlib.sha256(dump(row)).hexdigest()[:16]
