"""Every measured quantity, once: its key, title, unit, bad side, and what is made of it."""

from stabmon.quantities.quantity import Judged as Judged
from stabmon.quantities.quantity import Key as Key
from stabmon.quantities.quantity import Quantity as Quantity
from stabmon.quantities.quantity import Side as Side
from stabmon.quantities.quantity import split_key as split_key
from stabmon.quantities.scalars import PER_RATE as PER_RATE
from stabmon.quantities.table import CHANGED as CHANGED
from stabmon.quantities.table import CONTEXT as CONTEXT
from stabmon.quantities.table import FIRST_NONFINITE as FIRST_NONFINITE
from stabmon.quantities.table import GRAD_NORM as GRAD_NORM
from stabmon.quantities.table import HELD_OUT as HELD_OUT
from stabmon.quantities.table import LEARNING_RATE as LEARNING_RATE
from stabmon.quantities.table import LOSS as LOSS
from stabmon.quantities.table import QUANTITIES as QUANTITIES
from stabmon.quantities.table import UPDATE_NORM as UPDATE_NORM
from stabmon.quantities.table import UPDATE_RATIO as UPDATE_RATIO
from stabmon.quantities.table import find as find
from stabmon.quantities.table import is_brief as is_brief
from stabmon.quantities.table import quantity_of as quantity_of
from stabmon.quantities.table import title_of as title_of
from stabmon.quantities.table import unmeasured as unmeasured
