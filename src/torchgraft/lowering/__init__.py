"""A captured program in torch's operators: ATen, core ATen, or forward and backward as one.
Capturing a model is in `capturing/`; nothing here runs a model's Python but what was kept as one call.
"""
