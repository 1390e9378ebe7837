"""Students for other programs: as a folder that transformers loads, and as ONNX files."""
