"""What a run changes of a model, and how it is put back or left by the program as well.
Nothing outside of the model is kept.
"""
