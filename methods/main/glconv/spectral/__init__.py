"""The FFT paths: right-angle transforms in FP32, and the paired FP16 spectral graph around one Triton kernel."""
