"""Optax transforms: snapshots for the monitors, matrix-sign restoration, means of recovery."""

from optax_ext._between import track_worst as track_worst
from optax_ext._clip import QKClipState as QKClipState
from optax_ext._clip import qk_clip as qk_clip
from optax_ext._delta import track_delta as track_delta
from optax_ext._monitored import MonitoredState as MonitoredState
from optax_ext._monitored import monitored as monitored
from optax_ext._monitored import monitored_since as monitored_since
from optax_ext._monitored import read_monitored as read_monitored
from optax_ext._msign import MsignState as MsignState
from optax_ext._msign import msign as msign
from optax_ext._msign import msign_names as msign_names
from optax_ext._recovery import ControlState as ControlState
from optax_ext._recovery import reset_moments as reset_moments
from optax_ext._recovery import scale_by_control as scale_by_control
from optax_ext._recovery import scale_learning_rate as scale_learning_rate
from optax_ext._skip import SkipSpikesState as SkipSpikesState
from optax_ext._skip import skip_spikes as skip_spikes
from stabmon.linalg.sign import matrix_sign as matrix_sign
from stabmon.linalg.sign import orthogonality_error as orthogonality_error
from stabmon.monitor.snapshots import Delta as Delta
from stabmon.monitor.snapshots import TrackDeltaState as TrackDeltaState
from stabmon.monitor.snapshots import read_delta as read_delta
