"""Looking at programs: as text, tables, graphs of NetworkX and other tools, and drawings (`drawing/`).
Nothing here changes a program or a model; `from_networkx` makes a new one.
"""
