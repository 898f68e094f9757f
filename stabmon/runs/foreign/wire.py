"""Binary records: protocol-buffer fields, and the two framings that logs keep them in.

What lives here: `fields`, `tfrecords` (TensorBoard), `leveldb_records` (Weights & Biases). What
does not: what the fields mean. Of TensorBoard's and Weights & Biases' hundreds of fields a dozen
are needed to read a log, and neither library.

References:
    Protocol buffers' encoding: https://protobuf.dev/programming-guides/encoding
    TFRecord: https://www.tensorflow.org/tutorials/load_data/tfrecord
    LevelDB's log format: https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

import struct
from collections.abc import Iterator
from pathlib import Path

_BLOCK, _HEADER = 32_768, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields number and value of the fields of a message; fixed-width values as bytes.

    Args:
        message: The encoded message.

    Raises:
        ValueError: It is cut short, or no message.

    Example:
        >>> list(fields(bytes([0x08, 0x96, 0x01, 0x12, 0x02, 0x68, 0x69])))
        [(1, 150), (2, b'hi')]
    """
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, at = _varint(message, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"no message: a field of wire type {kind}")
        if at + size > len(message):
            raise ValueError("the message is cut short")
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of variable length, and where it ends."""
    value = shift = 0
    while at < len(message):
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("the message is cut short")


def signed(value: int | bytes) -> int:
    """Returns a 64-bit number with its sign; 0 for what is no number.

    Args:
        value: As of `fields`.
    """
    if isinstance(value, bytes):
        return 0
    return value - (1 << 64) if value >= 1 << 63 else value


def tfrecords(path: Path) -> Iterator[bytes]:
    """Yields the records of a TFRecord file up to one that is cut short.

    Args:
        path: The file.
    """
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            (size,) = struct.unpack("<Q", head[:8])
            if size > path.stat().st_size:
                return
            record = file.read(size)
            if len(record) < size or len(file.read(4)) < 4:
                return
            yield record


def leveldb_records(path: Path) -> Iterator[bytes]:
    """Yields the records of a log of blocks up to one that is cut short.

    Args:
        path: The file; its first seven bytes are a header of Weights & Biases' own.
    """
    data = path.read_bytes()
    at, parts = _HEADER, b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:  # too short for a record: the next block
            at += _BLOCK - at % _BLOCK
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        body = data[at + _HEADER : at + _HEADER + size]
        if len(body) < size or kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
            return
        at += _HEADER + size
        parts = body if kind in (_FULL, _FIRST) else parts + body
        if kind in (_FULL, _LAST):
            yield parts
