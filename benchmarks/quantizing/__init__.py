"""Quantized programs beside those of torch.ao, onnxruntime and OpenVINO with NNCF, on the same models, data and threads."""
