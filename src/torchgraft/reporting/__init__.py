"""`report`: everything that can be seen of a model, as one folder with a page that opens from disk.
What is seen is made by the rooms below (capturing, view, recording, bridge); here it is gathered, written and laid out.
"""

from torchgraft.reporting.report import Report, report

__all__ = ["Report", "report"]
