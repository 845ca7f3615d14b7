"""An npu device without an NPU: the unmodified torch_npu over stand-in libraries, CPU references behind its schemas."""
