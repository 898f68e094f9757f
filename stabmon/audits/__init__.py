"""Active checks that prove or rule out a cause: of one step, on demand, without alarms."""

from stabmon.audits.case import Case as Case
from stabmon.audits.case import Outcome as Outcome
from stabmon.audits.case import Verdict as Verdict
from stabmon.audits.run import AUDITS as AUDITS
from stabmon.audits.run import PREFLIGHT as PREFLIGHT
from stabmon.audits.run import Findings as Findings
from stabmon.audits.run import Standing as Standing
from stabmon.audits.run import audit as audit
from stabmon.audits.run import bearing as bearing
from stabmon.audits.run import run as run
