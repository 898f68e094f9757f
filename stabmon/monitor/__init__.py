"""Measures a whole parameter tree at chosen cadences, inside the jitted step."""

from stabmon.monitor.monitor import Monitor as Monitor
from stabmon.monitor.readings import Readings as Readings
