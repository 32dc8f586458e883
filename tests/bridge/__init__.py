"""The bridge: programs that cross to torch.fx and back, or come from torch.export, must arrive unchanged."""
