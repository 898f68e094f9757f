"""What the questions are made of: their arms, their runs, how these are judged, tables from rows.

For all of them: `arms`, `recorded`, `judging`, `states`, `tables`, `figures`, `ending`, `listed`.
For two questions: `attention`, `moe`. For one: `router_growth`, `rescue`, `jacobians`, `grading`,
`continuing` and `text_mixes`, `scale`. For the benchmarks: `timing`.
"""
