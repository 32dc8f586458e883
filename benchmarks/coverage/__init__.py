"""Which models of torchvision, timm and transformers torchgraft, torch.fx and torch.export capture, and at what cost.
Nothing here is a test: a sweep takes minutes, and its result is a page of figures.
"""
