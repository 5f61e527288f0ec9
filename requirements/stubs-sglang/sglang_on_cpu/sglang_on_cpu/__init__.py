"""SGLang on CPU without its kernels. `start` is imported by every interpreter of the environment."""
