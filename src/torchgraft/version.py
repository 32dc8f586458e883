"""The version of torchgraft, written here and nowhere else: the build, `graft --version` and the package all read it.
Nothing here imports anything, so that asking for the version costs nothing.
"""

__version__ = "0.1.0"
