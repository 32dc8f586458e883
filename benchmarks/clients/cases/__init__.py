"""One file of cases for each client, written for torch.fx; the ported run gets the same file with its imports changed."""
