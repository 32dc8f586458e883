"""Running programs in production: modules that follow every path of a model, and that are compiled by a backend.
`adapt.py` has the first, `lower.py` the second; each backend is a file of its own, and what one is, is said in `backend.py`.
"""
