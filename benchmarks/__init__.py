"""Programs that run torchgraft and torch.fx side by side and print ratios. Nothing here is a test."""
