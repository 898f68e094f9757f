"""Optax transforms: snapshots for the monitors and periodic matrix-sign restoration."""

from optax_ext._delta import track_delta as track_delta
from stabmon.snapshots import Delta as Delta
from stabmon.snapshots import TrackDeltaState as TrackDeltaState
from stabmon.snapshots import read_delta as read_delta
