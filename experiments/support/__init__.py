"""What the questions are made of: their arms, how runs are judged, tables from rows.

One question's own parts bear its name; `rows`, `markdown`, `listed`, `timing` and `verdicts` serve
all.
"""
