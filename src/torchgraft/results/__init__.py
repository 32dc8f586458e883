"""What every answer of this library can do: be a table, text, HTML, JSON or rows, and be written to a file whole or not at all.
What an answer holds is decided in the room that gives it; nothing here knows programs or torch.
"""
