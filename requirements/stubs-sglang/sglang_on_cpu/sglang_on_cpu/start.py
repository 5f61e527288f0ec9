"""What must be in place before SGLang is imported. A .pth file imports this in every interpreter of the
environment, because SGLang spawns its scheduler and its detokenizer.

Modules that SGLang imports and, for a text model on CPU, never runs are stubs here. Finders are appended to
sys.meta_path: a package that is really installed always wins.
"""

import os
import sys

from sglang_on_cpu.stubs import KernelFinder, StubFinder

# Without it SGLang's rotary embedding wants vLLM's compiled operators.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

# `datasets` is only for SGLang's own test fixtures, of which our tests borrow a few.
sys.meta_path += [StubFinder({"triton", "torchvision", "datasets", "IPython"}), KernelFinder()]
