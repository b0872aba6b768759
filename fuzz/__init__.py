"""Fuzzers: programs that nobody wrote, on kernels that nothing has chosen, against eager and float64."""
