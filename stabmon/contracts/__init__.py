"""What must hold exactly, always on: verdicts "broken: leaf, since step", without thresholds."""

from stabmon.contracts.contract import CONTRACTS as CONTRACTS
from stabmon.contracts.digest import Form as Form
from stabmon.contracts.digest import digest as digest
from stabmon.contracts.judge import Contracts as Contracts
from stabmon.contracts.judge import Verdict as Verdict
