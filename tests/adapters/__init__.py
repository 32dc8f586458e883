"""Code written for torch.fx, run against both libraries with only the import changed."""
