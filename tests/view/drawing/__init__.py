"""Tests of drawings; `geometry.py` reads them back from SVG, `programs.py` makes the programs."""
