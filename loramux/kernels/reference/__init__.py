"""Every operation in plain torch: the definition that the native kernels must agree with."""
