"""Real clients of torch.fx, each run as it is and once more with its imports of torch.fx changed to torchgraft."""
