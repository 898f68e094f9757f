"""Optax transforms: snapshots for the monitors and periodic matrix-sign restoration."""

from optax_ext._delta import track_delta as track_delta
from optax_ext._matrix_sign import matrix_sign as matrix_sign
from optax_ext._matrix_sign import orthogonality_error as orthogonality_error
from optax_ext._msign import MsignState as MsignState
from optax_ext._msign import msign as msign
from stabmon.snapshots import Delta as Delta
from stabmon.snapshots import TrackDeltaState as TrackDeltaState
from stabmon.snapshots import read_delta as read_delta
