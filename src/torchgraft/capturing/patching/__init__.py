"""What of torch and Python is patched while somebody traces, each by a counted patch that asks its own thread's tracer.
What is recorded is decided by the tracers.
"""
