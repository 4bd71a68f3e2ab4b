"""What the Triton kernels share: casts that are right compiled and interpreted, and the choice of a device."""
