"""Where the matrices lie in a parameter tree, and the naming of known libraries."""

from stabmon.layout.find import find_layout as find_layout
from stabmon.layout.layout import Layout as Layout
from stabmon.layout.libraries import LIBRARIES as LIBRARIES
from stabmon.layout.paths import Select as Select
from stabmon.layout.paths import leaves_with_paths as leaves_with_paths
from stabmon.layout.paths import path_name as path_name
from stabmon.layout.paths import selection as selection
from stabmon.layout.rules import CANONICAL as CANONICAL
from stabmon.layout.rules import GROUPS as GROUPS
from stabmon.layout.rules import Rule as Rule
